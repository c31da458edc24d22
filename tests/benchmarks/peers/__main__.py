"""``python -m tests.benchmarks.peers NAME WAY …``: let one peer do one thing."""

import os
import sys
from importlib import import_module
from time import monotonic, process_time

from tests.benchmarks.children import begin, finish
from tests.benchmarks.producer import per_second


def cpu() -> float:
    times = os.times()
    return process_time() + times.children_user + times.children_system


name, way, *arguments = sys.argv[1:]
act = getattr(import_module(f"tests.benchmarks.peers.{name}"), way)
if way == "single":
    enqueue = act()
    begin()
    finish(**per_second(enqueue))
else:
    begin()
    used, began = cpu(), monotonic()
    answer = act(*map(int, arguments))
    finish(tasks=answer or 0, began=began, ended=monotonic(), cpu=cpu() - used)
os._exit(0)  # some leave threads or processes behind
