"""``python -m tests.core.statements``: print every statement, or with ``--write`` store them."""

import sys

from django_dbtaskqueue.core.sql.dialects import DIALECTS
from tests.core.statements import file_of, text_of

for vendor in DIALECTS:
    if "--write" in sys.argv:
        file_of(vendor).write_text(text_of(vendor))
    else:
        print(text_of(vendor))
