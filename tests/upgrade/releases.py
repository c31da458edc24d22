"""Releases of this project: each a wheel, installed in a virtual environment of its own."""

import io
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from example_project.database import database_from_url
from tests.patience import PATIENCE
from tests.stranger.environments import REPOSITORY, build_wheel, execute

# The earlier state whose pollers and producers must work on today's schema. With each release: that release.
PREVIOUS = "ede5dcc98754e4faac997cfb2c07e4a455c0060c"
PROJECT = Path(__file__).with_name("project")


@dataclass(frozen=True)
class Release:
    name: str
    python: Path
    app: Path  # the folder of the installed package
    plants: str = ""  # an app of the tests, beside those of the project

    def env(self, database: str) -> dict[str, str]:
        hidden = ("PYTHONPATH", "DATABASE_URL", "DJANGO_SETTINGS_MODULE")
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        ours = {"UPGRADE_DATABASE": json.dumps(database_from_url(database)), "UPGRADE_RELEASE": self.name}
        ours |= {"UPGRADE_APPS": self.plants, "DJANGO_SETTINGS_MODULE": "settings", "PYTHONPATH": str(PROJECT)}
        return kept | ours | {"PYTHONUNBUFFERED": "1"}

    def manage(self, database: str, *arguments: str) -> str:
        return execute([str(self.python), "-m", "django", *arguments], env=self.env(database), cwd=PROJECT)

    def plant(self, migration: str) -> None:
        folder = self.app / "migrations"
        last = max(file.stem for file in folder.glob("[0-9]*.py"))
        (folder / f"{int(last[:4]) + 1:04}_planted.py").write_text(migration.replace("LAST_MIGRATION", last))


def wheel_of(commit: str, folder: Path) -> Path:
    archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, capture_output=True, timeout=PATIENCE)
    assert archive.returncode == 0, (
        f"This clone has no commit {commit}, from which the earlier release is built. "
        f"Fetch it: git fetch --unshallow, or git fetch origin {commit}. {archive.stderr.decode()}"
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder / "source", filter="data")
    return build_wheel(folder, folder / "source")


def install(name: str, wheel: Path, folder: Path, *, plants: str = "") -> Release:
    """Make an environment with this wheel. What it needs (Django, psycopg) is that of the running environment."""
    execute([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    (site,) = folder.glob("lib/python3*/site-packages")
    execute([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)])
    paths: dict[str, Any] = sysconfig.get_paths()
    (site / "needed.pth").write_text("\n".join({paths["purelib"], paths["platlib"]}))
    release = Release(name, folder / "bin/python", site / "django_dbtaskqueue", plants)
    found = execute([str(release.python), "-I", "-c", "import django_dbtaskqueue as app; print(app.__file__)"])
    assert Path(found.strip()).parent == release.app, f"{name} would run {found}"
    return release
