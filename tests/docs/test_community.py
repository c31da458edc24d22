"""What a contributor reads is true: threats name their tests, files exist, and the hosted CI tries what is promised."""

import re

import yaml

from tests.architecture.source import REPOSITORY, files
from tests.docs.pages import FENCE, PROJECT, blocks, commands
from tests.docs.test_blocks import LINK, SOURCE_URL
from tests.docs.test_reference import TEST, table

COMMUNITY = REPOSITORY / ".github"
THREATS = [f"S{number}" for number in range(1, 20)]
VERSION = re.compile(r":: (\d+\.\d+)$")


def test_each_threat_names_a_test_that_exists_or_says_that_there_is_none() -> None:
    rows = table((COMMUNITY / "SECURITY.md").read_text(), "## Threats")
    assert [row[0] for row in rows] == THREATS
    for row in rows:
        tests = TEST.findall(row[-1])
        assert tests or re.match("not tested yet|does not apply", row[-1]), f"{row[0]} names no test"
        for name, path in tests:
            assert f"def {name}(" in (COMMUNITY / path).read_text(), f"{row[0]}: {path} has no {name}"


def test_links_and_files_of_its_pages_are_there() -> None:
    for page in COMMUNITY.rglob("*.md"):
        for target in LINK.findall(FENCE.sub("", page.read_text())):
            assert target.startswith("https:") or (page.parent / target).exists(), (page, target)
    for path in [*COMMUNITY.rglob("*.yml"), REPOSITORY / ".pre-commit-config.yaml"]:
        assert yaml.safe_load(path.read_text()), path.name


def test_three_commands_lead_from_a_clone_to_the_tests() -> None:
    (block,) = blocks(COMMUNITY / "CONTRIBUTING.md")
    clone, install, test = block.text.splitlines()
    assert clone == f"git clone {SOURCE_URL} && cd {SOURCE_URL.rpartition('/')[2]}"
    assert install == 'pip install -e ".[test]"'
    assert list(commands(test)) == [["pytest", "-n", "2"]]


def test_the_guide_names_files_that_exist_and_explains_every_architecture_test() -> None:
    text = (COMMUNITY / "CONTRIBUTING.md").read_text()
    explained = {row[0].strip("`") for row in table(text, "## What the tests in `tests/architecture` demand")}
    assert explained == {path.stem for path in files("tests/architecture") if path.stem.startswith("test_")}
    named = set(re.findall(r"`((?:tests|docs|django_dbtaskqueue|core|flow|models|operations|testing)/[\w./]+)`", text))
    homes = (REPOSITORY, REPOSITORY / "django_dbtaskqueue")
    assert named and [name for name in named if not any((home / name).exists() for home in homes)] == []


def test_hosted_ci_tries_every_version_that_is_promised() -> None:
    jobs = yaml.safe_load((COMMUNITY / "workflows/ci.yml").read_text())["jobs"]
    matrix = jobs["pairs"]["strategy"]["matrix"]
    promised: dict[str, set[str]] = {"Python": set(), "Django": set()}
    for classifier in PROJECT["classifiers"]:
        if found := VERSION.search(classifier):
            promised["Django" if "Django" in classifier else "Python"].add(found[1])
    assert set(matrix["python"]) == promised["Python"]
    assert {pair["django"] for pair in matrix["include"] if "django" in pair} == promised["Django"]
    assert {pair["python"] for pair in matrix["include"] if "python" in pair} == promised["Python"]
    assert jobs["all"]["steps"][-1]["run"] == "bash .ci/run"
    lines = " ".join(step.get("run", "") for step in jobs["pairs"]["steps"])
    assert set(re.findall(r"\.\[(.+?)\]", lines)) <= set(PROJECT["optional-dependencies"])
    assert [path for path in re.findall(r"tests/[\w/.]+", lines) if not (REPOSITORY / path).exists()] == []


def test_the_changelog_has_the_version_and_a_place_for_what_comes() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.+?)\](?: - \d{4}-\d{2}-\d{2})?$", text, re.MULTILINE)
    assert headings[:2] == ["Unreleased", PROJECT["version"]]
    assert set(re.findall(rf"^\[(.+?)\]: {re.escape(SOURCE_URL)}/", text, re.MULTILINE)) == set(headings)
