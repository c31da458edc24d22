"""What an operator is called for, from the home page to the answer: each scenario takes at most so many clicks.

Typing and the choice of a value in a list are no clicks.
"""

from collections.abc import Callable
from typing import Any

import pytest
from django.db.models.functions import Now

from django_dbtaskqueue.models import AuditEntry, BulkOperation, FailureGroup, Poller, Queue, Step
from tests.browser import scene
from tests.browser.conftest import Site, expect

pytestmark = pytest.mark.usefixtures("long_heartbeat")  # the scene's pollers are rows only


class Hand:
    """Clicks on a page, and counts."""

    def __init__(self, page: Any) -> None:
        self.page, self.clicks = page, 0

    def click(self, selector: str) -> None:
        self.page.locator(selector).first.click()
        self.clicks += 1

    def fill(self, selector: str, text: str) -> None:
        self.page.fill(selector, text)

    def reads(self, text: str, selector: str = "#content") -> None:
        expect(self.page.locator(selector).first).to_contain_text(text)


def why_did_this_task_fail(hand: Hand) -> None:
    hand.click(".field-tasks a")
    hand.click(".field-reference a")
    hand.reads("N14228 is not in the register", ".dbtq-box")


def retry_a_failure_group(hand: Hand) -> None:
    hand.click("button:has-text('Retry')")
    hand.reads("12 tasks match.")
    hand.click("button[name=confirm]")
    hand.reads("0 of 12")


def pause_for_an_hour(hand: Hand) -> None:
    hand.click(".field-name a:has-text('claims')")
    hand.click("button[value=pause]")
    hand.click("input[value='1h']")
    hand.fill("#id_reason", "the register is away")
    hand.click("button[name=confirm]")
    hand.reads("by ada: the register is away", "#dbtq-live")
    assert Queue.objects.get(name="claims").paused_until is not None


def find_by_a_number_of_the_customer(hand: Hand) -> None:
    hand.click(".dbtq-nav a[data-key=t]")
    hand.fill("input[name=q]", "payload.flight:2013-01-02-UA-1545-EWR-IAH status:POISON")
    hand.click("button:has-text('Search')")
    hand.reads("1 task", ".dbtq-found")
    hand.reads("bounced")


def the_slowest_queue(hand: Hand) -> None:
    hand.click(".dbtq-nav a[data-key=q]")
    hand.reads("49.2ms / 55.5ms", ".field-run")


def who_did_what(hand: Hand) -> None:
    hand.click("#nav-sidebar a:has-text('Audit')")
    hand.reads("the mail host is back", ".dbtq-table")


def a_stuck_poller(hand: Hand) -> None:
    hand.click(".dbtq-cards div:has-text('pollers alive') a")
    hand.reads("late", ".dbtq-table")


def purge(hand: Hand) -> None:
    hand.click(".field-name a:has-text('mail')")
    hand.fill("input[name=typed]", "mail")
    hand.fill("form:has(input[name=typed]) input[name=reason]", "a wrong import")
    hand.click("button:has-text('Purge')")
    hand.reads("The bulk operation has started.", ".messagelist")
    assert BulkOperation.objects.filter(verb="purge", query="queue:mail", reason="a wrong import").exists()


def approve(hand: Hand) -> None:
    hand.click(".dbtq-waits a:has-text('held-claim')")
    hand.click(".dbtq-answers button:has-text('yes')")
    hand.reads("signal")
    assert AuditEntry.objects.filter(verb="signal", actor="ada", changed=1).exists()


def why_does_it_not_run(hand: Hand) -> None:
    hand.click("tr:has-text('claims') .field-created a")
    hand.click(".field-reference a:has-text('no-handler')")
    hand.reads("No living poller of queue claims has a processor", ".field-situation")


def change_a_limit(hand: Hand) -> None:
    hand.click(".field-name a:has-text('claims')")
    hand.page.select_option("select[name=set]", "max_running")
    hand.fill("input[name=value]", "3")
    hand.click("button:text-is('Set')")
    hand.reads("is 3 now", ".messagelist")
    assert Queue.objects.get(name="claims").overrides == {"max_running": 3}


def stop_a_runaway(hand: Hand) -> None:
    hand.click("tr:has-text('claims') .field-processing a")
    hand.click(".field-reference a:has-text('in-hand')")
    hand.click("button[value=cancel]")
    hand.click("button[name=confirm]")
    hand.reads("1 task cancelled.", ".messagelist")


def what_a_deploy_broke(hand: Hand) -> None:
    hand.click(".dbtq-nav a[data-key=f]")
    hand.click("a:has-text('2026.11 came')")
    expect(hand.page.locator(".field-failure")).to_have_count(1)
    hand.reads("CardRefused", ".field-failure")


MOST_CLICKS: dict[Callable[[Hand], None], int] = {
    why_did_this_task_fail: 3,
    retry_a_failure_group: 3,
    find_by_a_number_of_the_customer: 2,
    the_slowest_queue: 1,
    who_did_what: 1,
    a_stuck_poller: 1,
    purge: 3,
    approve: 2,
    why_does_it_not_run: 3,
    change_a_limit: 3,
    stop_a_runaway: 5,
    what_a_deploy_broke: 2,
    pause_for_an_hour: 5,
}


@pytest.mark.slow
def test_each_scenario_of_an_operator_takes_few_clicks(site: Site) -> None:
    scene.play()
    Step.objects.filter(name="approved").update(result=["yes", "no"])
    deployed = Now() - 20 * scene.MINUTE
    Poller.objects.filter(instance=scene.HOLDER).update(release="2026.11", start_time=deployed)
    new = {"fingerprint": "c4" * 20, "queue": "mail", "error_type": "CardRefused", "release": "2026.11"}
    FailureGroup.objects.create(**new, first_seen=deployed + scene.MINUTE, last_seen=Now())
    clicks = {}
    with site.window() as page:
        for scenario in MOST_CLICKS:
            page.goto(site.url("overview/"))
            hand = Hand(page)
            scenario(hand)
            clicks[scenario] = hand.clicks
    assert {one.__name__: (clicks[one], most) for one, most in MOST_CLICKS.items() if clicks[one] > most} == {}
