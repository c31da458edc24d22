"""The tests; the tree mirrors the package."""

import os

if "DBTASKQUEUE_MUTATION" in os.environ:
    from tests.mutations import seeded

    seeded.install(os.environ["DBTASKQUEUE_MUTATION"])
