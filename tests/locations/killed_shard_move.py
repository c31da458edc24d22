"""Re-balance the queue ``spread`` until a step: from one shard to another if they are named; for `tests.kills.killing`.

``end`` is no step: the move comes to its end.
"""

from collections.abc import Callable

import django

from tests.kills import serve


def move(come_to: Callable[[str], None], source: str | None = None, target: str | None = None) -> None:
    from django_dbtaskqueue.flow.shard_move import ShardMove
    from django_dbtaskqueue.operations.permissions import Actor
    from django_dbtaskqueue.operations.queue_control import move_shards

    move_shards(ShardMove("spread", target, behind=True, at_step=come_to), Actor(), sources=[source] if source else [])


if __name__ == "__main__":
    django.setup()
    serve(move)
