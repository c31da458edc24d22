"""What type checkers are told about ``Task.objects`` is what it has."""

import ast
import inspect

from django_dbtaskqueue.models import querysets
from django_dbtaskqueue.models.querysets import TaskManager, TaskQuerySet, TaskSelection


def test_checkers_are_told_of_every_method_that_comes_from_the_queryset() -> None:
    tree = ast.parse(inspect.getsource(querysets))
    (told,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "_Manager")
    declared = {node.name: [one.arg for one in node.args.kwonlyargs] for node in told.body if hasattr(node, "args")}
    verbs = {name for name, value in vars(TaskQuerySet).items() if inspect.isfunction(value) and name[0] != "_"}
    assert verbs <= declared.keys()
    for name in verbs:
        parameters = inspect.signature(getattr(TaskQuerySet, name)).parameters.values()
        assert [one.name for one in parameters if one.kind is one.KEYWORD_ONLY] == declared[name], name
    assert TaskSelection.__name__ in map(ast.unparse, told.bases), "the verbs are told by their own code"
    assert [name for name in {*declared, *vars(TaskSelection)} - {"_change"} if not hasattr(TaskManager, name)] == []
