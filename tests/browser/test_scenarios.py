"""What an operator is called for, from the home page to the answer: each scenario takes at most so many clicks.

Typing and the choice of a value in a list are no clicks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from django.db.models.functions import Now

from django_dbtaskqueue.models import AuditEntry, BulkOperation, FailureGroup, Poller, Queue, Step
from tests.browser import scene
from tests.browser.conftest import Site, expect

pytestmark = pytest.mark.usefixtures("long_heartbeat")  # the scene's pollers are rows only


class Fill(NamedTuple):
    selector: str
    text: str


class Reads(NamedTuple):
    text: str
    selector: str = "#content"


Act = str | Fill | Reads | Callable[[Any], object]  # a selector is clicked; what is called with the page is true
CLAIMS, CONFIRM = ".field-name a:has-text('claims')", "button[name=confirm]"
MAIL = {"verb": "purge", "query": "queue:mail", "reason": "a wrong import"}
SCENARIOS: dict[str, tuple[int, list[Act]]] = {  # the most clicks, and the way
    "why did this task fail": (3, [
        *(".field-tasks a", ".field-reference a", Reads("N14228 is not in the register", ".dbtq-box")),
    ]),
    "retry a failure group": (3, ["button:has-text('Retry')", Reads("12 tasks match."), CONFIRM, Reads("0 of 12")]),
    "find by a number of the customer": (2, [
        ".dbtq-nav a[data-key=t]",
        Fill("input[name=q]", "payload.flight:2013-01-02-UA-1545-EWR-IAH status:POISON"),
        "button:has-text('Search')",
        *(Reads("1 task", ".dbtq-found"), Reads("bounced")),
    ]),
    "the slowest queue": (1, [".dbtq-nav a[data-key=q]", Reads("49.2ms / 55.5ms", ".field-run")]),
    "who did what": (1, ["#nav-sidebar a:has-text('Audit')", Reads("the mail host is back", ".dbtq-table")]),
    "a stuck poller": (1, [".dbtq-cards div:has-text('pollers alive') a", Reads("late", ".dbtq-table")]),
    "purge": (3, [
        *(".field-name a:has-text('mail')", Fill("input[name=typed]", "mail")),
        Fill("form:has(input[name=typed]) input[name=reason]", MAIL["reason"]),
        *("button:has-text('Purge')", Reads("The bulk operation has started.", ".messagelist")),
        lambda page: BulkOperation.objects.filter(**MAIL).exists(),
    ]),
    "approve": (2, [
        *(".dbtq-waits a:has-text('held-claim')", ".dbtq-answers button:has-text('yes')", Reads("signal")),
        lambda page: AuditEntry.objects.filter(verb="signal", actor="ada", changed=1).exists(),
    ]),
    "why does it not run": (3, [
        *("tr:has-text('claims') .field-created a", ".field-reference a:has-text('no-handler')"),
        Reads("No living poller of queue claims has a processor", ".field-situation"),
    ]),
    "change a limit": (3, [
        *(CLAIMS, lambda page: page.select_option("select[name=set]", "max_running")),
        *(Fill("input[name=value]", "3"), "button:text-is('Set')", Reads("is 3 now", ".messagelist")),
        lambda page: Queue.objects.get(name="claims").overrides == {"max_running": 3},
    ]),
    "stop a runaway": (5, [
        *("tr:has-text('claims') .field-processing a", ".field-reference a:has-text('in-hand')"),
        *("button[value=cancel]", CONFIRM, Reads("1 task cancelled.", ".messagelist")),
    ]),
    "what a deploy broke": (2, [
        *(".dbtq-nav a[data-key=f]", "a:has-text('2026.11 came')"),
        lambda page: expect(page.locator(".field-failure")).to_have_count(1) is None,  # it waits, or raises
        Reads("CardRefused", ".field-failure"),
    ]),
    "pause for an hour": (5, [
        *(CLAIMS, "button[value=pause]", "input[value='1h']", Fill("#id_reason", "the register is away"), CONFIRM),
        Reads("by ada: the register is away", "#dbtq-live"),
        lambda page: Queue.objects.get(name="claims").paused_until is not None,
    ]),
}  # fmt: skip


@pytest.mark.slow
def test_each_scenario_of_an_operator_takes_few_clicks(site: Site) -> None:
    scene.play()
    Step.objects.filter(name="approved").update(result=["yes", "no"])
    deployed = Now() - 20 * scene.MINUTE
    Poller.objects.filter(instance=scene.HOLDER).update(release="2026.11", start_time=deployed)
    new = {"fingerprint": "c4" * 20, "queue": "mail", "error_type": "CardRefused", "release": "2026.11"}
    FailureGroup.objects.create(**new, first_seen=deployed + scene.MINUTE, last_seen=Now())
    with site.window() as page:
        for name, (most, acts) in SCENARIOS.items():
            page.goto(site.url("overview/"))
            for act in acts:
                match act:
                    case str():
                        page.locator(act).first.click()
                    case Fill():
                        page.fill(*act)
                    case Reads(text, selector):
                        expect(page.locator(selector).first).to_contain_text(text)
                    case _:
                        assert act(page)
            assert sum(isinstance(act, str) for act in acts) <= most, name
