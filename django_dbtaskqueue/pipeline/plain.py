"""Results as plain JSON, and files that nobody ever sees a half of."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

from django_dbtaskqueue.core.exceptions import PipelineError


def as_json(result: Any) -> str:
    """Return JSON; times in ISO 8601, durations in seconds, infinities and NaN as null."""
    return json.dumps(plain(result), indent=2, allow_nan=False)


def plain(value: Any) -> Any:
    """Return the value as JSON can hold it."""
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def write_whole(file: Path, text: str) -> None:
    """Write a file so that nobody ever sees a half of it. Raises PipelineError where that is impossible."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise PipelineError(f"{file} cannot be written: {error.strerror}. Give another place.") from error
