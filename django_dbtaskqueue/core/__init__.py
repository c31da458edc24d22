"""What a task is: states, outcomes, leases, retries, JSON, texts. Standard library only: Spark executors import it."""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module

__version__ = "0.1.0"

logger = logging.getLogger("django_dbtaskqueue")  # of the whole package


def lazy_names(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports names, listed by module, at their first use."""
    home = {name: module for module, names in homes.items() for name in names}

    def find(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home[name]}"), name)

    return find, lambda: sorted({*vars(sys.modules[package]), *home})
