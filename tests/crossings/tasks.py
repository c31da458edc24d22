"""The processors of the crossings, for processes that tests start."""

from tests.crossings import features

features.register()
