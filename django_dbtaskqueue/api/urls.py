"""The table of routes of the JSON API: ``path("taskqueue/api/", include("django_dbtaskqueue.api.urls"))``."""

from datetime import timedelta
from functools import partial, wraps

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.urls import path, re_path

from django_dbtaskqueue.api import routing, views
from django_dbtaskqueue.api.routing import Field, Route
from django_dbtaskqueue.models import AuditEntry, Batch, BulkOperation, FailureGroup, Poller, Queue, Schedule
from django_dbtaskqueue.models.control import MISSED_POLICIES, OVERLAP_POLICIES, STATES
from django_dbtaskqueue.operations.search import QUALIFIERS
from django_dbtaskqueue.operations.verbs import ID_VERBS

SHARD = Field("database", routing.TEXT_KIND, "a shard of the queue")
SEARCH = Field("q", routing.TEXT_KIND, "a search, such as status:ERROR queue:claims", "")
SEARCH_FIELDS = (SEARCH, SHARD, *(Field(name, routing.TEXT_KIND, one.help, "") for name, one in QUALIFIERS.items()))
PAGE = (
    Field("limit", routing.PAGE_KIND, "how many rows", 50),
    Field("before", routing.POSITIVE_KIND, "only rows with a smaller id: the next page", None),
)
QUEUE = Field("queue", routing.TEXT_KIND, "a queue's name", "")
WHERE = (QUEUE, SHARD)
CONFIRM = Field("confirm", routing.TEXT_KIND, "the queue's name again", "")
REASON = Field("reason", routing.REASON_KIND, "why, for the audit", "")
VERB_FIELDS = tuple(routing.verb_field(verb, one) for verb in ID_VERBS.values() for one in verb.inputs)
MAX_TASKS = Field("limit", routing.POSITIVE_KIND, "change or skip at most this many tasks", None)
QUEUE_VERB_FIELDS = (
    REASON,
    Field("for", routing.LENGTH_KIND, "how long to pause", None),
    Field("until", routing.MOMENT_KIND, "when the pause ends", None),
)
SETTING_FIELDS = (
    REASON,
    Field("values", routing.OBJECT_KIND, "settings by name", {}),
    Field("reset", routing.TEXTS_KIND, "settings that become the project's again", ()),
)
OF_SCHEDULE = partial(Field, as_sent=True)
SCHEDULE_BODY = (
    REASON,
    OF_SCHEDULE("queue", routing.TEXT_KIND, "the queue of the tasks"),
    OF_SCHEDULE("cron", routing.TEXT_KIND, "such as 0 7 * * mon-fri"),
    OF_SCHEDULE("timezone", routing.TEXT_KIND, "such as Europe/Madrid"),
    OF_SCHEDULE("payload", routing.ANY_KIND, "the payload of the tasks"),
    OF_SCHEDULE("payload_type", routing.TEXT_KIND, "its type"),
    OF_SCHEDULE("priority", routing.PRIORITY_KIND, "the priority of the tasks"),
    OF_SCHEDULE("missed", routing.one_of(MISSED_POLICIES), "what becomes of missed ticks"),
    OF_SCHEDULE("overlap", routing.one_of(OVERLAP_POLICIES), "while the task before is not finished"),
)
AUDIT_FIELDS = (
    *WHERE,
    Field("actor", routing.TEXT_KIND, "a user's name", ""),
    Field("verb", routing.TEXT_KIND, "a verb", ""),
    *PAGE,
)
SINCE = Field("since", routing.LENGTH_KIND, "how far back", timedelta(hours=1))
STATE = Field("state", routing.one_of(STATES), "a state", "")
IDS = Field("ids", routing.WHOLE_LIST_KIND, "ids of up to 1,000 tasks", required=True)

GET, POST = partial(Route, "GET"), partial(Route, "POST")
OF_THE_VERB = "the verb's permission"
OF_THE_OPERATION = "the permission of the operation's verb"

