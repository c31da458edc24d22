"""Many payloads at once: the promises of ``payload``, by few checks over all of them."""

from __future__ import annotations

import json
from typing import Any

from django_dbtaskqueue.core.exceptions import PayloadError
from django_dbtaskqueue.core.json import DEFAULT_LIMITS, Limits, dumps

try:
    import orjson
except ImportError:  # the "speed" extra is not installed
    orjson = None  # type: ignore[assignment,unused-ignore]
else:
    from django_dbtaskqueue.core.json import BIG_EXPONENT, ORJSON_OPTIONS, STRINGS

_encode = json.JSONEncoder(ensure_ascii=False).encode


def dumps_many(values: list[Any], *, limits: Limits = DEFAULT_LIMITS) -> list[bytes] | None:
    """Return what ``dumps`` returns for each value, as UTF-8.

    None when one of them is refused, or needs a closer look: ``dumps`` on each tells which, and where in it.
    """
    try:
        return _one_by_one(values, limits) if orjson is None else _together(values, limits)
    except (TypeError, ValueError, RecursionError, PayloadError):
        return None


def _together(values: list[Any], limits: Limits) -> list[bytes] | None:
    write, options = orjson.dumps, ORJSON_OPTIONS
    raws = [write(value, None, options) for value in values]
    together = b"[" + b",".join(raws) + b"]"
    if b"\\u0000" in together or orjson.loads(together) != values:
        return None
    if BIG_EXPONENT(together) is not None and BIG_EXPONENT(STRINGS.sub(b"", together)) is not None:
        return None
    for raw in raws:
        if len(raw) > 2 * limits.depth and raw.count(b"[") + raw.count(b"{") > limits.depth:
            return None
    return None if len(together) > limits.size and any(len(raw) > limits.size for raw in raws) else raws


def _one_by_one(values: list[Any], limits: Limits) -> list[bytes]:
    return [dumps(value, limits=limits).encode() for value in values]


def text_array(texts: list[str | None]) -> str:
    """Return a JSON array of texts, which must be without lone surrogates."""
    return _encode(texts) if orjson is None else orjson.dumps(texts).decode()
