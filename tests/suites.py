"""Which tests run, in which process, and what a run tells of it at its end.

Without arguments pytest runs all tests but those whose markers pyproject.toml leaves out. It takes two processes
more than there are cores, because many tests wait. Each process has databases of its own on one server.
"""

import gc
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from _pytest.terminal import TerminalReporter
from xdist.scheduler import LoadScopeScheduling

# What needs Spark stays in one process, for one JVM; the slow pages have a second one. A cluster's and the jobs' own
# processes start JVMs, one at a time; beside the jobs is what needs a server of S3. What crashes or fills a server
# shares one. These take longest, so they start first.
FIRST = {
    "spark": re.compile(r"tests/pipeline/spark/"),
    "pages of spark": re.compile(r"page_works\[\S*pipeline"),
    "cluster": re.compile(r"pipeline/test_cluster"),
    "jobs": re.compile(r"pipeline/test_(archive|command|erase|object_store)|test_spark_"),
    "crash": re.compile(r"tests/chaos/test_(outage|stale_connections|standby)|test_role_logins|test_more_groups_than"),
    # Each environment of strangers is made once. In this order two processes have as much to do.
    "newest Python, README": re.compile(r"stranger/.*(test_readme\[\w+-3\.1[2-9]|on_postgresql)"),
    "newest Python": re.compile(r"stranger/(?!.*(test_readme|3\.11\]))"),
    "Python 3.11, README": re.compile(r"stranger/.*test_readme"),
    "Python 3.11": re.compile(r"stranger/"),
}
# Files of half a minute, which must not come last.
LONG = re.compile(r"tests/(chaos|browser|poller|model)/|test_(matrix|demo|hostile|site|ctrl_c|distributions)")
# Else each of some hundred processes compiles the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell starts a run in the background with Ctrl-C ignored, and the processes of tests would ignore it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
GC_THRESHOLDS = (10_000, 20, 20)  # a test makes many objects, and few circles of them
PAGE = "test_every_block_of_the_page_works"
LEFT = pytest.StashKey[Counter[str]]()


def group_of(test: str) -> str:
    """Return what stays in one process: all of Spark, what crashes a server, an environment, a file, a page."""
    for name, tests in FIRST.items():
        if tests.search(test):
            return name
    return test if PAGE in test else test.partition("::")[0]


def suite_of(test: str) -> str:
    file = test.partition("::")[0]
    return file if file.count("/") == 1 else "/".join(file.split("/")[:2])


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT] = Counter()
    gc.set_threshold(*GC_THRESHOLDS)
    worker = getattr(config, "workerinput", None)
    if worker and config.args == config.getini("testpaths"):
        # Each process begins at another file. The asserts of a file are then rewritten by one process, not by each.
        files = sorted(str(file.relative_to(config.rootpath)) for file in config.rootpath.glob("tests/**/test_*.py"))
        first = len(files) * int(worker["workerid"][2:]) // worker["workercount"]
        config.args = files[first:] + files[:first]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Tests that were named run in this process."""
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    return (os.cpu_count() or 1) + 2 if everything else 0


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files that name none of the markers by which tests are chosen: to import them all takes seconds."""
    asked = re.findall(r"\w+", config.option.markexpr)
    if not asked or asked[0] == "not" or not collection_path.match("test_*.py"):
        return None
    return None if any(f"mark.{name}" in collection_path.read_text() for name in asked) else True


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")
def in_one_order(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort what each process has collected in an order of its own, before it is shuffled."""
    items.sort(key=lambda item: item.nodeid.partition("::")[0])
    for item in items:
        for mark in item.iter_markers():
            if mark.name in left_out(config) and f"mark.{mark.name}" not in item.path.read_text():
                raise pytest.UsageError(f"{item.nodeid}: its file must say mark.{mark.name}, or -m passes it by")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for fixture, group in (("spark", "spark"), ("pg_server", "crash")):
        if strays := [one.nodeid for one in items if fixture in one.fixturenames and group_of(one.nodeid) != group]:
            raise pytest.UsageError(f"These start another {fixture}: {', '.join(strays)}. Put them into its group.")
    if hasattr(config, "workerinput"):
        groups = {item: group_of(item.nodeid) for item in items}
        items.sort(key=lambda item: ((*FIRST, groups[item]).index(groups[item]), not LONG.search(item.nodeid)))


def pytest_collection_finish() -> None:
    gc.freeze()  # the loaded modules stay: no collection of garbage needs to look at them


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    from xdist.workermanage import NodeManager

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    NodeManager.EXIT_TIMEOUT = 60  # seconds in which a process stops its servers after Ctrl-C; then it is killed
    config.option.loadscopereorder = False  # the order of the items is ours
    return ByGroup(config, log)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Kill what a Ctrl-C has left: it may come after the start of a process, and before a fixture knows of it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = dict(session.config.stash[LEFT])
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if any(word.endswith("manage.py") for word in child.cmdline()):
                child.kill()


def left_out(config: pytest.Config) -> dict[str, str]:
    """Return the markers that this run leaves out, with what pyproject.toml says of them: how their tests run."""
    markers = (line.partition(": ") for line in config.getini("markers"))
    names = re.findall(r"\bnot (\w+)", config.option.markexpr)
    return {name: text for name, _, text in markers if name in names}


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        item.config.stash[LEFT].update(name for name in left_out(item.config) if item.get_closest_marker(name))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every process collects all tests, so the counts of any of them are those of the run."""
    node.config.stash[LEFT] |= Counter(getattr(node, "workeroutput", {}).get("left out", {}))


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    told = [one for name in ("passed", "failed", "error", "skipped") for one in terminalreporter.stats.get(name, [])]
    ran = Counter(suite_of(test) for test in {report.nodeid for report in told})
    seconds = Counter[str]()
    for report in told:
        seconds[group_of(report.nodeid)] += getattr(report, "duration", 0.0)
    terminalreporter.section("suites")
    for suite, tests in sorted(ran.items()):
        terminalreporter.line(f"{suite:<30}{tests:>6} tests")
    for group, longest in seconds.most_common(1):
        terminalreporter.line(f"longest in one process: {longest:.0f} s of {group}")
    for name, text in left_out(config).items():
        if tests := config.stash[LEFT][name]:
            terminalreporter.line(f"left out: {tests} tests marked {name}: {text}")
