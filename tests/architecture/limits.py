"""How large each figure of the package may be. A limit above its target may only fall."""

from __future__ import annotations

LIMITS: dict[str, int] = {
    "lines": 31_000,
    "files": 181,
    "entries at the top": 20,
    "lines of the longest file": 400,
    "file names twice": 0,
    "constant names twice": 0,
    "old names": 0,
    "longest import chain": 12,
    "Any": 700,
    "files that branch on outcomes": 8,
    "enqueue: calls": 54,
    "enqueue: modules": 12,
    "plain enqueue: calls": 44,
    "plain enqueue: modules": 12,
    "task: calls": 170,
    "task: modules": 26,
    "median function lines": 8,
    "90 % of functions, lines": 20,
    "function lines": 40,
    "positional arguments": 6,
}
TARGETS: dict[str, int] = {
    "lines": 28_500,
    "files": 170,
    "entries at the top": 20,
    "file names twice": 0,
    "constant names twice": 0,
    "old names": 0,
    "longest import chain": 12,
    "files that branch on outcomes": 4,
    "enqueue: calls": 40,
    "enqueue: modules": 8,
    "task: calls": 130,
    "task: modules": 15,
}
LONG_FILE_LINES = 300
