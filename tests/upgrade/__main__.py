"""``python -m tests.upgrade``: run two releases side by side. Arguments go to pytest.

``--rows 10000000``: measure, too, how long migrations of a table of that size keep producers and pollers waiting.
"""

import sys

import pytest

if __name__ == "__main__":
    measured = ["-n", "0", "-s", "-k", "beside"] if "--rows" in sys.argv else []
    sys.exit(pytest.main(["-m", "upgrade", "tests/upgrade", *measured, *sys.argv[1:]]))
