"""A Spark cluster of daemons on this machine, for tests and benchmarks."""

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil

from django_dbtaskqueue.contrib.embedded import free_port
from django_dbtaskqueue.pipeline.spark import find_java, scratch, spark_home
from tests.forks import Started

LONG_S = 200.0  # of a quiet machine: several Java processes start
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # of a process that soon ends: half the start
# For the poller as well: everything is on this machine, and small.
SETTINGS = ["driver.host=127.0.0.1", "driver.bindAddress=127.0.0.1", "executor.memory=512m"]


class Cluster:
    """A master and workers of one core each, on this machine."""

    def __init__(self, stack: ExitStack, folder: Path, workers: int = 2) -> None:
        self._stack, self.folder = stack, folder
        port = free_port()
        self.url = f"spark://127.0.0.1:{port}"
        self._run("master.Master", "--port", str(port)).until_logged("I have been elected leader", timeout=LONG_S)
        worker = ["worker.Worker", "--cores", "1", "--memory", "1g", self.url]
        self._workers = [self._run(*worker, "--work-dir", str(folder / f"work-{n}")) for n in range(workers)]
        for started in self._workers:
            started.until_logged("Successfully registered with master", timeout=LONG_S)

    def executors(self) -> list[psutil.Process]:
        """Return the Java processes that run tasks: they have Python workers."""
        children = [child for worker in self._workers for child in psutil.Process(worker.pid).children()]
        return [child for child in children if child.children(recursive=True)]

    def _run(self, name: str, *arguments: str) -> Started:
        log = self.folder / f"daemon-{len(list(self.folder.glob('daemon-*')))}"
        home = spark_home(scratch())
        env = os.environ | {"JAVA_HOME": str(find_java(scratch())), "PYSPARK_PYTHON": sys.executable}
        env |= {"SPARK_HOME": home, "SPARK_DAEMON_MEMORY": "256m", "SPARK_LOCAL_IP": "127.0.0.1"}
        env |= {"SPARK_DAEMON_JAVA_OPTS": QUICK_JAVA, "SPARK_LAUNCHER_OPTS": QUICK_JAVA}
        command = [f"{home}/bin/spark-class", f"org.apache.spark.deploy.{name}"]
        command += ["--host", "127.0.0.1", "--webui-port", "0"]
        started = Started([*command, *arguments], env, self.folder, log)
        self._stack.callback(started.kill)
        return started
