"""The search language of operators: one line of text that a page, the API and the command line all read.

``status:ERROR queue:claims ref:UA-15 error:Timeout age:>10m attempt:>=3 payload.carrier:UA -queue:bulk``

Terms are joined by AND, comma separated values by OR; ``-`` negates a term; a star stands for any text at the begin or
the end of a value; quotes hold what has spaces, commas or such a star; a plain word is the beginning of a reference.
Only text is read here: ``query`` asks the database.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Self
from urllib.parse import parse_qs, urlencode

from django.utils.translation import gettext, gettext_lazy as _

from django_dbtaskqueue.core.columns import INTEGER_TYPES, LONG, searched
from django_dbtaskqueue.core.exceptions import SearchError
from django_dbtaskqueue.operations.search.values import READERS, Match, Piece, Reader, Text, meant, written
from django_dbtaskqueue.operations.serializers import is_storable

__all__ = ["Search", "from_url", "parse", "to_text", "to_url"]


@dataclass(frozen=True, slots=True)
class Qualifier:
    """A name before a colon."""

    name: str
    kind: str  # a key of ``values.READERS``
    help: Text


QUALIFIERS = {
    qualifier.name: qualifier
    for qualifier in (
        Qualifier("status", "status", _("CREATED, PROCESSING, COMPLETED, ERROR or POISON")),
        Qualifier(
            "is", "state", _("due, held (under a live lease), parked, scheduled or stale (its lease has expired)")
        ),
        Qualifier("queue", "text", _("the queue's name")),
        Qualifier("ref", "text", _("the reference")),
        Qualifier("id", "number", _("the task's id")),
        Qualifier("error", "part", _("a part of the last error")),
        Qualifier("fingerprint", "text", _("the failure group, of tasks in ERROR or POISON")),
        Qualifier("signal", "text", _("the signal that it waits for")),
        Qualifier("age", "span", _("how long ago it was enqueued")),
        Qualifier("created", "time", _("when it was enqueued: how long ago, or a date")),
        Qualifier("started", "time", _("when its last attempt began")),
        Qualifier("finished", "time", _("when it ended")),
        Qualifier("attempt", "number", _("attempts made of its budget")),
        Qualifier("total", "number", _("how many attempts it had in all")),
        Qualifier("priority", "number", _("its priority")),
        Qualifier("group", "text", _("its group")),
        Qualifier("tag", "text", _("its tag")),
        Qualifier("type", "text", _("its payload type")),
        Qualifier("poller", "text", _("the poller that holds it, or held it last")),
        Qualifier("parked", "text", _("why pollers cannot take it yet")),
    )
}
TYPES = {"text": ("text",), "number": INTEGER_TYPES, "time": ("timestamptz",)}  # of columns, by kind
QUALIFIERS |= {  # those of the table of columns that have no help of their own; "" is a plain word
    name: Qualifier(name, kind, column)
    for kind, types in TYPES.items()
    for name, column in searched(*types).items()
    if name not in ("", *QUALIFIERS)
}

MAX_SEARCH_LENGTH = 4096  # characters
MAX_TERMS = 50  # of a search
MAX_ALTERNATIVES = 1000  # values of a term
MAX_KEYS_OF_PATH = 32
QUOTED = r'"(?:[^"\\]|\\.)*"'
TERM = re.compile(rf'\s*(-?)(?:([A-Za-z_][^\s":,]*):)?((?:{QUOTED}|[^\s"])*)', re.DOTALL)
VALUE = re.compile(rf'(?:{QUOTED}|[^\s",])+', re.DOTALL)
VALUE_LIST = re.compile(rf"{VALUE.pattern}(?:,{VALUE.pattern})*", re.DOTALL)
QUOTED_OR_BARE = re.compile(rf'({QUOTED})|[^\s"]+', re.DOTALL)
ESCAPED = re.compile(r"\\(.)", re.DOTALL)
BARE, BARE_WORD = re.compile(r"[\w./@+#=~$:-]+"), re.compile(r"(?!-)[\w./@+#=~$-]+")  # what needs no quotes
_OR = _("Values of one qualifier are joined by commas, as in status:ERROR,POISON; other searches are made one by one.")
_AND, _NOT = _("Leave it out: all terms must match."), _("A minus negates a term, as in -queue:bulk.")
LOGIC_WORDS = {"OR": _OR, "||": _OR, "|": _OR, "AND": _AND, "&&": _AND, "&": _AND, "NOT": _NOT, "!": _NOT}


@dataclass(frozen=True, slots=True)
class Term:
    """One condition: any of its matches, or with ``negated`` none of them."""

    name: str  # a qualifier, a path such as "payload.carrier", or "" for a plain word
    matches: tuple[Match, ...]
    negated: bool = False

    @property
    def text(self) -> str:
        """The term as ``parse`` reads it."""
        minus = "-" * self.negated
        if not self.name:  # a plain word is a beginning without a star
            return minus + ",".join(_quoted(match.value, BARE_WORD) for match in self.matches)
        return f"{minus}{self.name}:{','.join(written(match, _quoted) for match in self.matches)}"


@dataclass(frozen=True, slots=True)
class Search:
    """All terms of a search."""

    terms: tuple[Term, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.terms)

    def __and__(self, other: Self) -> "Search":
        return Search(self.terms + tuple(term for term in other.terms if term not in self.terms))

    def queues(self) -> tuple[str, ...]:
        """Return the queues the search names exactly; empty when it looks in all of them."""
        for term in self.terms:
            if term.name == "queue" and not term.negated and all(match.op == "=" for match in term.matches):
                return tuple(match.value for match in term.matches)
        return ()


def text_of(**values: object) -> str:
    """Return the text of a search for exact values of any characters, as of ``queue="claims", status="ERROR"``."""
    return to_text(Search(tuple(Term(name, (Match("=", str(value)),)) for name, value in values.items())))


def parse(text: str) -> Search:
    """Return the terms of a search; raise ``SearchError``, which says what was meant instead."""
    if len(text) > MAX_SEARCH_LENGTH:
        words = gettext("a search has at most %(most)s characters, not %(number)s.")
        raise SearchError(_shortened(text), words % {"most": MAX_SEARCH_LENGTH, "number": len(text)})
    terms = tuple(islice(_terms(text), MAX_TERMS + 1))
    if len(terms) > MAX_TERMS:
        raise SearchError(_shortened(text), gettext("a search has at most %(most)s terms.") % {"most": MAX_TERMS})
    return Search(terms)


def to_text(search: Search) -> str:
    """Return the shortest text that ``parse`` reads as ``search``."""
    return " ".join(term.text for term in search.terms)


def to_url(search: Search) -> str:
    """Return the search as a query string: the address of a page that shows it."""
    return urlencode({"q": to_text(search)})


def from_url(query: str) -> Search:
    """Return what ``to_url`` wrote; other parameters are passed over."""
    return parse(" ".join(parse_qs(query.removeprefix("?")).get("q", [])))


def parse_term(name: str, text: str) -> Term:
    """Return one term from a qualifier and the text after its colon; a minus before the text negates."""
    value = text.removeprefix("-")
    return _term(text[: len(text) - len(value)], name, value, f"{name}:{value}")


def _reader_of(name: str, written: str) -> Reader:
    if not name:
        return READERS["word"]
    column, dot, path = name.partition(".")
    if column in LONG:
        if path.count(".") >= MAX_KEYS_OF_PATH:
            words = gettext("a path has at most %(most)s keys.")
            raise SearchError(_shortened(written), words % {"most": MAX_KEYS_OF_PATH})
        if not dot or not all(path.split(".")):
            words = gettext("say which key: %(column)s.carrier:UA, or %(column)s.sender.name:Ada.")
            raise SearchError(written, words % {"column": column})
        return READERS["json"]
    if name not in QUALIFIERS:
        known = [*QUALIFIERS, *(f"{document}.…" for document in LONG)]
        unknown = gettext("%(name)s is not a qualifier.") % {"name": repr(name)} + meant(name, QUALIFIERS)
        others = gettext("Known are %(names)s. Put a reference with a colon in quotes.") % {"names": ", ".join(known)}
        raise SearchError(written, f"{unknown} {others}")
    return READERS[QUALIFIERS[name].kind]


def _terms(text: str) -> Iterator[Term]:
    text, place = text.rstrip(), 0
    while place < len(text):
        found = TERM.match(text, place)
        if found is None or not found[0].strip() or text.startswith('"', found.end()):
            words = gettext('a quote is not closed: close it with ", or write \\" for the character itself.')
            raise SearchError(text[place:].lstrip(), words)
        yield _term(found[1], found[2] or "", found[3], found[0].lstrip())
        place = found.end()


def _term(minus: str, name: str, value: str, written: str) -> Term:
    if not value:
        example = f"{name}:{'ERROR' if name == 'status' else 'something'}" if name else "-queue:bulk"
        words = gettext("there is no value after the %(sign)s. Write it as in %(example)s.")
        raise SearchError(written, words % {"sign": ":" if name else "-", "example": example})
    if not name and value.startswith("("):
        words = gettext("there are no brackets. Join values by commas, as in status:ERROR,POISON; quote a reference.")
        raise SearchError(written, words)
    if not name and value in LOGIC_WORDS:
        words = gettext('this is not an operator here. %(what)s To find a reference that begins so, write "%(value)s".')
        raise SearchError(written, words % {"what": LOGIC_WORDS[value], "value": value})
    if not is_storable(name + value):
        raise SearchError(_shortened(written), gettext("no task contains a NUL character; leave it out."))
    matches = tuple(islice(_matches(_reader_of(name, written), value, written), MAX_ALTERNATIVES + 1))
    if len(matches) > MAX_ALTERNATIVES:
        words = gettext("a term has at most %(most)s values.")
        raise SearchError(_shortened(written), words % {"most": MAX_ALTERNATIVES})
    return Term(name, matches, bool(minus))


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}…"


def _matches(read: Reader, value: str, written: str) -> Iterator[Match]:
    if not VALUE_LIST.fullmatch(value):
        raise SearchError(written, gettext("a comma separates two values; put a value with a comma in quotes."))
    return (read(_piece(found[0]), written) for found in VALUE.finditer(value))


def _piece(text: str) -> Piece:
    """Remove quotes and stars: quoted text is never an operator, a range or a star."""
    parts = [(found[0], bool(found[1])) for found in QUOTED_OR_BARE.finditer(text)]
    last, quoted = parts[-1]
    if star := not quoted and last.endswith("*"):
        parts[-1] = (last[:-1], False)
    bare = "" if parts[0][1] else parts.pop(0)[0]
    rest = "".join(ESCAPED.sub(r"\1", part[1:-1]) if quoted else part for part, quoted in parts)
    return Piece(bare.removeprefix("*"), rest, star=star, star_first=bare.startswith("*"), quoted=bool(parts))


def _quoted(text: str, bare: re.Pattern[str] = BARE) -> str:
    """Return a value as it stands in a search: bare when nothing in it could be read otherwise."""
    if bare.fullmatch(text) and ".." not in text and text not in LOGIC_WORDS:
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
