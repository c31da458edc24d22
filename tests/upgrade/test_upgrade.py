"""What docs/howto/deploy.md promises of a new release: migrate first; then old and new work at the same time."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from time import monotonic

import psycopg
import pytest

from tests.upgrade import planted
from tests.upgrade.conftest import Next
from tests.upgrade.releases import Release
from tests.upgrade.site import BrokenError, site

pytestmark = [pytest.mark.upgrade, pytest.mark.timeout(7200)]
CI_ROWS = 100_000
ROWS = int(os.environ.get("UPGRADE_ROWS", CI_ROWS))
MAX_WAIT_S = 0.1  # for a lock on the task table
LOOK_S = 0.002  # between two looks at the locks
WAITS = """\
SELECT coalesce(max(extract(epoch FROM clock_timestamp() - waitstart)), 0)::float FROM pg_locks
WHERE NOT granted AND relation = 'dbtaskqueue_task'::regclass
"""


def longest_wait(url: str, ended: Event) -> float:
    longest = 0.0
    with psycopg.connect(url, autocommit=True) as connection:
        while not ended.wait(LOOK_S):
            longest = max(longest, *connection.execute(WAITS).fetchone())
    return longest


def migrate(url: str, new: Release) -> float:
    """Apply the migrations of a release; return how long they kept others waiting."""
    began, ended = monotonic(), Event()
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(longest_wait, url, ended)
        try:
            new.manage(url, "migrate", "--verbosity", "0")
        finally:
            ended.set()
    print(f"{new.name}: migrated in {monotonic() - began:.1f} s, longest wait {waited.result() * 1000:.0f} ms")
    return waited.result()


def upgrade(url: str, folder: Path, old: Release, new: Release, rows: int = 0) -> int:
    """Upgrade a site under load, as the page says; return the number of its tasks, which have all ended well.

    ``rows``: tasks of other queues. Unless it is CI that runs this, nobody may wait for them to be migrated.
    """
    with site(url, folder, old) as here:
        if rows:
            here.ask("INSERT INTO dbtaskqueue_task (queue_name) SELECT 'built' FROM generate_series(1, %s)", rows)
        pollers, producers = [here.poller(old)], [here.producer(old)]
        here.until(lambda: here.all_have_run(old))
        waited = migrate(url, new)
        assert waited <= MAX_WAIT_S or rows <= CI_ROWS, f"{waited:.3f} s"
        migrated = int(here.ask("SELECT coalesce(max(id), 0) FROM effects")[0][0])
        pollers.append(here.poller(new))
        producers.append(here.producer(new))
        here.until(lambda: here.all_have_run(old, new, since=migrated))
        here.stop(producers, pollers)
        return here.check_ends()


def test_the_last_release_works_beside_todays(previous: Release, today: Release, database: str, tmp_path: Path) -> None:
    assert upgrade(database, tmp_path, previous, today, ROWS) > 1000


def test_a_safe_migration_stops_nobody(today: Release, next_release: Next, database: str, tmp_path: Path) -> None:
    assert upgrade(database, tmp_path, today, next_release(planted.SAFE), ROWS) > 1000


def test_one_that_stops_others_is_found(today: Release, next_release: Next, database: str, tmp_path: Path) -> None:
    """The test above can fail."""
    with pytest.raises(BrokenError, match="IntegrityError"):
        upgrade(database, tmp_path, today, next_release(planted.STOPS_SETTLING))


def test_a_new_poller_on_the_old_schema_says_what_to_do(today: Release, next_release: Next, database: str) -> None:
    new = next_release(planted.SAFE)
    today.manage(database, "migrate", "--verbosity", "0")
    command = [new.python, "-m", "django", "runtaskpoller", "--drain"]
    done = subprocess.run(command, env=new.env(database), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    assert "python manage.py migrate" in done.stderr and "planted" in done.stderr
    assert "Traceback" not in done.stderr
