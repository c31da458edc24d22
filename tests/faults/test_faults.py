"""One short run with all faults. Its seed is fixed, so that it fails only by a change; other seeds are for the soak."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN_S = 600  # several times what it takes


@pytest.mark.faults
@pytest.mark.timeout(RUN_S)
def test_nothing_is_broken_when_everything_is(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.faults", "--short", "--seed", "5", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    print(done.stdout)
    assert file.exists(), done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(file.read_text())["counts"]["tasks"] > 0
