"""``python -m django_dbtaskqueue.pipeline JOB``, and what ``spark-submit`` is given."""

from __future__ import annotations

import sys

from django_dbtaskqueue.pipeline.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
