"""The desk in one process: filing, the pages, and what the processor makes of the real record."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_dbtaskqueue import signal
from django_dbtaskqueue.models import Attempt, Task
from django_dbtaskqueue.testing import advance, drain
from example_project.flights import data, desk
from example_project.flights.demo import filing, loading
from example_project.flights.desk import HELD_QUEUE, QUEUE, file_claim, file_claims, hold_claim, report_arrival
from example_project.flights.models import Airline, Claim, Filing, Flight, Plane
from tests.example.test_data import shorten_year

REFERENCE = "2013-01-01-UA-1545-EWR-IAH"
PLACE = {"carrier": "ua", "number": "1545", "origin": "ewr", "destination": "iah"}
FORM = {**PLACE, "flown_on": "2013-01-01", "passenger": "Ada Lovelace"}


@pytest.fixture(scope="module")
def sample() -> list[data.FlightRecord]:
    with pytest.MonkeyPatch.context() as patch:
        shorten_year(patch)
        return data.sample(60).flights


@pytest.fixture
def flight(db: None) -> Flight:
    loading.load([next(iter(data.flights()))])
    return Flight.objects.get(reference=REFERENCE)


def test_a_claim_and_its_task_are_committed_or_rolled_back_together_and_a_flight_is_filed_once(flight: Flight) -> None:
    assert (filing.withdraw([REFERENCE]), filing.still_present([REFERENCE])) == (1, 0)
    assert not Filing.objects.exists() and not Task.objects.exists()
    file_claim(flight, "Ada Lovelace")
    task = Task.objects.get(queue=QUEUE)
    assert (task.reference, task.status) == (REFERENCE, "CREATED")
    assert task.payload == {"flight": REFERENCE, "passenger": "Ada Lovelace"}
    assert Filing.objects.get().passenger == "Ada Lovelace"
    for again in (lambda: file_claim(flight, "Charles Babbage"), lambda: file_claims([flight], "Charles Babbage")):
        with pytest.raises(IntegrityError), transaction.atomic():
            again()
    assert Task.objects.count() == Filing.objects.count() == 1


def test_filing_again_in_bulk_leaves_alone_what_was_filed(db: None, sample: list[data.FlightRecord]) -> None:
    loading.load(sample)
    references = [record.reference for record in sample]
    filed: list[int] = []
    filing.file_each(references[:5])
    filing.file_in_bulk(references, filed.append)
    filing.file_in_bulk(references, filed.append)
    assert filed == [60, 60] and Task.objects.count() == Filing.objects.count() == 60


def test_loading_again_keeps_an_operators_corrections(flight: Flight) -> None:
    Flight.objects.update(arrival_delay=240)
    loading.load([next(iter(data.flights()))])
    assert Flight.objects.get().arrival_delay == 240
    assert (Airline.objects.count(), Plane.objects.count()) == (16, 3_322)


def test_the_record_drives_every_outcome(db: None, sample: list[data.FlightRecord]) -> None:
    loading.load(sample)
    filing.file_in_bulk([record.reference for record in sample], lambda done: None)
    drain(QUEUE, with_scheduled=True)
    for task in Task.objects.filter(queue=QUEUE):
        flight = Flight.objects.select_related("plane").get(reference=task.reference)
        attempts = Attempt.objects.filter(task_id=task.id).count()
        expected: tuple[str, int, str] = ("COMPLETED", 0, "")
        if flight.departure_delay is None and flight.plane_id is None:
            expected = ("POISON", attempts, "no aircraft was ever assigned")
        elif flight.departure_delay is not None and flight.arrival_delay is None:
            expected = ("ERROR", 3, "ArrivalNotRecorded")
        elif flight.departure_delay is None and flight.plane is None:
            expected = ("ERROR", 1, f"{flight.plane_id!r} is not on the register")
        assert (task.status, attempts) == expected[:2] and expected[2] in str(task.process_result)
        assert Claim.objects.filter(flight=flight).exists() == (task.status == "COMPLETED")
    assert set(Task.objects.values_list("status", flat=True)) == {"COMPLETED", "ERROR", "POISON"}


def test_an_operator_completes_the_record_and_reprocesses(db: None, sample: list[data.FlightRecord]) -> None:
    # Given a cancelled flight whose aircraft is not on the register, so that its task ended in ERROR
    register = {tail for tail, _, _ in data.planes()}
    uncertain = [record for record in sample if record.departure_delay is None and record.tail_number]
    record = next(record for record in uncertain if record.tail_number not in register)
    loading.load([record])
    filing.file_each([record.reference])
    drain(QUEUE)
    assert Task.objects.get().status == "ERROR"
    Plane.objects.create(tail_number=record.tail_number, model="entered by hand", seats=100)
    assert Task.objects.filter(queue=QUEUE).reprocess() == 1
    drain(QUEUE)
    assert (Task.objects.get().status, Claim.objects.get().decision) == ("COMPLETED", "paid")


FOUR_HOURS = 240


def held() -> Task:
    return Task.objects.get(queue=HELD_QUEUE)


@pytest.mark.parametrize(("miles", "dollars"), [(500, 250), (3_000, 600)])
def test_a_held_claim_is_decided_after_the_report_and_approval(flight: Flight, miles: int, dollars: int) -> None:
    Flight.objects.update(distance_miles=miles, arrival_delay=None)
    hold_claim(flight, "Ada Lovelace")
    drain(HELD_QUEUE)
    advance(timedelta(days=30))
    assert not Claim.objects.exists()
    assert report_arrival(flight.reference, FOUR_HOURS)
    drain(HELD_QUEUE)
    if dollars > 400:  # above a sum an operator approves
        assert not Claim.objects.exists()
        advance(timedelta(days=3))
        signal(held(), desk.APPROVED)
        drain(HELD_QUEUE)
    assert (held().status, held().result, held().attempt) == ("COMPLETED", dollars, 1)
    assert Claim.objects.get().compensation == dollars


def test_without_a_report_the_claim_ends_and_an_operator_sees_why(flight: Flight) -> None:
    Flight.objects.update(arrival_delay=None)
    hold_claim(flight, "Ada Lovelace")
    for _wait in range(2):
        drain(HELD_QUEUE)
        advance(timedelta(days=90))
    assert held().status == "ERROR" and "waited for the signal" in str(held().process_result)
    assert not report_arrival("unknown", FOUR_HOURS)


def test_a_passenger_files_a_claim_and_sees_it_decided(flight: Flight, client: Client) -> None:
    filed = client.post(reverse("flights:new_claim"), FORM)
    for words in ((REFERENCE, "Ada Lovelace", "CREATED"), ("COMPLETED", "nothing is due")):
        page = client.get(filed["Location"]).content.decode()
        assert all(text in page for text in words)
        drain(QUEUE)


def test_a_bad_form_and_a_second_claim_are_refused_in_words(flight: Flight, client: Client) -> None:
    for change, words in (
        ({"number": "1546"}, "There is no flight 2013-01-01-UA-1546-EWR-IAH in the timetable"),
        ({"number": "many"}, "Enter a whole number"),
        ({"flown_on": "2013-02-30"}, "Enter a valid date"),
        *(({"passenger": "a\0b"}, "Null characters are not allowed"), ({"passenger": ""}, "This field is required")),
    ):
        answer = client.post(reverse("flights:new_claim"), {**FORM, **change})
        assert (answer.status_code, words in answer.content.decode()) == (400, True), change
        assert not Filing.objects.exists() and not Task.objects.exists()
    _first, answer = (client.post(reverse("flights:new_claim"), FORM) for _ in range(2))
    assert (answer.status_code, "was filed before" in answer.content.decode()) == (400, True)
    assert Filing.objects.count() == Task.objects.count() == 1


def test_the_form_needs_its_token_and_is_not_inline(flight: Flight, client: Client) -> None:
    page = client.get(reverse("flights:new_claim"), FORM).content.decode()
    assert "csrfmiddlewaretoken" in page and 'value="iah"' in page
    assert "<script" not in page and "style=" not in page
    client.handler.enforce_csrf_checks = True
    assert client.post(reverse("flights:new_claim"), FORM).status_code == 403


def test_pages_and_processor_ask_few_questions(flight: Flight, client: Client, django_assert_num_queries: Any) -> None:
    file_claim(flight, "Ada Lovelace")
    with django_assert_num_queries(0):
        assert client.get(reverse("flights:home")).status_code == 200
    with django_assert_num_queries(3):
        assert client.get(reverse("flights:claim", args=[REFERENCE])).status_code == 200
    assert client.get(reverse("flights:claim", args=["2013-01-01-UA-1-EWR-IAH"])).status_code == 404
    with CaptureQueriesContext(connection) as asked:
        drain(QUEUE)
    assert len([query for query in asked if "flights_" in query["sql"]]) == 2


def test_the_desks_tables_are_in_the_admin(flight: Flight, admin_client: Client) -> None:
    file_claim(flight, "Ada Lovelace")
    drain(QUEUE)
    for model in ("airline", "plane", "flight", "filing", "claim"):
        assert admin_client.get(reverse(f"admin:flights_{model}_changelist")).status_code == 200
