"""Migrations of a large table: work goes on. How long it waits is measured on demand, on a table of any size."""

import pytest

from tests.upgrade import planted
from tests.upgrade.conftest import Next
from tests.upgrade.releases import Release
from tests.upgrade.sizes import MAX_WAIT_S, fill, migrate

pytestmark = [pytest.mark.upgrade, pytest.mark.timeout(7200)]
CI_ROWS = 100_000
# A rewrite of the table, under a lock that nobody gets past.
REWRITE = f"""{planted.HEAD}
        migrations.RunSQL("ALTER TABLE dbtaskqueue_task ALTER COLUMN attempt TYPE bigint"),
    ]
"""


def test_tasks_are_enqueued_and_settled_while_a_large_table_is_migrated(
    previous: Release, today: Release, next_release: Next, database: str, pytestconfig: pytest.Config
) -> None:
    """First today's migrations, then one that a next release could bring."""
    rows = pytestconfig.getoption("rows", default=0)
    fill(database, previous, rows or CI_ROWS)
    for name, release in {"today": today, "planted": next_release(planted.SAFE)}.items():
        probe, took = migrate(database, release)
        print(
            f"{name}: {rows or CI_ROWS:,} rows, migrated in {took:.1f} s; {probe.rounds} rounds meanwhile, longest "
            f"{probe.longest_round_s * 1000:.0f} ms, longest wait for a lock {probe.longest_wait_s * 1000:.0f} ms"
        )
        assert probe.rounds
        if rows:  # on demand, on a machine that does nothing else
            assert probe.longest_wait_s <= MAX_WAIT_S, f"{name}: {probe.longest_wait_s:.3f} s"


def test_the_probe_sees_a_table_that_is_locked(today: Release, next_release: Next, database: str) -> None:
    """The figure above can be bad: a rewrite keeps the probe waiting for all of its time."""
    fill(database, today, CI_ROWS)
    probe, _took = migrate(database, next_release(REWRITE))
    assert probe.longest_wait_s > 0
