"""Every page in a real browser: nothing forbidden by the strictest policy, nothing a screen reader stumbles over.

The docs' pictures are taken from the real demo: ``python -m tests.browser.pictures docs/images``.
"""

from typing import Any

import pytest

from django_dbtaskqueue.models import Batch, BulkOperation, FailureGroup, PipelineReport, Task
from tests.browser import scene
from tests.browser.conftest import Site, expect
from tests.support import sql

pytestmark = pytest.mark.usefixtures("long_heartbeat")  # the scene's pollers are rows only
LISTS = ("overview", "poisontask", "poller", "auditentry", "taskhistory", "attempt", "doctor")
WIDE = """[...document.querySelectorAll(".dbtq-scroll:not(#dbtq-graph), .table-container, html")]
    .filter((one) => one.scrollWidth > one.clientWidth).map((one) => `${one.className} is ${one.scrollWidth} wide`)"""
SETTLED = "Promise.allSettled(document.getAnimations().map((one) => one.finished)).then(() => null)"


def addresses() -> dict[str, str]:
    failed = Task.objects.filter(status="ERROR", queue="claims").latest("pk")
    rows = {"task": failed.pk, "queue": "night-batch", "schedule": "flights.tasks.digest"}
    for model in (Batch, FailureGroup, BulkOperation, PipelineReport):
        rows[str(model._meta.model_name)] = model._default_manager.earliest("pk").pk
    return {
        **{f"list {name}": f"{name}/" for name in (*LISTS, *rows)},
        **{name: f"{name}/{pk}/change/" for name, pk in rows.items()},
        "charts": "overview/?charts",
        "tasks": "task/?q=status:ERROR",
        "task-that-waits": f"task/{Task.objects.get(reference='held-claim').pk}/change/",
        "not-understood": "task/?q=statsu:ERROR",
        "no-task": "task/?q=queue:nowhere",
    }


@pytest.mark.slow
def test_every_page_works_under_a_strict_policy_and_for_everybody(site: Site) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    scene.play()
    faults: dict[str, Any] = {}
    with site.window(color_scheme="light", viewport={"width": 1120, "height": 900}) as page:
        page.evaluate("localStorage.setItem('django.admin.navSidebarIsOpen', 'false')")  # room for the pages themselves
        for name, address in addresses().items():
            assert page.goto(site.url(address)).status == 200, address
            if name in LOOKS:
                LOOKS[name](page)
            faults |= examined(site, page, axe, name)
            page.set_viewport_size({"width": 1440, "height": 900})
            faults[f"{name} at 1440 pixels"] = page.evaluate(WIDE)
            page.set_viewport_size({"width": 1120, "height": 900})
        page.goto(site.url("task/?q=status:ERROR"))
        page.check("#dbtq-tick-1")
        for button, name in (("reprocess", "confirm"), ("edit_schedule", "form of a schedule")):
            page.click(f"button[value={button}]")
            page.wait_for_selector("button[name=confirm]")
            faults |= examined(site, page, axe, name)
            page.goto(site.url("schedule/statements/change/"))
        page.keyboard.press("?")
        page.wait_for_selector("#dbtq-help[open]")
        faults |= examined(site, page, axe, "keys")
    assert {name: found for name, found in faults.items() if found} == {}


def examined(site: Site, page: Any, axe: Any, name: str) -> dict[str, list[str]]:
    """Return what is wrong with the page: what the policy forbade, what the browser says, what axe finds."""
    found = {}
    for theme, rules in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):  # no other rule looks at colours
        page.emulate_media(color_scheme=theme)
        page.evaluate(SETTLED)
        forbidden: list[str] = page.evaluate("window.violations")
        found[f"{name} {theme}"] = [*forbidden, *site.wrong]
        found[f"{name} {theme}"] += serious(axe.run(page, options={"resultTypes": ["violations"], **rules}))
        # Axe tries out styles, which the policy forbids it.
        page.evaluate("window.violations.splice(0)")
        site.wrong.clear()
    page.emulate_media(color_scheme="light")
    return found


