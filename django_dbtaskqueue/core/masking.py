"""Masking: secrets are replaced before a value is shown or exported.

A secret is recognised by the name of its key: ``DBTASKQUEUE["MASK"]`` lists parts of keys, in any case and however the
key joins its words. ``api_key`` masks ``X-Api-Key`` and ``apiKey``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from django.utils.translation import gettext as _

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.exceptions import OperationRefused

MASKED = "•••"
ABSENT = "(absent)"  # in a difference: the key is not there
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


def with_secrets_of(stored: Any, edited: Any) -> Any:
    """Return a payload that a person edited as it was shown, masked, with the secrets of the stored one.

    A secret keeps its value, also where its key was left out. Raises ``OperationRefused`` where a secret was changed,
    or where the mask stands in the place of none.
    """
    parts = _parts()
    return _with_secrets(stored, edited, "", parts, _pattern(parts))


def difference(before: Any, after: Any, path: str = "") -> list[dict[str, Any]]:
    """Return what differs between two JSON values, both masked: the path, before, after."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(key for key in after if key not in before)]
        return [
            row
            for key in keys
            if before.get(key, ABSENT) != after.get(key, ABSENT)
            for row in difference(before.get(key, ABSENT), after.get(key, ABSENT), f"{path}.{key}" if path else key)
        ]
    return [] if before == after else [{"path": path, "before": masked(before), "after": masked(after)}]


def _with_secrets(stored: Any, edited: Any, path: str, parts: tuple[str, ...], pattern: re.Pattern[str]) -> Any:
    if isinstance(edited, dict):
        old = stored if isinstance(stored, dict) else {}
        found = {key: value for key, value in old.items() if _is_secret(key, parts)}
        for key, value in edited.items():
            at = f"{path}.{key}" if path else key
            if key not in found:
                found[key] = _with_secrets(old.get(key), value, at, parts, pattern)
            elif value not in (MASKED, found[key]):
                raise OperationRefused(_("%(path)s is masked and cannot be changed here.") % {"path": at})
        return {key: found[key] for key in [*edited, *(key for key in found if key not in edited)]}
    if isinstance(edited, list):
        old_items = stored if isinstance(stored, list) else []
        if len(old_items) != len(edited) and _masked(old_items, parts, pattern) != old_items:
            raise OperationRefused(
                _("%(path)s holds secrets: its items can be changed only one by one.") % {"path": path}
            )
        pairs = zip_longest(old_items[: len(edited)], edited)
        return [_with_secrets(was, value, f"{path}[{at}]", parts, pattern) for at, (was, value) in enumerate(pairs)]
    if isinstance(edited, str) and MASKED in edited:
        if isinstance(stored, str) and edited == _masked_text(stored, pattern):
            return stored
        words = _("%(path)s holds ••• where the payload has no secret, or another text around it.")
        raise OperationRefused(words % {"path": path or "payload"})
    return edited


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
