"""Run hardbyte's harness without Docker: ``python -m tests.benchmarks.neutral ITS_FOLDER --systems dbtaskqueue …``.

Its folder is a clone of postgresql-job-queue-benchmarking. ``DBTASKQUEUE_POSTGRES_BIN`` names a PostgreSQL that has the
extension pgstattuple. Its own adapters are started as they are; what they import must be installed.
"""

import sys
import tempfile
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from tests.benchmarks.server import REPOSITORY

if __name__ == "__main__":
    root = Path(sys.argv.pop(1)).absolute()
    sys.path.insert(0, str(root))
    from bench_harness import adapters, orchestrator

    def add(name: str, program: Path) -> None:
        def launch(manifest, overrides):  # type: ignore[no-untyped-def]
            environment = {**adapters._base_env(manifest, overrides), "PYTHONPATH": str(REPOSITORY)}
            return adapters.LaunchSpec(
                ["node" if program.suffix == ".js" else sys.executable, str(program)], environment
            )

        adapters.ADAPTERS[name] = adapters.AdapterEntry(program.parent, lambda skip: None, launch)

    add("dbtaskqueue", Path(__file__).with_name("adapter.py"))
    for program in ("procrastinate-bench/main.py", "absurd-bench/main.py", "pgboss-bench/main.js"):
        add(program.partition("-")[0], root / program)
    with (
        tempfile.TemporaryDirectory(prefix="dbtaskqueue-neutral-", ignore_cleanup_errors=True) as folder,
        closing(EmbeddedPostgres.start(Path(folder), settings={"max_connections": "500"})) as server,
    ):
        url = urlsplit(server.url)
        adapters.PG_PORT, adapters.PG_USER, adapters.PG_PASS = url.port, url.username, url.password
        orchestrator.start_postgres = orchestrator.stop_postgres = lambda image: None
        orchestrator._compose_stop_postgres = lambda image: server.stop("immediate")
        orchestrator._compose_start_postgres = lambda image: server.restart("immediate")
        sys.exit(orchestrator.main(["run", "--fast", *sys.argv[1:]]))
