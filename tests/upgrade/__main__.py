"""``python -m tests.upgrade``: run two releases side by side. Arguments go to pytest.

``UPGRADE_ROWS=10000000 python -m tests.upgrade -s -k beside`` measures how long migrations of such a table hold others.
"""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["-m", "upgrade", "tests/upgrade", *sys.argv[1:]]))
