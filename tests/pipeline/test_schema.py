"""The columns that Spark sees are the database's."""

from __future__ import annotations

import pytest
from django.db import models

from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.models import Attempt, Task, TaskHistory
from django_dbtaskqueue.pipeline.schema import SCHEMAS, schema_of

KINDS = {
    models.CharField: "string",
    models.TextField: "string",
    models.JSONField: "string",
    models.DateTimeField: "timestamp",
    models.BigAutoField: "bigint",
    models.BigIntegerField: "bigint",
    models.IntegerField: "int",
    models.SmallIntegerField: "smallint",
    models.FloatField: "double",
    models.BooleanField: "boolean",
}


@pytest.mark.parametrize(("table", "model"), [("task", Task), ("history", TaskHistory), ("attempt", Attempt)])
def test_every_column_is_one_of_the_model_s_and_of_its_type(table: str, model: type[models.Model]) -> None:
    columns = {field.column: KINDS[type(field)] for field in model._meta.concrete_fields}
    for field in SCHEMAS[table]:
        assert field.dataType.simpleString() == columns[field.name], field.name


def test_a_schema_of_some_columns_keeps_their_order() -> None:
    assert schema_of("task", iter(["status", "id"])).simpleString() == "struct<status:string,id:bigint>"
    with pytest.raises(PipelineError, match="Did you mean 'queue_name'"):
        schema_of("task", ["queue_nam"])
