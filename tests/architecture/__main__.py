"""``python -m tests.architecture`` prints the shape of the package in figures; with ``words``, names with old words."""

import sys

from tests.architecture import figures, words

print(words.report() if sys.argv[1:] == ["words"] else figures.report())
