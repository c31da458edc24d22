"""Stands for the next release: its task model has a column that the planted migration adds."""
