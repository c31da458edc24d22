"""``python -m tests.upgrade``: run two releases side by side; arguments go to pytest."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["-m", "upgrade", "tests/upgrade", *sys.argv[1:]]))
