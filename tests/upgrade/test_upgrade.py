"""What docs/howto/deploy.md promises of a new release: migrate first; then old and new work at the same time."""

import subprocess
from pathlib import Path

import pytest

from tests.upgrade import planted
from tests.upgrade.conftest import Next
from tests.upgrade.releases import Release
from tests.upgrade.site import BrokenError, site

pytestmark = [pytest.mark.upgrade, pytest.mark.timeout(600)]


def upgrade(url: str, folder: Path, old: Release, new: Release) -> int:
    """Upgrade a site under load, as the page says; return the number of its tasks, which have all ended well."""
    with site(url, folder, old) as here:
        pollers, producers = [here.poller(old)], [here.producer(old)]
        here.until(lambda: here.all_have_run(old))
        new.manage(url, "migrate", "--verbosity", "0")
        migrated = here.newest_effect()
        pollers.append(here.poller(new))
        producers.append(here.producer(new))
        here.until(lambda: here.all_have_run(old, new, since=migrated))
        here.stop(producers, pollers)
        return here.check_ends()


def test_the_last_release_works_beside_todays(previous: Release, today: Release, database: str, tmp_path: Path) -> None:
    assert upgrade(database, tmp_path, previous, today) > 1000


def test_todays_release_and_one_with_a_safe_migration_work_side_by_side(
    today: Release, next_release: Next, database: str, tmp_path: Path
) -> None:
    assert upgrade(database, tmp_path, today, next_release(planted.SAFE)) > 1000


@pytest.mark.parametrize("migration", ["STOPS_PRODUCERS", "STOPS_SETTLING"])
def test_a_migration_that_stops_older_processes_is_found(
    migration: str, today: Release, next_release: Next, database: str, tmp_path: Path
) -> None:
    """The test above can fail."""
    with pytest.raises(BrokenError, match="IntegrityError"):
        upgrade(database, tmp_path, today, next_release(getattr(planted, migration)))


def test_a_new_poller_on_the_old_schema_says_what_to_do(today: Release, next_release: Next, database: str) -> None:
    new = next_release(planted.SAFE)
    today.manage(database, "migrate", "--verbosity", "0")
    done = subprocess.run(
        [new.python, "-m", "django", "runtaskpoller", "--drain"],
        env=new.env(database), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "python manage.py migrate" in done.stderr
    assert "planted" in done.stderr
    assert "Traceback" not in done.stderr
