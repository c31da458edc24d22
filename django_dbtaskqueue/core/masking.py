"""Masking: secrets are replaced before a value is shown or exported, and before a failure's text is stored or logged.

A secret is recognised by the name of its key. ``DBTASKQUEUE["MASK"]`` lists parts of keys, in any case and however the
key joins its words: ``api_key`` masks ``X-Api-Key`` and ``apiKey``. An entry that begins with ``=`` is a whole word of
the key: ``=pin`` masks ``card_pin`` and not ``shipping``. A payload type marks fields by ``Annotated[str, Sensitive]``.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from string import ascii_lowercase, ascii_uppercase
from typing import NamedTuple, get_args, get_origin, get_type_hints


def _in_any_case(char: str) -> str:
    both = char.lower() + char.upper()
    return f"[{both}]" if len(both) == 2 and both[0] != both[1] else re.escape(char)


def _keys(keys: Sequence[str], joint: str, before: str = "", after: str = "") -> list[str]:
    """Return the pattern of any of the keys in any case, with joints between their characters; none without keys."""
    found = "|".join(joint.join(map(_in_any_case, key)) for key in keys)
    return [f"{before}(?:{found}){after}"] if found else []


MASKED = "•••"
# From Django's SafeExceptionReporterFilter and the denylist of sentry-sdk. Both also hide words that are common in
# tasks ("key", "api", "remote_addr"): those are left out here.
MASKED_KEYS = (
    "password", "passwd", "passphrase", "passcode", "passwort", "pwd", "token", "secret", "authorization",
    "authentication", "api_key", "access_key", "account_key", "private_key", "ssh_key", "signing_key",
    "encryption_key", "credential", "cookie", "session", "csrf", "xsrf", "signature", "credit_card", "card_number",
    "=pass", "=auth", "=jwt", "=otp", "=pin", "=cvv", "=cvv2", "=cvc", "=iban", "=ssn", "=sig", "=sid", "=dsn", "=pan",
)  # fmt: skip
MAX_SHOWN_DEPTH, TOO_DEEP = 100, "…"  # lists and objects in each other; what is deeper is not shown
WORD_MARK = "="
JOINTS = " \t\r\n\f\v_.-"
LOWER, PLAIN_ASCII = (str.maketrans(ascii_uppercase, ascii_lowercase, without) for without in ("", JOINTS))
NAME_KEYS = ("name", "key", "header", "type", "field", "id", "label", "var", "variable", "parameter", "k")
VALUE_KEYS = ("value", "values", "val", "content", "v")  # {"name": "Authorization", "value": "…"}

# PostgreSQL reads these patterns, too, and finds the same: a search compares what they leave of a text. So they have
# explicit classes, no flag but DOTALL and no reference to a group, and no two alternatives fit at one place.
GAP, INK = r"[ \t\n\r\f\v]", r"[^ \t\n\r\f\v]"
CAMEL = "(?<=[a-z0-9])(?=[A-Z])"
WORD_BEGINS, WORD_ENDS = f"(?:(?<![A-Za-z0-9])|%5[bB]|{CAMEL})", f"(?:(?![A-Za-z0-9])|{CAMEL})"
REST_OF_KEY = r"[^ \t\n\r\f\v!-,/:-@\[-\^`{-~]{0,64}"  # letters, digits, and - . _
SIGN = "(?:[!+]?=+(?:>|(?![=>]))|%(?:25)*3[dD])"  # also as addresses have it
IN_LISTS = rf"(?:\[[0-9]{{1,9}}\]{REST_OF_KEY}){{0,8}}"  # tokens[0].text: x
# user[password][]=x, environ["TOKEN"] = "x". Not before a colon: prose has one, too.
IN_FORMS = rf"""(?:(?:(?:\[|%5[bB])\\*["']?[A-Za-z0-9_.-]{{0,64}})?\\*["']?(?:\]|%5[dD])){{1,8}}(?=GAP*{SIGN})"""
IN_DOUBLE, IN_SINGLE = r"""(?:\\.|[^"\\])*""", r"""(?:\\.|[^'\\])*"""
LETTERS = "(?:[bBeEfFnNrRtTuUxX]{0,2}|[$@]|[uU]&|b64:|base64:)"  # before a quote
OPENING, MORE = rf"{LETTERS}\\*[\"']", rf"[+ \t\n\r\f\v]*{LETTERS}"
QUOTED_TEXT = (  # also 'a' 'b', 'a' + 'b', 'it''s', """a"""
    r"""(?:(?<=\\")(?:\\[^"]|[^\\"])*|(?<=\\')(?:\\[^']|[^\\'])*"""
    rf"""|(?<=[^\\]"){IN_DOUBLE}(?:"{MORE}"{IN_DOUBLE})*|(?<=[^\\]'){IN_SINGLE}(?:'{MORE}'{IN_SINGLE})*)"""
)
# What joins a key to its value, and the value. One without quotes ends at the next gap; after a key and a colon, as in
# a header, and in brackets, with the line, because its real end is not known: too much is better than too little.
EQUALS = rf"""(?:\\*["']GAP*:|%22%3[aA]|\\*["']?GAP*{SIGN})GAP*"""
ITS_VALUE, ITS_NAME = (
    rf"""(?:\\*["']{one}\\*["']GAP*:GAP*|{one}=)""" for keys in (VALUE_KEYS, NAME_KEYS) for one in _keys(keys, "")
)
NEXT = r"""\\*["']?(?:,GAP*|GAP+)"""
OTHERS = (
    rf"""(?:{NEXT}(?!{ITS_VALUE})(?:\\*["'][A-Za-z_-]+\\*["']GAP*:GAP*|[A-Za-z_-]+=)"""
    r"""(?:\\*["'])?[^"',=\[\]{}()<>\\]*){0,4}"""
)
# {"name": "token", "value": "x"}, <input name="token" type="text" value="x">, ("token", "x"), Token(text="x")
NAMED = rf"""(?=\\*["']){OTHERS}{NEXT}{ITS_VALUE}"""
# To the end of the line, and on while it ends with an opening bracket or a comma, or a closing one begins the next.
BRACKETS = r"(?:[^\n]*(?:[\[{(,][ \t\r]*\n|\n(?=[ \t]*[\]})])))*[^\n]*"
# UUID('x'), Some(Secret("x")), <Token: x>. Brackets that do not end in the line, or are deeper, go on as BRACKETS do.
PLAIN, CALLED = r"""[^ \t\n\r\f\v,;&)}\]"'\[{(<]*""", r"[A-Za-z_][A-Za-z0-9_.]*[\[{(]"
INSIDE = r"""[^\[\](){}"'\n]|'(?:\\[^\n]|[^'\\\n])*'|"(?:\\[^\n]|[^"\\\n])*\""""
NEST = rf"[\[{{(](?:{INSIDE})*[\]}})]"
CALL = rf"(?:[\[{{(](?:{INSIDE}|{NEST})*[\]}})]|<[^<>\n]*>)"
# Token(id=1, value="x"): which of several arguments is the secret is not known
SEVERAL = rf"""\(GAP*(?=[A-Za-z_]+=|{OPENING}|-?[0-9]|{CALLED})(?:(?!,)(?:{INSIDE})|{NEST})*,"""
PAIR, WITHIN = rf"""(?!{NAMED})\\*["'],GAP*""", rf"(?!{SEVERAL})\(GAP*(?:[A-Za-z_]+=)?"
BARE = rf"""(?=[^ \t\n\r\f\v,;&)}}\]"'\[{{(]){PLAIN}(?:{CALL}{PLAIN})*(?:(?!{CALL})(?=[\[{{(<]){BRACKETS})?"""
# password:, and its value in the next lines, as in YAML
BELOW = r"\n[ \t]+(?=INK+[ \t\r]*(?![^\n]))"
LINES = r"(?:[|>][-+0-9]{0,2}[ \t\r]*(?:\n[ \t]+[^\n]*)+|(?:\n[ \t]+-[ \t]+INK+[ \t\r]*(?![^\n]))+)"
SECRET_FORMS = (
    rf"""((?:\\*["']?GAP*(?:{SIGN}|:)GAP*|{NAMED}|{PAIR}|{WITHIN}){OPENING}){QUOTED_TEXT}""",
    rf"""((?:{EQUALS}|{NAMED}|(?:{PAIR}|{WITHIN})(?=-?[0-9]|{CALLED}))){BARE}""",
    rf"""((?:{EQUALS}|{NAMED}|{PAIR}|{WITHIN})(?=[\[{{(])|(?={SEVERAL})){BRACKETS}""",
    rf"(GAP*:(?!GAP*{OPENING})[ \t\r\f\v]*(?:{BELOW})?)(?:{LINES}|INK[^\n]*)",
    r"(\t+)[^ \t\n\r\f\v=:]INK*",
    r"(>)[^<>]+(?=</)",  # <password>x</password>
    r"(\)GAP*=GAP*\()[^)]+",  # Key (token)=(x), as PostgreSQL says
)
OPTION = r"(--?KEYGAP+)[^ \t\n\r\f\v=:-]INK*"
SECRET_IN_TEXT = f"(KEY{IN_LISTS}(?:{IN_FORMS})?)(?:{'|'.join(SECRET_FORMS)})|{OPTION}"  # 9 groups: PostgreSQL's limit
VALUE_FIRST = (
    rf"""(?<![A-Za-z0-9_\\])(?:({ITS_VALUE}{OPENING}){QUOTED_TEXT}(?=\\*["'])"""
    rf"""|({ITS_VALUE})(?!{OPENING})[A-Za-z0-9_.:+/-]+{CALL}?)(?={OTHERS}{NEXT}{ITS_NAME}{OPENING}{REST_OF_KEY}KEY)"""
)
PASSWORD_IN_URL = r"(?<=://)([^ \t\n\r\f\v:/@]*):(?:(?!://)[^ \t\n\r\f\v\"'<>])+@"  # noqa: S105 -- a pattern
CREDENTIALS = (
    rf"(?<![A-Za-z0-9_])(?:([bB][eE][aA][rR][eE][rR]{GAP}+)[A-Za-z0-9_.~+/=-]{{6,}}"
    rf"|([bB][aA][sS][iI][cC]{GAP}+)(?=[A-Za-z+/]*[0-9=])[A-Za-z0-9+/]{{4,}}={{0,2}})"
)
SIGNS = ("://", "bearer", "basic")  # of what has no key
NOTHING = "(?!.)."


class Patterns(NamedTuple):
    """Regular expressions of secrets, by what ``DBTASKQUEUE["MASK"]`` and payload types say."""

    name: str  # finds a secret's name in a key
    any: str  # finds something in each text that is masked, and quickly
    text: str  # finds a key in a text and its value; its groups are what stays of it before the mask
    value_first: str  # finds a value in a text before the name of what it is

    @property
    def replaced(self) -> list[tuple[str, str]]:
        """What is replaced in a text, in turn, and by what, as PostgreSQL writes it."""
        groups = "".join(f"\\{number + 1}" for number in range(len(SECRET_FORMS) + 2))
        value, url = (self.value_first, rf"\1\2{MASKED}"), (PASSWORD_IN_URL, rf"\1:{MASKED}@")
        return [(self.text, groups + MASKED), value, url, (CREDENTIALS, rf"\1\2{MASKED}")]


class Sensitive:
    """Marks a field of a payload type, as in ``iban: Annotated[str, Sensitive]``: its values are masked everywhere."""


class Unreadable:
    """What a row has in place of a value that Python cannot read. It can be shown; as JSON it is refused."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __str__(self) -> str:
        return self.words

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unreadable) and other.words == self.words


_sensitive: frozenset[str] = frozenset()  # names of marked fields, as ``_plain`` writes them
secret_keys: Callable[[], Iterable[str]] = MASKED_KEYS.__iter__  # the settings put theirs here


def learn(kind: object) -> None:
    """Remember the fields of a payload type that are marked as ``Sensitive``, also of types inside it."""
    global _sensitive
    found, names = _parts(kind), set[str]()
    for one in found:  # it grows
        for name, parts in _fields(one) if isinstance(one, type) else ():
            names |= {name} if any(part is Sensitive or isinstance(part, Sensitive) for part in parts) else set()
            found += [part for part in parts if part not in found]
    _sensitive |= {_plain(name) for name in names}


def masked(value: object) -> object:
    """Return a JSON value with the values of secret keys replaced, however deep; the value itself stays as it is.

    Text inside it is treated as ``masked_text`` does.
    """
    return _masked(value, current_rules())


def is_masked(key: str) -> bool:
    """Whether the values of a key, or of one key of a path, are replaced, or a part of the key itself."""
    rules = current_rules()
    return any(_is_secret(one, rules) for one in (key, *key.split("."))) or MASKED in key or masked_text(key) != key


def masked_text(text: str, rules: "Rules | None" = None) -> str:
    """Return a text, such as a traceback, without the values of secret keys and the passwords in addresses.

    ``password=x``, ``"password": "x"``, ``--password x``, ``Authorization: Bearer x``. ``rules``: other ones.
    """
    rules = current_rules() if rules is None else rules
    plain = text.translate(PLAIN_ASCII)
    if any(one in plain for keys in (*rules, SIGNS) for one in keys):  # most texts have nothing; the patterns are slow
        for pattern, by in _patterns(rules).replaced:
            text = _compiled(pattern).sub(by, text)
    return text


Rules = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]  # parts of keys, words of keys, whole keys


def sql_patterns() -> Patterns:
    """Return the patterns that ``masked`` and ``masked_text`` use; PostgreSQL reads them, too."""
    return _patterns(current_rules())


def current_rules() -> Rules:
    """Return what this process masks."""
    return _rules(tuple(secret_keys()), _sensitive)


@lru_cache(maxsize=8)
def _rules(keys: tuple[str, ...], sensitive: frozenset[str]) -> Rules:
    parts = tuple(plain for one in keys if not one.startswith(WORD_MARK) and (plain := _plain(one)))
    words = tuple(plain for one in keys if one.startswith(WORD_MARK) and (plain := _plain(one[1:])))
    return parts, words, tuple(sorted(sensitive))


def _plain(key: str) -> str:
    return "".join(key.split()).translate(PLAIN_ASCII).lower()


def _masked(value: object, rules: Rules, depth: int = 0) -> object:
    if depth > MAX_SHOWN_DEPTH:
        return TOO_DEEP
    if isinstance(value, Mapping):
        hidden, shown = _hidden_keys(value, rules), dict[object, object]()
        for key, inner in value.items():
            name = masked_text(key, rules) if isinstance(key, str) else key
            while name in shown:  # two keys that differ only by their secrets
                name = f"{name}{MASKED}{len(shown)}"
            shown[name] = MASKED if key in hidden else _masked(inner, rules, depth + 1)
        return shown
    if isinstance(value, list | tuple):
        pair = len(value) > 1 and isinstance(value[0], str) and _is_secret(value[0], rules)
        return [MASKED if pair and at == 1 else _masked(inner, rules, depth + 1) for at, inner in enumerate(value)]
    return masked_text(str(value), rules) if isinstance(value, str | Unreadable) else value


def _hidden_keys(value: Mapping[object, object], rules: Rules) -> set[object]:
    plain = {key: str(key).translate(LOWER) for key in value}
    names = [value[key] for key, lower in plain.items() if lower in NAME_KEYS]
    named = any(isinstance(name, str) and _is_secret(name, rules) for name in names)
    return {key for key in value if _is_secret(str(key), rules) or (named and plain[key] in VALUE_KEYS)}


@lru_cache(maxsize=4096)
def _is_secret(key: str, rules: Rules) -> bool:
    return _compiled(_patterns(rules).name).search(key) is not None


@lru_cache(maxsize=16)
def _patterns(rules: Rules) -> Patterns:
    parts, words, names = rules
    several, one = f"[{JOINTS}]*", f"[{JOINTS}]?"
    whole = f"^{several}", f"{several}$"
    name = [*_keys(parts, several), *_keys(words, several, WORD_BEGINS, WORD_ENDS), *_keys(names, several, *whole)]
    word = _keys((*words, *names), one, WORD_BEGINS, WORD_ENDS)
    key = f"(?:{'|'.join([*_keys(parts, one, '', REST_OF_KEY), *word]) or NOTHING})"
    texts = [form.replace("KEY", key).replace("GAP", GAP).replace("INK", INK) for form in (SECRET_IN_TEXT, VALUE_FIRST)]
    signs = "://", f"[eE][rR]{GAP}", f"[iI][cC]{GAP}"
    return Patterns("|".join(name) or NOTHING, "|".join([*_keys(parts, one), *word, *signs]), *texts)


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


def _fields(kind: type) -> Iterator[tuple[str, list[object]]]:
    """Yield each field of a class, and what is in its hint: none where names cannot be resolved here."""
    with suppress(Exception):
        for name, hint in get_type_hints(kind, localns={kind.__name__: kind}, include_extras=True).items():
            yield name, _parts(hint)
    for name, field in getattr(kind, "__pydantic_fields__", {}).items():
        for alias in {name, field.alias, field.serialization_alias} - {None}:
            yield alias, [*_parts(field.annotation), *field.metadata]


def _parts(hint: object) -> list[object]:
    """Return a hint and all that is in it: of ``Annotated[str, Sensitive] | None`` also the mark."""
    found = [hint]
    for one in found:  # it grows
        inside = get_origin(one), *get_args(one), getattr(one, "__supertype__", None), getattr(one, "__value__", None)
        found += [part for part in inside if part not in found]
    return found
