"""An operator on call: from the alarm to the repair, with real pollers at work."""

import signal
from typing import Any

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.models import Queue, Task
from tests.browser.conftest import Site, expect
from tests.support import until

ORDERS = 6


def shows(page: Any, selector: str, text: str) -> None:
    expect(page.locator(selector).first).to_contain_text(text)


def in_status(status: str) -> int:
    return Task.objects.filter(queue="orders", status=status).count()


def test_the_road_from_an_alarm_to_its_end(site: Site) -> None:
    for number in range(ORDERS):
        enqueue("orders", f"order-{number}")
    first = site.poller("orders")
    until(lambda: in_status("ERROR") == ORDERS)
    first.signal(signal.SIGTERM)  # at its end it writes what it counted, otherwise every ten seconds
    until(lambda: first.code == 0)
    site.poller("orders")
    with site.window() as page:
        page.goto(site.url("overview/"))
        row = page.locator("tr:has(td.field-name)", has_text="orders")
        expect(row).to_contain_text(str(ORDERS))
        page.click(".dbtq-nav a[data-key=f]")  # all failed for the same reason, so it is one group
        page.locator(".field-failure strong a", has_text="WarehouseClosed").click()
        shows(page, ".dbtq-verbs", "Retry")
        page.click(".field-tasks a")
        shows(page, ".dbtq-found", f"{ORDERS} tasks")
        page.click(".field-reference a >> nth=0")
        shows(page, ".dbtq-steps", "WarehouseClosed")
        shows(page, ".dbtq-box", "cannot be picked")
        site.repair()
        page.goto(site.url("task/?q=queue:orders status:ERROR"))
        expect(page.locator("button[value=reprocess]")).to_be_hidden()
        page.check("#dbtq-tick-1")
        page.check("input[name=select_across]")
        page.click("button[value=reprocess]")
        shows(page, ".dbtq-numbers", f"{ORDERS} tasks match.")
        page.fill("#id_reason", "the warehouse is open")
        page.click("button[name=confirm]")
        page.wait_for_selector("progress")  # the bulk operation runs to its end before the operator's eyes
        page.select_option("#dbtq-interval", "2")
        shows(page, "#dbtq-live .dbtq-badge", "finished")
        until(lambda: in_status("COMPLETED") == ORDERS)
        page.goto(site.url("queue/"))
        expect(row.locator('a[href*="COMPLETED"]')).to_have_text(str(ORDERS))
        page.goto(site.url("auditentry/"))
        shows(page, ".dbtq-table", "the warehouse is open")
        pause_and_resume(site, page)


def pause_and_resume(site: Site, page: Any) -> None:
    page.goto(site.url("queue/orders/change/"))
    page.click("button[value=pause]")
    page.fill("#id_reason", "stock-taking")
    page.click("button[name=confirm]")
    shows(page, "#dbtq-live", "by ada: stock-taking")
    assert Queue.objects.get(name="orders").paused_time is not None
    enqueue("orders", "while-paused")
    page.goto(site.url("overview/"))
    shows(page, ".dbtq-health", "Paused: orders (by ada: stock-taking).")
    assert in_status("CREATED") == 1
    page.goto(site.url("queue/orders/change/"))
    page.click("button[value=resume]")
    page.click("button[name=confirm]")
    shows(page, "#dbtq-live .dbtq-badge", "running")
    until(lambda: in_status("COMPLETED") == ORDERS + 1)


def test_without_scripts_everything_can_still_be_done(site: Site) -> None:
    for number in range(3):
        enqueue("orders", f"order-{number}")
    with site.window(java_script_enabled=False) as page:
        page.goto(site.url("task/?q=queue:orders"))
        cancel(page, "#dbtq-tick-1")
        shows(page, ".messagelist", "1 task cancelled.")
        page.click("#dbtq-refresh")
        page.check("#dbtq-tick-1")
        cancel(page, "input[name=select_across]")
        page.click("button[name=work]")
        shows(page, "#dbtq-live", "finished")
    assert in_status("POISON") == 3


def cancel(page: Any, which: str) -> None:
    page.check(which)
    for button in (".dbtq-more summary", "button[value=cancel]", "button[name=confirm]"):
        page.click(button)


def press(page: Any, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def test_refreshing_waits_while_rows_are_ticked_and_keys_work(site: Site) -> None:
    enqueue("orders", "first")
    with site.window() as page:
        page.goto(site.url("task/"))
        page.select_option("#dbtq-interval", "2")
        press(page, "Escape", "j", "x")
        expect(page.locator("#dbtq-ticked")).to_have_text("1 ticked")
        enqueue("orders", "second")
        expect(page.locator("#dbtq-note")).to_have_text("not refreshed while rows are ticked")
        assert page.locator(".dbtq-table tbody tr").count() == 1
        press(page, "x")
        expect(page.locator(".dbtq-table tbody tr")).to_have_count(2)
        # An unchanged list is not sent again; the wait of a task that waits would change it
        Task.objects.all().cancel()
        expect(page.locator(".dbtq-table tbody tr", has_text="POISON")).to_have_count(2)
        with page.expect_response(lambda answer: "_live" in answer.url and answer.status == 304):
            press(page, "r")
        press(page, "/", *"ref:first", "Enter")
        expect(page.locator(".dbtq-table tbody tr")).to_have_count(1)
        press(page, "Escape", "g", "o")
        page.wait_for_url("**/overview/")
        press(page, "q")
        page.wait_for_url("**/queue/")
        press(page, "g", "d")
        page.wait_for_url("**/doctor/")
