"""``python -m tests.upgrade``: run two releases side by side. Arguments go to pytest.

``--rows 10000000``: measure instead, on a table of that size, how long migrations keep a producer and a poller waiting.
"""

import sys

import pytest

if __name__ == "__main__":
    measured = ["-n", "0", "-s", "-k", "large"] if "--rows" in sys.argv else []
    sys.exit(pytest.main(["-m", "upgrade", "tests/upgrade", *measured, *sys.argv[1:]]))
