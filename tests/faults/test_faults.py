"""One run of the size for CI. Its seed is the day, so that every day tries something new; the report names it."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

RUN_S = 1200  # many times what it takes


@pytest.mark.faults
@pytest.mark.timeout(RUN_S)
def test_nothing_is_broken_when_everything_is(tmp_path: Path) -> None:
    seed = datetime.now(UTC).toordinal()
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.faults", "--seed", str(seed), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    print(done.stdout)
    assert file.exists(), done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(file.read_text())["counts"]["tasks"] > 0
