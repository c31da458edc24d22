"""Everything is broken at once, by a seed; then checkers read what was written down, and find nothing wrong.

Three kinds of evidence, none of them written by the code under test:

- ``history.py``: triggers write each change of a task into a table, in the same transaction.
- ``ledger.py``: producers and processors append to files outside the database what they began and what was answered.
- ``nemesis.py``: the faults write down what they did, and when.

``checkers.py`` has one function for each promise. ``test_checkers.py`` plants a violation for each of them.
``--mutations`` breaks the package on purpose, one promise at a time: a run that stays green then is a missing checker.

``pytest tests/faults`` runs the short size; ``python -m tests.faults --minutes 30 --seed 7`` the soak.
"""
