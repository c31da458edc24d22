"""PgBouncer in transaction mode, for tests."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import SplitResult

from django_dbtaskqueue.contrib.embedded import free_port
from tests import forks
from tests.patience import until

HERE = "127.0.0.1"
CONFIGURATION = """
[databases]
{name} = host={host} port={server_port} dbname={name} user={user} password={password} pool_size={connections}
[pgbouncer]
listen_addr = {here}
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
server_login_retry = 1
"""


def pgbouncer_program() -> str | None:
    return shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")


@contextmanager
def pgbouncer(program: str, address: SplitResult, *, connections: int = 2) -> Iterator[int]:
    """Run it before the database of an address, with so many connections for everybody; yield its port.

    A poller's threads alone are more than two, so transactions meet all of these.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pgbouncer.ini"
        facts = {"host": address.hostname, "server_port": address.port, "name": address.path[1:]}
        facts |= {"user": address.username, "password": address.password, "connections": connections}
        file.write_text(CONFIGURATION.format(here=HERE, port=port, **facts))
        Path(folder).chmod(0o755)
        account = ["-u", "nobody"] if os.geteuid() == 0 else []  # it refuses to run as root
        with forks.program([program, *account, str(file)], os.environ) as process:
            until(lambda: process.code is not None or answers(port))
            assert process.code is None, process.log
            yield port


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HERE, port)) == 0
