"""``python -m tests.stranger``: run the stranger's test; arguments go to pytest."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["-m", "stranger", "tests/stranger", *sys.argv[1:]]))
