"""``python -m tests.benchmarks.peers NAME WAY …``: let one peer do one thing, for a ``Worker``."""

import os
import sys
from importlib import import_module

from tests.benchmarks.children import at_go, timed
from tests.benchmarks.producer import per_second

name, way, *arguments = sys.argv[1:]
act = getattr(import_module(f"tests.benchmarks.peers.{name}"), way)
if way == "single":
    enqueue = act()
    at_go(lambda: per_second(enqueue))
else:
    at_go(lambda: timed(lambda: act(*map(int, arguments)) or 0))
os._exit(0)  # some leave threads or processes behind
