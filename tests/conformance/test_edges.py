"""The audit, which judges most tests of this folder, sees whoever leaves the status graph or forges a counter."""

from itertools import permutations

import pytest

from django_dbtaskqueue.core.states import BY_VERB, EDGES, TERMINAL
from tests.conformance.conftest import World
from tests.support import Audit, sql, taken_back

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])


def test_the_audit_sees_each_forbidden_edge(world: World, audit: Audit) -> None:
    """A checker that cannot fail proves nothing: here the rule is broken by hand."""
    legal = {(source, edge.target) for edge in EDGES for source in edge.sources}
    forbidden = [pair for pair in permutations(BY_VERB["delete"].sources, 2) if pair not in legal]
    assert forbidden
    for source, target in forbidden:
        with taken_back(world.alias):
            task = world.make(source)
            over = target in TERMINAL
            shape = {"ready_time": None if over else task.create_time, "final_status": target if over else None}
            world.tasks.filter(pk=task.pk).update(status=target, poller_instance=None, finish_time=None, **shape)
            assert audit.problems() == [f"illegal edge {source} -> {target}"]


def test_the_audit_sees_a_forged_counter(world: World, audit: Audit) -> None:
    for change, problem in (
        ("total_attempt = total_attempt + 2", "the fencing token changed by other than one checkout"),
        ("total_attempt = total_attempt + 1", "a checkout charged other than one attempt"),
        ("attempt = attempt - 1", "an attempt was given back to a task that is not in line"),
        ("attempt = attempt + 1, total_attempt = total_attempt + 1", "a checkout came before the task was due"),
    ):
        with taken_back(world.alias):
            sql(f"UPDATE dbtaskqueue_task SET {change} WHERE id = %s", [world.take(attempt=2).id], world.alias)
            assert any(found.startswith(problem) for found in audit.problems()), change
