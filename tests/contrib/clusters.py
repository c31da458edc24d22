"""A Spark cluster of daemons on this machine, for tests and benchmarks."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pyspark

from django_dbtaskqueue.contrib.embedded import free_port
from django_dbtaskqueue.pipeline.spark import find_java, scratch
from tests.support import eventually

LONG_S = 200.0  # of a quiet machine: several Java processes start
# For the poller as well: everything is on this machine, and small.
SETTINGS = ["driver.host=127.0.0.1", "driver.bindAddress=127.0.0.1", "executor.memory=512m"]


class Cluster:
    """A master and workers of one core each, on this machine."""

    def __init__(self, stack: ExitStack, folder: Path, workers: int = 2) -> None:
        self._stack, self.folder = stack, folder
        port = free_port()
        self.url = f"spark://127.0.0.1:{port}"
        self._run("master.Master", "--port", str(port))
        self._await("daemon-0", "I have been elected leader")
        worker = ["worker.Worker", "--cores", "1", "--memory", "1g", self.url]
        self._workers = [self._run(*worker, "--work-dir", str(folder / f"work-{n}")) for n in range(workers)]
        for number in range(workers):
            self._await(f"daemon-{number + 1}", "Successfully registered with master")

    def executors(self) -> list[psutil.Process]:
        """Return the Java processes that run tasks: they have Python workers."""
        children = [child for worker in self._workers for child in psutil.Process(worker.pid).children()]
        return [child for child in children if child.children(recursive=True)]

    def _run(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"daemon-{len(list(self.folder.glob('daemon-*')))}"
        env = os.environ | {"JAVA_HOME": str(find_java(scratch())), "PYSPARK_PYTHON": sys.executable}
        env |= {"SPARK_DAEMON_MEMORY": "256m", "SPARK_LOCAL_IP": "127.0.0.1"}
        program = Path(pyspark.__file__).parent / "bin" / "spark-class"
        command = [str(program), f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1", "--webui-port", "0"]
        with log.open("wb") as file:
            process = subprocess.Popen([*command, *arguments], env=env, stdout=file, stderr=subprocess.STDOUT)
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)
        return process

    def _await(self, log: str, ready: str) -> None:
        def is_ready() -> None:
            said = (self.folder / log).read_text(errors="replace")
            assert ready in said, said

        eventually(is_ready, timeout=LONG_S)
