"""Commands of ``manage.py`` in a process that runs many in turn, for one start of Java.

``python -m tests.pipeline.commands``: for each line of stdin, the words of a command in JSON, the command runs to its
end as in a process of its own: it starts a session of Spark itself. The answer is its exit code, output and errors.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING

from django.core.management import ManagementUtility
from pyspark.sql import SparkSession

from tests.patience import PATIENCE

if TYPE_CHECKING:
    from tests.conftest import ProcessDatabase

REPOSITORY = Path(__file__).resolve().parents[2]
Answer = tuple[int, str, str]  # exit code, output, errors
CHEAP = (  # so that little is compiled
    *("--master", "local[1]"),
    *("--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"),
    *("--conf", "spark.sql.shuffle.partitions=1"),
    *("--conf", "spark.sql.codegen.wholeStage=false"),
    *("--conf", "spark.sql.codegen.factoryMode=NO_CODEGEN"),
)


@contextmanager
def in_turn(database: ProcessDatabase, *options: str) -> Iterator[Callable[..., Answer]]:
    """Yield what runs one job after the other in one process, each with these options of Spark."""
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, env=database.env, cwd=REPOSITORY, stdin=PIPE, stdout=PIPE, text=True) as process:

        def run(*words: object) -> Answer:
            asked = json.dumps(["runtaskpipeline", *map(str, words), *options, "--quiet"])
            print(asked, file=process.stdin, flush=True)
            code, out, err = json.loads(process.stdout.readline())
            assert "Traceback" not in err
            return code, out, err

        yield run
        process.communicate(timeout=PATIENCE)


def main() -> None:
    for line in sys.stdin:
        out, err, code = io.StringIO(), io.StringIO(), 0
        with redirect_stdout(out), redirect_stderr(err):
            try:
                ManagementUtility(["manage.py", *json.loads(line)]).execute()
            except SystemExit as end:
                code = int(end.code or 0)
        if session := SparkSession.getActiveSession():
            session.stop()
        print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)


if __name__ == "__main__":
    main()
