"""A stream's position belongs to one server: another one counts its transactions anew."""

from typing import Any

import pytest

from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.pipeline.database import Database, schema_of
from django_dbtaskqueue.pipeline.source.stream_reader import TaskStreamReader
from django_dbtaskqueue.pipeline.source.task_reader import Selection


@pytest.mark.parametrize("once", [False, True])
def test_a_position_of_another_server_or_of_one_set_back_is_refused(pg: Database, once: bool) -> None:
    reader = TaskStreamReader(pg, Selection(pg.tables.task, schema_of("task")), "task")
    if once:
        reader.prepareForTriggerAvailableNow()
    limit: Any = None  # it takes all rows
    here = reader.latestOffset(reader.initialOffset(), limit)
    assert reader.latestOffset({"transaction": here["transaction"]}, limit)["server"] == here["server"]
    for wrong in ({**here, "server": 1}, {**here, "transaction": here["transaction"] + 10**6}):
        for ask in (
            lambda at: reader.latestOffset(at, limit),
            lambda at: reader.partitions(reader.initialOffset(), at),
        ):
            with pytest.raises(PipelineError, match=r"moved or set back.* stream --unregister NAME"):
                ask(wrong)


def test_every_user_may_ask_for_the_server(pg: Database) -> None:
    with pg.open() as link:
        assert link.run("SELECT has_function_privilege('public', 'pg_control_system()', 'execute')") == [(True,)]
