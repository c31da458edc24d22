"""The tests; the tree mirrors the package."""

import os

if os.environ.get("DBTASKQUEUE_SEEDED_BUG"):
    from tests.mutations import seeded

    seeded.seed()
