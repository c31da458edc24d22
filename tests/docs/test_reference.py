"""The reference, and what a contributor reads, are complete and true: compared with the code they describe."""

import ast
import json
import re
import shutil
import subprocess
from itertools import chain
from pathlib import Path

import pytest
import yaml

from django_dbtaskqueue.api.prometheus import DATABASE_METRICS
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.operations import checks, schedules
from django_dbtaskqueue.pipeline.jobs import JOBS
from django_dbtaskqueue.poller import logs
from django_dbtaskqueue.poller.probe_port import POLLER_METRICS
from tests.architecture.source import MODULES, files
from tests.crossings import features
from tests.crossings.roads import ROADS
from tests.docs.pages import FENCE, FROM_CODE, FROM_TESTS, PROJECT, REPOSITORY, blocks, commands, shown
from tests.docs.test_blocks import LINK, SOURCE_URL

DOCS = REPOSITORY / "docs"
ROW = re.compile(r"^\|(.+)\|$", re.MULTILINE)
MARK = re.compile(r"^<!-- from the code: .*\n(?:\|.*\n)*", re.MULTILINE)  # with its notes
PAGES = [REPOSITORY / "README.md", *DOCS.rglob("*.md"), *DOCS.rglob("*.rst")]
MAX_WORDS = 48_000


def page(name: str) -> str:
    return shown(DOCS / name)


def table(text: str, heading: str) -> list[list[str]]:
    after = f"\n{text}".split(f"\n{heading}\n", 1)[1]
    return [[cell.strip() for cell in found[1].split("|")] for found in ROW.finditer(after.split("\n## ", 1)[0])][2:]


def test_each_table_from_the_code_has_words_in_each_row_and_no_note_too_many() -> None:
    for name in ["commands", "errors", "http-api", "operations", "settings", "signals", "tables"]:
        marks = "".join(MARK.findall((DOCS / f"reference/{name}.md").read_text()))
        rows = [row.rpartition(" | ")[2] for row in FROM_CODE["fill"](marks).splitlines()]
        assert rows and "" not in [row.strip(" |") for row in rows], name
    note = "<!-- from the code: options runtaskpoller -->\n| Option | Note |\n|---|---|\n| `--threads` | More |\n"
    assert "(THREADS: 4). More |" in FROM_CODE["fill"](note)
    with pytest.raises(ValueError, match="--treads"):
        FROM_CODE["fill"](note.replace("--threads", "--treads"))


def test_every_status_job_and_system_check_has_its_place() -> None:
    assert [row[0] for row in table(page("reference/statuses.md"), "# Statuses")] == [f"`{one}`" for one in Status]
    marked = re.findall(r"from the code: jobs (\w+) -->", (DOCS / "reference/commands.md").read_text())
    assert marked == ["every", *JOBS]
    documented = {row[0].strip("`") for row in table(page("reference/errors.md"), "## System checks")}
    texts = [Path(str(module.__file__)).read_text() for module in (checks, schedules)]
    assert documented == set(re.findall(r'"(dbtaskqueue\.[EW]\d+)"', "".join(texts)))


def test_the_page_of_reasons_has_each_code() -> None:
    tree = ast.parse((REPOSITORY / "django_dbtaskqueue" / "operations" / "explain.py").read_text())
    makers = ("Explanation", "_because")
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in makers]
    given = {str(call.args[0].value) for call in calls if isinstance(call.args[0], ast.Constant)}
    rows = table(page("howto/why-a-task-does-not-run.md"), "## The reasons")
    others = {"sleeping", "signal", "max_running", "rate"}  # which other functions return
    assert {*chain(*(re.findall(r"`(\w+)`", row[0]) for row in rows))} == given | others


TEST = re.compile(r"\[`(\w+)`\]\(([\w./-]+\.py)\)")


