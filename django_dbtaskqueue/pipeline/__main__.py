"""``python -m django_dbtaskqueue.pipeline JOB``, and what ``spark-submit`` is given."""

import sys

from django_dbtaskqueue.pipeline.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
