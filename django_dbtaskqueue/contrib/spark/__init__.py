"""Processing on a Spark cluster: ``manage.py runtaskpoller --executor spark --master spark://HOST:7077``.

Names are resolved on first use: Spark's workers import this package before Django is set up there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from django_dbtaskqueue.contrib.spark.executor import SparkExecutor

__all__ = ["SparkExecutor"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.executor"), name)