def name_tests(rows: list[list[str]], folder: Path, excuse: str) -> None:
    """See that the last cell of each row names tests that exist, or has the excuse."""
    for row in rows:
        tests = TEST.findall(row[-1])
        assert tests or re.match(excuse, row[-1]), f"{row[0]} names no test"
        for name, path in tests:
            assert f"def {name}(" in (folder / path).read_text(), f"{row[0]}: {path} has no {name}"


def test_each_promise_of_the_readme_leads_to_tests_that_exist_and_each_crossing_too() -> None:
    home, tests = ((REPOSITORY / name).read_text() for name in ("README.md", "tests/README.md"))
    proved = dict(table(tests, "## Which test proves a promise of the README"))
    assert {promise for promise, _how in table(home, "## What it promises")} <= proved.keys()
    for promise, places in proved.items():
        named = re.findall(r"`(tests/[\w/.]+)`", places)
        assert named and not [place for place in named if not (REPOSITORY / place).exists()], promise
    (written,) = FROM_TESTS.findall((DOCS / "reference/semantics.md").read_text())
    assert written == (expected := features.table(ROADS)), f"Write this table:\n{expected}"


def test_the_words_written_by_hand_only_become_fewer() -> None:
    """Code blocks count; tables that the site makes from the code, and one that tests compare, do not."""
    words = sum(len(FROM_TESTS.sub("", page.read_text()).split()) for page in PAGES)
    assert words <= MAX_WORDS, f"{words} words: shorten a page, or let the code say it."
    assert words > MAX_WORDS - 500, f"Set MAX_WORDS to {words}."


# -- files about observability name what the code exports, and their own tools accept them -----------------------------
DASHBOARD, ALERTS = DOCS / "files/grafana-dashboard.json", DOCS / "files/prometheus-alerts.yaml"
NAME = re.compile(r"\bdbtaskqueue_\w+")
SUFFIXES = {"histogram": ("_bucket", "_count", "_sum")}
EXPORTED = {one.name + end for one in (*DATABASE_METRICS, *POLLER_METRICS) for end in SUFFIXES.get(one.type, ("",))}
LABELS = {label for one in (*DATABASE_METRICS, *POLLER_METRICS) for label in one.labels} | {"le"}


def test_explained_log_lines_exist_and_the_table_of_their_fields_is_the_code_s() -> None:
    written = [row[0].strip("`") for row in table(page("howto/operate-at-night.md"), "## What a log line means")]
    logged = set()
    for call in [node for one in MODULES if "logg" in one.text for node in one.nodes if isinstance(node, ast.Call)]:
        said = call.args and re.search(r"\b(info|warning|error|exception|log)$", ast.unparse(call.func))
        if said and isinstance(call.args[0], ast.Constant):
            logged.add(re.sub(r"%(?:\.\d+)?[srgfd]", "…", str(call.args[0].value)))
    assert written and set(written) <= logged
    assert [row[0].strip("`") for row in table(page("howto/observability.md"), "## Log lines")] == [*logs.LOG_FIELDS]


def test_the_dashboard_and_the_alerts_ask_for_what_is_exported() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    asked = [target["expr"] for one in panels for target in one["targets"]] + [rule["expr"] for rule in rules]
    assert len(asked) > 15
    for text in asked:
        assert set(NAME.findall(text)) <= EXPORTED, text
        selectors = re.findall(r"\{([^}]*)\}", text)
        assert {name for one in selectors for name in re.findall(r"(\w+)\s*[=!]", one)} <= LABELS, text
        grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", text)
        assert {name.strip() for one in grouped for name in one.split(",")} <= LABELS, text


def test_every_alert_says_what_to_do() -> None:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in group["rules"]:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("page", "ticket") and set(rule["annotations"]) == {"summary", "action"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_alerts() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_s_library_reads_the_dashboard_without_a_loss() -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="the extra test is not installed")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    written = json.loads(DASHBOARD.read_text())
    assert lost(written, json.loads(encoder.JSONEncoder().encode(models.Dashboard.from_json(written)))) == []
    assert len({one["id"] for one in written["panels"]}) == len(written["panels"])


