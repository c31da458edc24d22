"""A program that moves tasks between shards in forked children, each killed where its parent's stdin says.

For each line a child re-balances the queue ``spread``, from one shard, to another if they are named:
``STEP [SOURCE TARGET]``. It kills itself with SIGKILL at that step; at a number instead of a step it is killed after so
many milliseconds. The program then writes how the child ended. ``end`` runs it to the end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import django


def child(last: str, places: list[str]) -> int:
    """Move in a forked process until ``last``; return its signal or exit code."""
    pid = os.fork()
    if pid:
        killer = threading.Timer(int(last) / 1000, os.kill, (pid, signal.SIGKILL)) if last.isdecimal() else None
        if killer:
            killer.start()
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its number is not given to another process yet
        if killer:
            killer.cancel()
            killer.join()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    from django_dbtaskqueue.flow.shard_move import ShardMove
    from django_dbtaskqueue.operations.permissions import Actor
    from django_dbtaskqueue.operations.shards import move_shards

    def at_step(step: str) -> None:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    code = 1
    try:
        target = places[1] if places else None
        move_shards(ShardMove("spread", target, behind=True, at_step=at_step), Actor(), sources=places[:1])
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    """Obey stdin."""
    django.setup()
    for line in sys.stdin:
        last, *places = line.split()
        sys.stdout.write(f"{child(last, places)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
