"""Masking: secrets are replaced before a value is shown or exported.

A secret is recognised by the name of its key: ``DBTASKQUEUE["MASK"]`` lists parts of keys, in any case and however the
key joins its words. ``api_key`` masks ``X-Api-Key`` and ``apiKey``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from django_dbtaskqueue.conf import settings as conf

MASKED = "•••"
KEY_JOINTS = re.compile(r"[\s_.-]+")
URL_PASSWORD = re.compile(r"(?<=://)([^\s:/@]*):[^\s/@]+@")


def masked(value: object) -> object:
    """Return a JSON value with the values of secret keys replaced, however deep; the value itself stays as it is.

    Text inside it is treated as ``masked_text`` does.
    """
    parts = _parts()
    return _masked(value, parts, _pattern(parts))


def is_masked(key: str) -> bool:
    """Whether the values of a key, or of one key of a path, are replaced."""
    return _is_secret(key, _parts())


def masked_text(text: str) -> str:
    """Return a text, such as a traceback, without the values of secret keys and the passwords in addresses.

    ``password=x``, ``password: x``, ``"password": "x"``, ``Authorization: Bearer x``.
    """
    return _masked_text(text, _pattern(_parts()))


def _masked(value: object, parts: tuple[str, ...], pattern: re.Pattern[str]) -> object:
    if isinstance(value, Mapping):
        return {
            key: MASKED if _is_secret(str(key), parts) else _masked(inner, parts, pattern)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_masked(inner, parts, pattern) for inner in value]
    return _masked_text(value, pattern) if isinstance(value, str) else value


def _masked_text(text: str, pattern: re.Pattern[str]) -> str:
    return URL_PASSWORD.sub(rf"\1:{MASKED}@", pattern.sub(_mask, text))


def _is_secret(key: str, parts: tuple[str, ...]) -> bool:
    plain = KEY_JOINTS.sub("", key).lower()
    return any(part in plain for part in parts)


def _parts() -> tuple[str, ...]:
    """Return the parts of secret keys in lower case, without what joins words."""
    return tuple(part for one in conf.settings().mask if (part := KEY_JOINTS.sub("", one).lower()))


@lru_cache(maxsize=16)
def _pattern(parts: tuple[str, ...]) -> re.Pattern[str]:
    """Find a key with a secret part, and what joins it to its value: ``before``; the value; a closing quote: ``after``.

    A bare value ends at the next gap. After a bare key and a colon, as in a header, it ends with the line, because its
    real end is not known: too much masked is better than too little.
    """
    words = "|".join(r"[\s_.-]?".join(re.escape(part)) for part in parts) or r"(?!)"
    key = rf"""(?:{words})[\w.-]{{0,64}}"""  # what stands before it in the key stays as it is
    quoted = r"""[bru]*(?P<quote>\\?["'])"""
    kinds = (
        rf"""(?P<before>{key}\\?["']?\s*(?:=>|[=:])\s*{quoted})(?:(?!(?P=quote))(?:\\.|.))*(?P<after>(?P=quote)|\Z)""",
        rf"""(?P<before_2>{key}(?:\\?["']\s*:|\s*=>?)\s*)[^\s,;&)}}\]"']+""",
        rf"""(?P<before_3>{key}\s*:[^\S\n]*)[^\n]+""",
    )
    return re.compile("|".join(kinds), re.IGNORECASE | re.DOTALL)


def _mask(found: re.Match[str]) -> str:
    before = found["before"] or found["before_2"] or found["before_3"]
    return f"{before}{MASKED}{found['after'] or ''}"
