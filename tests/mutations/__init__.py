"""Seeded bugs: each one breaks a piece of the package, and a narrow pytest command must notice it.

``python -m tests.mutations [WORD ...]`` runs them all, or those whose place or name has one of the words. A bug that
survives is a test to write. ``seeded_bugs.txt`` is the table; ``seeded.py`` applies a bug while its module is imported.
"""
