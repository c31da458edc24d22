"""Masking: secrets are replaced before a value is shown or exported, and before a failure's text is stored or logged.

A secret is recognised by the name of its key. ``DBTASKQUEUE["MASK"]`` lists parts of keys, in any case and however the
key joins its words: ``api_key`` masks ``X-Api-Key`` and ``apiKey``. An entry that begins with ``=`` is a whole word of
the key: ``=pin`` masks ``card_pin`` and not ``shipping``. A payload type marks fields by ``Annotated[str, Sensitive]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from string import ascii_lowercase, ascii_uppercase
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from django_dbtaskqueue.core.json import Unreadable

MASKED = "•••"
# From Django's SafeExceptionReporterFilter and the denylist of sentry-sdk. Both also hide words that are common in
# tasks ("key", "api", "remote_addr"): those are left out here.
MASKED_KEYS = (
    "password", "passwd", "passphrase", "token", "secret", "authorization", "authentication", "api_key", "access_key",
    "private_key", "signing_key", "encryption_key", "credential", "cookie", "session", "csrf", "xsrf", "signature",
    "credit_card", "card_number", "=pass", "=pwd", "=auth", "=jwt", "=otp", "=pin", "=cvv", "=cvc", "=iban", "=ssn",
    "=sig", "=sid",
)  # fmt: skip
MAX_SHOWN_DEPTH, TOO_DEEP = 100, "…"  # lists and objects in each other; what is deeper is not shown
WORD_MARK = "="
KEY_JOINTS = re.compile(r"[\s_.-]+")
JOINTS = "_.- \t\r\n"
PLAIN_ASCII = str.maketrans(ascii_uppercase, ascii_lowercase, JOINTS)
WORD_BEGINS, WORD_ENDS = "(?:(?<![A-Za-z0-9])|(?-i:(?<=[a-z0-9])(?=[A-Z])))", "(?![A-Za-z0-9])"
CAMEL_JOINT = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
URL_PASSWORD = re.compile(r"(?<=://)([^\s:/@]*):[^\s\"'<>]+@")
BEARER = re.compile(r"(\bBearer\s+)[\w.~+/=-]{6,}")
NAME_KEYS, VALUE_KEYS = ("name", "key", "header"), ("value", "values")  # {"name": "Authorization", "value": "…"}


class Sensitive:
    """Marks a field of a payload type, as in ``iban: Annotated[str, Sensitive]``: its values are masked everywhere."""


_sensitive: frozenset[str] = frozenset()  # names of marked fields, as ``_plain`` writes them


def _default_keys() -> Sequence[str]:
    return MASKED_KEYS


secret_keys: Callable[[], Sequence[str]] = _default_keys  # the settings put theirs here


def use_keys(source: Callable[[], Sequence[str]]) -> None:
    """Take the parts of secret keys from ``source`` from now on."""
    global secret_keys
    secret_keys = source


def learn(kind: object) -> None:
    """Remember the fields of a payload type that are marked as ``Sensitive``, also of types inside it."""
    global _sensitive
    _sensitive |= {_plain(name) for name in _marked(kind, set())}


def masked(value: object) -> object:
    """Return a JSON value with the values of secret keys replaced, however deep; the value itself stays as it is.

    Text inside it is treated as ``masked_text`` does.
    """
    return _masked(value, _rules())


def is_masked(key: str) -> bool:
    """Whether the values of a key, or of one key of a path, are replaced."""
    rules = _rules()
    return _is_secret(key, rules) or any(_is_secret(step, rules) for step in key.split("."))


def masked_text(text: str) -> str:
    """Return a text, such as a traceback, without the values of secret keys and the passwords in addresses.

    ``password=x``, ``password: x``, ``"password": "x"``, ``--password x``, ``Authorization: Bearer x``.
    """
    return _masked_text(text, _rules())


Rules = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]  # parts of keys, words of keys, whole keys


def _rules() -> Rules:
    keys = tuple(secret_keys())
    parts = tuple(plain for one in keys if not one.startswith(WORD_MARK) and (plain := _plain(one)))
    words = tuple(plain for one in keys if one.startswith(WORD_MARK) and (plain := _plain(one[1:])))
    return parts, words, tuple(sorted(_sensitive))


def _plain(key: str) -> str:
    return KEY_JOINTS.sub("", key).lower()


def _masked(value: object, rules: Rules, depth: int = 0) -> object:
    if depth > MAX_SHOWN_DEPTH:
        return TOO_DEEP
    if isinstance(value, Mapping):
        named = any(isinstance(name := value.get(key), str) and _is_secret(name, rules) for key in NAME_KEYS)
        return {
            key: MASKED
            if _is_secret(str(key), rules) or (named and key in VALUE_KEYS)
            else _masked(inner, rules, depth + 1)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        if len(value) == 2 and isinstance(value[0], str) and _is_secret(value[0], rules):
            return [value[0], MASKED]
        return [_masked(inner, rules, depth + 1) for inner in value]
    return _masked_text(str(value), rules) if isinstance(value, str | Unreadable) else value


def _masked_text(text: str, rules: Rules) -> str:
    found, end = [], 0
    pattern = _pattern(rules)
    for begin in _places_of_keys(text, rules):
        match = pattern.match(text, begin) if begin >= end else None
        if match:
            found += [text[end:begin], _mask(match)]
            end = match.end()
    text = "".join(found) + text[end:] if found else text
    if "://" in text:
        text = URL_PASSWORD.sub(rf"\1:{MASKED}@", text)
    return BEARER.sub(rf"\1{MASKED}", text) if "earer" in text else text


def _places_of_keys(text: str, rules: Rules) -> list[int]:
    """Return where the key of a secret may begin. Quick, because most texts have none and the pattern is slow."""
    parts, words, names = rules
    plain = text.translate(PLAIN_ASCII)
    places: set[int] = set()
    if any(one in plain for one in words):
        places = {found.start() for found in _words_pattern(words).finditer(text)}
    if wanted := [one for one in (*parts, *names) if one in plain]:
        kept = [place for place, char in enumerate(text) if char not in JOINTS]
        for one in wanted:
            places |= {kept[found.start()] for found in re.finditer(re.escape(one), plain)}
    # An option of a command line begins with its dashes.
    options = {place - dashes for place in places for dashes in (1, 2) if text[place - dashes : place] == "-" * dashes}
    return sorted(places | options)


@lru_cache(maxsize=16)
def _words_pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"{WORD_BEGINS}(?:{'|'.join(map(re.escape, words))}){WORD_ENDS}", re.IGNORECASE)


@lru_cache(maxsize=4096)
def _is_secret(key: str, rules: Rules) -> bool:
    parts, words, names = rules
    plain = _plain(key)
    if plain in names or any(part in plain for part in parts):
        return True
    return not {one.lower() for one in KEY_JOINTS.split(CAMEL_JOINT.sub("_", key))}.isdisjoint(words)


@lru_cache(maxsize=16)
def _pattern(rules: Rules) -> re.Pattern[str]:
    """Find a key with a secret part, and what joins it to its value: ``before``; the value; a closing quote: ``after``.

    A bare value ends at the next gap. After a bare key and a colon, as in a header, it ends with the line, because its
    real end is not known: too much masked is better than too little.
    """
    parts, words, names = rules
    joint = r"[\s_.-]?"
    inside, whole = ("|".join(joint.join(map(re.escape, one)) for one in group) for group in (parts, (*words, *names)))
    found = [rf"(?:{inside})[\w.-]{{0,64}}"] if inside else []  # what stands before it in the key stays as it is
    found += [rf"{WORD_BEGINS}(?:{whole}){WORD_ENDS}"] if whole else []
    key = f"(?:{'|'.join(found)})" if found else "(?!)"
    quoted = r"""[bru]*(?P<quote>\\?["'])"""
    kinds = (
        rf"""(?P<before>{key}\\?["']?\s*(?:=>|[=:])\s*{quoted})(?:(?!(?P=quote))(?:\\.|.))*(?P<after>(?P=quote)|\Z)""",
        rf"""(?P<before_2>{key}(?:\\?["']\s*:|\s*=>?)\s*)[^\s,;&)}}\]"']+""",
        rf"""(?P<before_3>{key}\s*:[^\S\n]*)[^\n]+""",
        rf"""(?P<before_4>--?{key}\s+)[^\s-]\S*""",
    )
    return re.compile("|".join(kinds), re.IGNORECASE | re.DOTALL)


def _mask(found: re.Match[str]) -> str:
    before = found["before"] or found["before_2"] or found["before_3"] or found["before_4"]
    return f"{before}{MASKED}{found['after'] or ''}"


def _marked(kind: Any, seen: set[Any]) -> set[str]:
    """Return the names of the marked fields of a type and of the types inside it."""
    found: set[str] = set()
    if get_origin(kind) is not None:
        for one in get_args(kind):
            found |= _marked(one, seen)
    elif isinstance(kind, type) and kind not in seen:
        seen.add(kind)
        try:
            hints = get_type_hints(kind, include_extras=True)
        except Exception:  # a type whose names cannot be resolved here: nothing is known of its fields
            return found
        for name, hint in hints.items():
            marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
            if any(mark is Sensitive or isinstance(mark, Sensitive) for mark in marks):
                found.add(name)
            found |= _marked(hint, seen)
    return found
