"""Upgrades without a pause: the wheel of an earlier state and the wheel of today work side by side on one database.

``python -m tests.upgrade`` runs the tests; a plain ``pytest`` leaves them out.
"""