ROUTES = (
    GET("health", views.health, needs=Queue),
    GET("status", views.status, query=(QUEUE,), needs=Queue),
    GET("trends", views.trend, query=(QUEUE, SINCE), needs=Queue, key="points"),
    GET("doctor", views.doctor, needs=Queue, key="findings"),
    GET("tasks", views.tasks, query=(*SEARCH_FIELDS, *PAGE), needs="view_task"),
    GET("tasks/count", views.count_tasks, query=SEARCH_FIELDS, needs="view_task"),
    GET("tasks/<int:pk>", views.task, query=WHERE, needs="view_task; view_payload for what is in it"),
    POST("tasks/<str:verb>/ids", views.act_on_task_ids, body=(IDS, *WHERE, REASON, *VERB_FIELDS), needs=OF_THE_VERB),
    POST("tasks/<str:verb>/preview", views.preview_search, body=(SEARCH, SHARD, *VERB_FIELDS),
         needs=f"{OF_THE_VERB}, view_task"),
    POST("tasks/<str:verb>/search", views.act_on_search, body=(SEARCH, SHARD, REASON, MAX_TASKS, *VERB_FIELDS),
         status=202, needs=OF_THE_VERB),
    GET("operations", views.operations, query=(STATE, *WHERE, *PAGE), needs=BulkOperation),
    GET("operations/<int:pk>", views.operation, query=(QUEUE,), needs=BulkOperation),
    POST("operations/<int:pk>/cancel", views.cancel_operation, body=(QUEUE, REASON), needs=OF_THE_OPERATION),
    POST("operations/<int:pk>/put_back", views.put_back_operation, body=(QUEUE, REASON), status=202,
         needs=OF_THE_OPERATION),
    GET("queues", views.queues, needs=Queue),
    POST("queues/<path:queue>/settings", views.change_queue_settings, body=SETTING_FIELDS,
         needs="change_queue_settings", key="overrides"),
    POST("queues/<path:queue>/purge", views.purge_queue, body=(CONFIRM, SHARD, REASON), status=202,
         needs="purge_queue"),
    POST("queues/<path:queue>/<str:verb>", views.act_on_queue, body=QUEUE_VERB_FIELDS, needs=OF_THE_VERB,
         key="changed"),
    GET("queues/<path:queue>", views.queue, needs=Queue),
    GET("batches", views.batches, needs=Batch, key="batches"),
    GET("schedules", views.schedules, needs=Schedule, key="schedules"),
    POST("schedules/<path:schedule>/add", views.make_schedule, body=SCHEDULE_BODY, needs="add_schedule"),
    POST("schedules/<path:schedule>/edit", views.change_schedule, body=SCHEDULE_BODY,
         needs="change_schedule; view_payload for the payload"),
    POST("schedules/<path:schedule>/<str:action>", views.act_on_schedule, body=(REASON,),
         needs="change_schedule; run_schedule for run, delete_schedule for delete"),
    GET("schedules/<path:schedule>", views.schedule, needs=Schedule),
    GET("pollers", views.pollers, query=(SHARD,), needs=Poller, key="pollers"),
    POST("pollers/<path:poller>/<str:command>", views.command_poller, body=(REASON,),
         needs="control_poller on each queue it serves", key="commanded"),
    GET("failures", views.failures, query=(*WHERE, PAGE[0]), needs=FailureGroup, key="failures"),
    GET("failures/<str:fingerprint>", views.failure, query=(SHARD,), needs=FailureGroup),
    GET("audit", views.audit, query=AUDIT_FIELDS, needs=AuditEntry),
)  # fmt: skip


def _view_of(route: Route) -> routing.Entry:
    """Return the view of a route. A name with a slash may look like another route: that of the right method answers."""
    entry = routing.entry_of(route)

    @wraps(entry)
    def view(request: HttpRequest, **parts: str) -> HttpResponseBase:
        if request.method != route.method:
            place = routing.PATH_PART.sub(lambda part: str(parts[part[2]]), route.path)
            for other in ROUTES:
                found = path(other.path, routing.entry_of(other)).resolve(place)
                if found and other.method == request.method:
                    answer: HttpResponseBase = found.func(request, **found.kwargs)
                    if answer.status_code != 404:
                        return answer
        return entry(request, **parts)

    return view


@routing.opened
def openapi(request: HttpRequest) -> HttpResponse:
    """Answer with the OpenAPI document. It needs no user: it holds no data."""
    return routing.reply(routing.document(ROUTES, request.path.removesuffix("/openapi.json")))


app_name = "dbtaskqueue_api"
urlpatterns = [
    path("openapi.json", openapi, name="openapi"),
    *(path(route.path, _view_of(route), name=route.name) for route in ROUTES),
    re_path("", routing.not_found),
]
