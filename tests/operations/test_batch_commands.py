"""``taskqueue batches``."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from django_dbtaskqueue import batch, enqueue
from django_dbtaskqueue.models import Task

pytestmark = pytest.mark.django_db(transaction=True)


def said(*arguments: Any) -> str:
    out = StringIO()
    call_command("taskqueue", "batches", *arguments, stdout=out)
    return out.getvalue()


def test_batches_are_listed_shown_and_cancelled(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {}}}
    assert "no batch" in said()
    with batch("import") as b:
        enqueue("parcels")
        enqueue("parcels")
    [document] = json.loads(said("list", "--json"))
    assert (document["name"], document["total"], document["statuses"]["CREATED"]) == ("import", 2, 2)
    assert "0 of 2" in said()
    assert "2 tasks cancelled." in said("cancel", str(b.id))
    assert "0 tasks reprocessed." in said("retry", str(b.id))
    assert {row.status for row in Task.objects.all()} == {"POISON"}
    with pytest.raises(CommandError, match="no batch '999'"):
        said("show", "999")
