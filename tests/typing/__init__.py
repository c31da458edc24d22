"""The types that users' code gets, checked by mypy and pyright: ``python -m tests.typing``. Part of ``.ci/run``."""
