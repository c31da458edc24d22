"""The catalogues: whole, true to the sources, compiled from what stands beside them, and seen on the pages."""

import ast
import gettext
import io
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import polib
import pytest
from django.test import Client
from django.utils.translation import override
from django.utils.translation.template import templatize

import django_dbtaskqueue
from django_dbtaskqueue.core.exceptions import SearchError
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.operations.search import parse
from django_dbtaskqueue.operations.verbs import REPROCESS
from tests.factories import make_task

PACKAGE = Path(django_dbtaskqueue.__file__).parent
PLACEHOLDER = re.compile(r"%\((\w+)\)([-#0 +.\d]*[a-z])|(%%)|(%[a-z])|\{(\w*)\}")
TEXT = r"""u?("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')"""
CALL = re.compile(rf"\b(?:gettext|ngettext|_)\({TEXT}(?:,\s*{TEXT})?")
Message = tuple[str, str]  # msgid and msgid_plural, or nothing


def messages_of(source: str) -> Iterator[Message]:
    nodes = [*ast.walk(ast.parse(source))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "django.utils.translation"]
    aliases = [one for node in imports for one in node.names if re.fullmatch("n?gettext(_lazy)?", one.name)]
    names = {alias.asname or alias.name for alias in aliases}
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            assert texts, f"line {node.lineno}: only a constant text can be translated"
            plural = texts[1] if len(texts) > 1 and len(node.args) > 2 else ""
            yield texts[0], plural


def messages_in(template: str) -> Iterator[Message]:
    for found in CALL.finditer(templatize(template)):
        yield ast.literal_eval(found[1]), ast.literal_eval(found[2]) if found[2] else ""


@cache
def marked() -> dict[Message, str]:
    found: dict[Message, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(dict.fromkeys(messages_of(path.read_text()), path.name))
    for path in sorted(PACKAGE.rglob("*.html")):
        found.update(dict.fromkeys(messages_in(path.read_text()), path.name))
    return found


@pytest.fixture(params=("es", "de", "zh_Hans"), scope="module")
def catalogue(request: pytest.FixtureRequest) -> polib.POFile:
    return polib.pofile(str(PACKAGE / "locale" / request.param / "LC_MESSAGES" / "django.po"))


def texts(entry: polib.POEntry) -> list[str]:
    return list(entry.msgstr_plural.values()) if entry.msgid_plural else [entry.msgstr]


def test_every_text_of_the_sources_is_translated(catalogue: polib.POFile) -> None:
    known = {(entry.msgid, entry.msgid_plural): entry for entry in catalogue if not entry.obsolete}
    missing = {f"{where}: {message[0]}" for message, where in marked().items() if message not in known}
    assert not missing, "run django-admin makemessages in the package's folder, and translate"
    assert len(marked()) > 500 and sum(bool(plural) for _one, plural in marked()) > 20


def test_no_entry_is_empty_or_in_doubt_and_placeholders_are_those_of_the_source(catalogue: polib.POFile) -> None:
    forms = int(re.findall(r"nplurals=(\d)", catalogue.metadata["Plural-Forms"])[0])
    for entry in catalogue:
        assert not entry.fuzzy, entry.msgid
        assert all(text.strip() for text in texts(entry)), entry.msgid
        assert len(texts(entry)) == (forms if entry.msgid_plural else 1), entry.msgid
        for text in texts(entry):
            assert (text[0].isspace(), text[-1].isspace()) == (False, False), entry.msgid
    same = [entry.msgid for entry in catalogue if set(texts(entry)) == {entry.msgid}]
    assert len(same) < len(catalogue) / 10, "most texts are translated, not copied"
    for entry in catalogue:
        wanted = {frozenset(PLACEHOLDER.findall(one)) for one in (entry.msgid, entry.msgid_plural) if one}
        for text in texts(entry):
            assert frozenset(PLACEHOLDER.findall(text)) in wanted, (entry.msgid, text)


def test_what_is_compiled_is_what_is_written(catalogue: polib.POFile) -> None:
    written = gettext.GNUTranslations(io.BytesIO(catalogue.to_binary()))
    with Path(catalogue.fpath).with_suffix(".mo").open("rb") as file:
        compiled = gettext.GNUTranslations(file)
    assert vars(compiled)["_catalog"] == vars(written)["_catalog"], "run django-admin compilemessages"


# Of each language what stands on the overview, and on the list of tasks.
SHOWN = {
    "es": ("Todas las colas van a tiempo; 1 ERROR.", "Atajos de teclado", "Progreso o error", "Reintentar"),
    "de": ("Alle Warteschlangen sind pünktlich; 1 ERROR.", ">Historie</a>", "So wird gesucht", "Wiederholen"),
    "zh-hans": ("所有队列均按时处理; 1 ERROR.", "最近一小时的失败", "进度或错误", "如何搜索"),
    "en": ("All queues are on time; 1 ERROR.", "Keyboard shortcuts", "How to search", "Retry"),
}


@pytest.fixture
def op(admin_client: Client, settings: Any) -> Iterator[Client]:
    sessions = settings.MIDDLEWARE.index("django.contrib.sessions.middleware.SessionMiddleware") + 1
    locale = "django.middleware.locale.LocaleMiddleware"
    settings.MIDDLEWARE = [*settings.MIDDLEWARE[:sessions], locale, *settings.MIDDLEWARE[sessions:]]
    with override("en"):  # a request leaves its language behind in the thread; this takes it back
        yield admin_client


@pytest.mark.django_db
def test_pages_speak_the_languages_of_their_readers(op: Client) -> None:
    make_task(Status.ERROR)
    for spoken, words in SHOWN.items():
        for page, some in (("overview", words[:2]), ("task", words[2:])):
            response = op.get(f"/admin/dbtaskqueue/{page}/", headers={"Accept-Language": spoken})
            shown = response.content.decode()
            assert response.headers["Content-Language"] == spoken
            assert [word for word in (*some, Status.ERROR) if word not in shown] == [], (spoken, page)


def test_a_fault_in_a_search_is_told_in_the_readers_language_and_numbers_take_its_form() -> None:
    with override("de"), pytest.raises(SearchError, match=r"'EROR' ist keiner der Werte.*Meinten Sie 'ERROR'"):
        parse("status:EROR")
    with override("zh-hans"), pytest.raises(SearchError, match="逗号"):
        parse("queue:a,,b")
    for spoken, one, many in (
        ("es", "1 tarea reprocesada", "2 tareas reprocesadas"),
        ("de", "1 Aufgabe neu in Verarbeitung gegeben", "2 Aufgaben neu in Verarbeitung gegeben"),
        ("zh-hans", "1 个任务已重新处理", "2 个任务已重新处理"),
    ):
        with override(spoken):
            assert [str(REPROCESS.done % {"number": number}) for number in (1, 2)] == [one, many]
