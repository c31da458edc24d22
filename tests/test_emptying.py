"""Between tests with real commits the databases are emptied."""

import pytest
from django.contrib.auth.models import Group, Permission, User
from django.contrib.contenttypes.models import ContentType
from django.db import connections

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.models import TaskHistory
from tests.emptying import STAY, empty
from tests.flow.conftest import alias as alias
from tests.support import sql

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)


def test_nothing_stays_but_content_types_and_permissions(alias: str) -> None:
    known = {table: count(alias, table) for table in STAY}
    enqueue("work", using=alias)
    TaskHistory.objects.using(alias).create(queue="work", task_id=1, status="COMPLETED")
    user = User.objects.db_manager(alias).create_user("ada")
    group = Group.objects.using(alias).create(name="operators")
    group.permissions.add(Permission.objects.using(alias).first())
    user.groups.add(group)
    empty(connections[alias])
    tables = connections[alias].introspection.django_table_names(only_existing=True, include_views=False)
    assert {table: found for table in tables if (found := count(alias, table))} == known
    assert ContentType.objects.using(alias).exists()


def count(alias: str, table: str) -> int:
    return int(sql(f'SELECT count(*) FROM "{table}"', alias=alias)[0][0])
