"""Seeded bugs: each breaks a piece of the package, and a narrow pytest command must notice it.

``seeded_bugs.txt`` is the table, ``python -m tests.mutations`` runs it. A bug that survives is a test to write.
"""