def lost(written: object, read: object, place: str = "") -> list[str]:
    """Return the places whose values the library did not take over."""
    if isinstance(written, dict) and isinstance(read, dict):
        return [one for key, value in written.items() for one in lost(value, read.get(key), f"{place}/{key}")]
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        pairs = enumerate(zip(written, read, strict=True))
        return [one for number, (left, right) in pairs for one in lost(left, right, f"{place}/{number}")]
    return [] if written == read else [place]


# -- what a contributor reads: threats name their tests, files exist, the hosted CI tries what is promised -------------
COMMUNITY = REPOSITORY / ".github"


def test_each_semantic_and_each_threat_names_a_test_or_says_that_there_is_none() -> None:
    rows = table(page("reference/semantics.md"), "# Semantics")
    assert len(rows) >= 24 and [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    name_tests(rows, DOCS / "reference", "not yet")
    rows = table((COMMUNITY / "SECURITY.md").read_text(), "## Threats")
    assert [row[0] for row in rows] == [f"S{number}" for number in range(1, 20)]
    name_tests(rows, COMMUNITY, "not tested yet|does not apply")


def test_links_and_files_of_its_pages_are_there() -> None:
    for page in COMMUNITY.rglob("*.md"):
        for target in LINK.findall(FENCE.sub("", page.read_text())):
            assert target.startswith("https:") or (page.parent / target).exists(), (page, target)
    for path in [*COMMUNITY.rglob("*.yml"), REPOSITORY / ".pre-commit-config.yaml"]:
        assert yaml.safe_load(path.read_text()), path.name


def test_the_guide_leads_from_a_clone_to_the_tests_and_names_files_that_exist() -> None:
    (block,) = blocks(COMMUNITY / "CONTRIBUTING.md")
    clone, install, test = block.text.splitlines()
    assert clone == f"git clone {SOURCE_URL} && cd {SOURCE_URL.rpartition('/')[2]}"
    assert install == 'pip install -e ".[test]"'
    assert list(commands(test)) == [["pytest", "-n", "2"]]
    text = (COMMUNITY / "CONTRIBUTING.md").read_text()
    explained = {row[0].strip("`") for row in table(text, "## What the tests in `tests/architecture` demand")}
    assert explained == {path.stem for path in files("tests/architecture") if path.stem.startswith("test_")}
    named = set(re.findall(r"`((?:tests|docs|django_dbtaskqueue|core|flow|models|operations|testing)/[\w./]+)`", text))
    homes = (REPOSITORY, REPOSITORY / "django_dbtaskqueue")
    assert named and [name for name in named if not any((home / name).exists() for home in homes)] == []


def test_hosted_ci_tries_every_version_that_is_promised() -> None:
    jobs = yaml.safe_load((COMMUNITY / "workflows/ci.yml").read_text())["jobs"]
    matrix = jobs["pairs"]["strategy"]["matrix"]
    said = "\n".join(PROJECT["classifiers"])
    promised = {kind: {*re.findall(rf"{kind} :: (\d+\.\d+)$", said, re.M)} for kind in ("Python", "Django")}
    assert set(matrix["python"]) == promised["Python"]
    for kind, versions in promised.items():
        assert {pair[kind.lower()] for pair in matrix["include"] if kind.lower() in pair} == versions
    assert jobs["all"]["steps"][-1]["run"] == "bash .ci/run"
    lines = " ".join(step.get("run", "") for step in jobs["pairs"]["steps"])
    assert set(re.findall(r"\.\[(.+?)\]", lines)) <= set(PROJECT["optional-dependencies"])
    assert [path for path in re.findall(r"tests/[\w/.]+", lines) if not (REPOSITORY / path).exists()] == []


def test_the_changelog_has_the_version_and_a_place_for_what_comes() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.+?)\](?: - \d{4}-\d{2}-\d{2})?$", text, re.MULTILINE)
    assert headings[:2] == ["Unreleased", PROJECT["version"]]
    assert set(re.findall(rf"^\[(.+?)\]: {re.escape(SOURCE_URL)}/", text, re.MULTILINE)) == set(headings)
