"""The tests; the tree mirrors the package."""
