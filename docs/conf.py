"""The documentation as a site: ``python -m sphinx -W --keep-going -n -b html docs build/docs``.

The pages are plain Markdown, which the repository's host shows as well. What only the site needs is added here while
it is built: the table of contents, the titles of files above code blocks, addresses of files outside ``docs``, and the
tables that the code already holds (``_ext/from_code.py``).
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import django

if TYPE_CHECKING:
    from sphinx.application import Sphinx

REPOSITORY = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
SOURCE_URL = PROJECT["urls"]["Source"]
CONTENTS = {
    "Learn": ["tutorial", "flight-desk"],
    "Write tasks": [
        *("howto/django-tasks", "howto/schedules", "howto/workflows", "howto/durable-steps"),
        *("howto/one-task-for-many-calls", "howto/limit-a-queue", "howto/middleware", "howto/wait-for-a-task"),
        *("howto/test-your-tasks", "howto/bridge", "howto/own-tables", "howto/write-a-driver", "howto/come-over"),
    ],
    "Run pollers": ["howto/deploy", "howto/run-in-the-web-process", "howto/tune", "howto/more-than-one-database"],
    "Operate": ["howto/operate-at-night", "howto/why-a-task-does-not-run", "howto/stop-tasks", "howto/observability"],
    "Spark": [
        *("pipeline-tutorial", "howto/pipeline-cookbook", "howto/spark-cluster", "howto/own-pipelines"),
        "reference/pipeline",
    ],
    "Look up": [
        *("reference/api", "reference/pull", "reference/signals", "reference/outcomes-and-retries"),
        *("reference/statuses", "reference/semantics", "reference/tables"),
        *("reference/settings", "reference/commands", "reference/operations", "reference/http-api"),
        *("reference/admin", "reference/errors", "reference/python", "reference/stability"),
    ],
    "Understand": [
        *("explanation/comparison", "explanation/performance", "explanation/reliability", "explanation/scale"),
        "design",
        "decisions/index",
    ],
}
DECISIONS = "\n```{toctree}\n:glob:\n\n*\n```\n"
TITLED_FENCE = re.compile(r'^```(\w+) title="([^"]+)"$', re.MULTILINE)
OUTSIDE_LINK = re.compile(r"\]\((?:\.\./)+((?:tests|example_project|django_dbtaskqueue)/[^)\s]+|[A-Z]+\.md)\)")

sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "docs" / "_ext")]  # this checkout, whatever is installed
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings_static")
django.setup()

from_code = importlib.import_module("from_code")

project = PROJECT["name"]
release = version = PROJECT["version"]
author = PROJECT["authors"][0]["name"]
project_copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinxcontrib.mermaid", "sphinxext.opengraph"]
exclude_patterns = ["_ext", "files", "images"]
nitpicky = True

myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# Annotations name internal classes too, and those of other projects, which a build without network cannot look up.
nitpick_ignore_regex = [("py:class", ".*")]
default_role = "code"

copybutton_exclude = ".linenos, .gp, .go"  # the prompt and the output of a session
ogp_site_url = PROJECT["urls"]["Documentation"]
ogp_image = f"{SOURCE_URL}/raw/main/docs/images/admin-overview-light.webp"
ogp_social_cards = {"enable": False}  # they need matplotlib

html_theme = "furo"
html_static_path, html_css_files = ["_static"], ["site.css"]
html_title = f"{project} {release}"
html_theme_options = {"source_repository": SOURCE_URL, "source_branch": "main", "source_directory": "docs/"}


def adapt(app: Sphinx, name: str, source: list[str]) -> None:
    """Add what only the site needs to the text of a page."""
    text = TITLED_FENCE.sub(r"```{code-block} \1\n:caption: \2\n", from_code.fill(source[0]))
    text = OUTSIDE_LINK.sub(rf"]({SOURCE_URL}/blob/main/\1)", text)
    text += "".join(map(toctree, CONTENTS)) if name == "index" else ""
    source[0] = text + DECISIONS if name == "decisions/index" else text


def toctree(caption: str) -> str:
    """Return a part of the table of contents as a directive."""
    pages = "\n".join(CONTENTS[caption])
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def setup(app: Sphinx) -> None:
    """Connect this file to the build."""
    app.connect("source-read", adapt)
