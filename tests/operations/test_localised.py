"""Numbers for programs are written without a separator, whatever the site says of numbers for people."""

import re
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from tests.architecture.source import REPOSITORY
from tests.factories import make_task

TEMPLATES = REPOSITORY / "django_dbtaskqueue" / "templates"


@pytest.mark.parametrize("language", ["en", "de"])
@pytest.mark.django_db
def test_the_buttons_of_a_task_with_a_large_number_work(client: Client, settings: Any, language: str) -> None:
    settings.USE_THOUSAND_SEPARATOR, settings.LANGUAGE_CODE = True, language
    client.force_login(User.objects.create_superuser("ada"))
    task = make_task("ERROR", id=1_234_567)
    page = client.get(reverse("admin:dbtaskqueue_task_change", args=[task.pk])).content.decode()
    assert re.findall(r'name="(_selected_action|again)" value="([^"]*)"', page)
    assert not re.findall(r'="[^"]*1[,.\s]234[,.\s]567[^"]*"', page)


def test_each_key_in_a_template_is_written_as_it_is() -> None:
    wrong = [
        f"{file.name}: {found}"
        for file in sorted(TEMPLATES.rglob("*.html"))
        for found in re.findall(r"{{ (?:[\w.]+\.)?(?:pk|id)(?!\|unlocalize)[ |][^}]*}}", file.read_text())
        if "finding.id" not in found  # a text
    ]
    assert not wrong
