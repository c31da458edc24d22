"""``python -m tests.benchmarks.peers NAME WAY …``: let one peer do one thing."""

from __future__ import annotations

import sys
from importlib import import_module

from tests.benchmarks.peers.base import serve

serve(import_module(f"tests.benchmarks.peers.{sys.argv[1]}").PEER, *sys.argv[2:])