def home(page: Any) -> None:
    """The home is one screen, and "More" opens the other pages."""
    size = page.viewport_size
    page.set_viewport_size({"width": 1440, "height": 900})
    end = page.locator("#dbtq").evaluate("one => one.getBoundingClientRect().bottom")
    assert 600 < end <= 900, "three failures, the queues that need care, and what waits"
    page.set_viewport_size(size)
    page.click(".dbtq-menu summary")
    expect(page.locator(".dbtq-menu a", has_text="Doctor")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".dbtq-menu a", has_text="Doctor")).to_be_hidden()


def report(page: Any) -> None:
    """The report's charts are drawn, and what stands in its figures is text."""
    expect(page.locator(".dbtq-report .dbtq-chart canvas")).to_have_count(5)
    expect(page.locator(".dbtq-report td", has_text="no gate for <b>claims</b> 4711").first).to_be_visible()


def graph(page: Any) -> None:
    """The graph shows its middle first, and a refresh leaves it where the reader moved it."""
    box = page.locator("#dbtq-graph")
    assert box.evaluate("one => one.scrollLeft") > 0
    box.evaluate("one => one.scrollTo(7, 0)")
    before = box.element_handle()
    page.click("#dbtq-refresh")
    page.wait_for_function("one => !one.isConnected", arg=before)
    assert box.evaluate("one => one.scrollLeft") == 7


def lines(page: Any) -> None:
    """At 1440 pixels a task is one line; what was cut has a title."""
    page.set_viewport_size({"width": 1440, "height": 900})
    heights = page.locator(".dbtq-lines tbody tr").evaluate_all("all => all.map((one) => one.offsetHeight)")
    assert heights and max(heights) < 40
    expect(page.locator(f'.field-reference bdi[title="{scene.LONG}"]')).to_be_visible()
    page.set_viewport_size({"width": 1120, "height": 900})


def form(page: Any) -> None:
    expect(page.locator("#dbtq-signal button")).to_be_visible()


# What else is looked at on a page.
LOOKS = {"list overview": home, "tasks": lines, "pipelinereport": report, "batch": graph, "task-that-waits": form}


def serious(results: Any) -> list[str]:
    faults = [one for one in results.response["violations"] if one["impact"] in ("serious", "critical")]
    places = [(fault, node) for fault in faults for node in fault["nodes"][:3]]
    return [f"{fault['id']}: {node['target']} {node['failureSummary']}" for fault, node in places]


@pytest.mark.slow
def test_a_search_goes_on_by_itself_until_it_finds_or_is_stopped(site: Site) -> None:
    """Given 60,000 tasks with long texts, the one that is looked for the oldest."""
    sql(
        "INSERT INTO dbtaskqueue_task (queue_name, reference_number, process_result) SELECT 'claims', 'n-' || n,"
        " CASE n WHEN 1 THEN 'needle' ELSE repeat('x', 3000) END FROM generate_series(1, 60000) AS n"
    )
    held: list[Any] = []
    with site.window() as page:
        page.goto(site.url("task/?q=error:needle"))
        expect(page.locator("td.field-reference", has_text="n-1")).to_be_visible()
        page.route("**/*_live*", lambda one: held.append(one))  # no answer before Stop was pressed
        page.goto(site.url("task/?q=error:nowhere"))
        expect(page.locator(".dbtq-looking")).to_contain_text("Nothing in the newest ")
        expect(page.locator(".dbtq-looking progress")).to_be_visible()
        page.click("#dbtq-stop")
        expect(page.locator(".dbtq-looking a")).to_be_visible()
        for one in held:
            one.continue_()
        expect(page.locator("#dbtq[data-refreshed]")).to_be_attached()
        assert len(held) == 1
        page.fill("#dbtq-q", "status:ERROR is:st")
        options = page.locator("#dbtq-words option")
        assert [one.get_attribute("value") for one in options.all()] == ["status:ERROR is:stale"]
