"""An error as text that any database accepts: the failure write cannot fail."""

from __future__ import annotations

import traceback

from django_dbtaskqueue import payload as json_payload

TRACEBACK_BYTES = 16_000


def describe(error: BaseException | str) -> dict[str, str]:
    """Return an error as text any database accepts: type, message, traceback. Never raises."""
    if isinstance(error, str):
        return {"t": "", "m": json_payload.clean_text(error[:4000]), "b": ""}
    kind = type(error)
    name = f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(error)
        frames = "".join(traceback.format_exception(error))
    except BaseException as hostile:
        message = frames = f"<{name}; its text raised {type(hostile).__name__}>"
    clean = json_payload.clean_text
    return {
        "t": clean(name)[:200],
        "m": clean(message)[:4000],
        "b": json_payload.tail_bytes(clean(frames), TRACEBACK_BYTES) or "",
    }
