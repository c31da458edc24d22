"""System checks: errors in the settings that Django reports before any task is enqueued."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from django.apps import apps
from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, ProgrammingError, connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model
from django.db.utils import load_backend
from django.utils.translation import gettext_lazy as _

from django_dbtaskqueue import registry, signals
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.db import standby
from django_dbtaskqueue.db.liveness import sqlstate
from django_dbtaskqueue.db.session import aliases_of, migrated, model_for, task_aliases
from django_dbtaskqueue.flow.run import PROCESS, Processor
from django_dbtaskqueue.models import Task

SUPPORTED_VENDORS = ("postgresql", "sqlite")
# Backends that can be recognised without their driver.
REFUSED_ENGINES = {"mysql": "MySQL and MariaDB", "oracle": "Oracle"}
PERMISSION_DENIED_SQLSTATE = "42501"
POOLED_BY_HELPERS = 3  # of a poller: its heartbeat, its maintenance, and Django's thread for async processors
READ_COMMITTED = _("Use READ COMMITTED: with a stricter level a checkout fails when another one commits first.")
STRICT_LEVELS = {3: "REPEATABLE READ", 4: "SERIALIZABLE"}  # isolation levels, as psycopg numbers them


@register("dbtaskqueue")
def check_settings(**_: object) -> list[CheckMessage]:
    """Return what is wrong with apps and settings. E001: DBTASKQUEUE cannot be read, so the rest is not looked at."""
    try:
        queues = {name: conf.default_settings(name) for name in conf.settings_queues()}
    except ImproperlyConfigured as error:
        return [Error(str(error), id="dbtaskqueue.E001")]
    processors = [processor for queue in registry.queues() for processor in registry.processors(queue)]
    found = chain(_engines(), _places(queues), *map(_problems, processors), _listeners(), _middleware(processors))
    return [*found, *_code(queues, processors), *_doubts(queues), *_bridge(queues), *_apps()]


@register(Tags.database)
def check_servers(databases: Sequence[str] | None = None, **_: object) -> Iterator[CheckMessage]:
    """E009: a database's server is too old. Django asks this for ``migrate`` and for ``check --database``."""
    for alias in {*databases}.intersection(task_aliases()) if databases else ():
        try:
            with migrated():
                connections[alias].ensure_connection()
        except ImproperlyConfigured as error:
            hint = "Use PostgreSQL 14 or newer, or a Django release that supports this server."
            yield Error(f"Database {alias!r}: {error}", hint=hint, id="dbtaskqueue.E009")
        except DatabaseError:
            continue  # it does not answer: the command that needs it says so


def _engines() -> Iterator[CheckMessage]:
    """E008: tasks would be in a database that is neither PostgreSQL nor SQLite; or E014, in SQLite with a TIME_ZONE."""
    for alias in sorted({*django_settings.DATABASES}.intersection(task_aliases())):
        zone = django_settings.DATABASES[alias].get("TIME_ZONE")
        if name := _refused_engine(django_settings.DATABASES[alias].get("ENGINE", "")):
            words = f"The task queue does not run on {name}, the engine of database {alias!r}."
            hint = 'Use PostgreSQL or SQLite for tasks: a second entry in DATABASES, and DBTASKQUEUE["DATABASE"].'
            yield Error(words, hint=hint, id="dbtaskqueue.E008")
        elif zone not in (None, "UTC", "Etc/UTC") and django_settings.USE_TZ and connections[alias].vendor == "sqlite":
            words = f"Database {alias!r} has the TIME_ZONE {zone!r}. SQLite's clock is UTC: times would compare wrong."
            hint = 'Remove this TIME_ZONE, or use another database for tasks: DBTASKQUEUE["DATABASE"].'
            yield Error(words, hint=hint, id="dbtaskqueue.E014")


def _refused_engine(engine: str) -> str:
    """Return the name of an engine that the task queue refuses, or an empty text. Needs no driver."""
    for part, name in REFUSED_ENGINES.items():
        if part in engine:
            return name
    try:
        vendor = load_backend(engine).DatabaseWrapper.vendor
    except (ImportError, ImproperlyConfigured):
        return ""  # Django says that the engine or its driver is missing
    return "" if vendor in (*SUPPORTED_VENDORS, BaseDatabaseWrapper.vendor) else engine


def check_columns(connection: BaseDatabaseWrapper, task_tables: Iterable[type[Model]]) -> None:
    """Let the database fail if it lacks a table or column of this release, as before ``migrate``. Reads no row."""
    ours = [model for model in apps.get_app_config(Task._meta.app_label).get_models() if not model._meta.proxy]
    quote = connection.ops.quote_name
    for model in dict.fromkeys([*task_tables, *ours]):
        if not router.allow_migrate_model(connection.alias, model):
            continue
        table = quote(model._meta.db_table)
        columns = ", ".join(f"{table}.{quote(str(field.column))}" for field in model._meta.concrete_fields)
        try:
            with connection.cursor() as cursor:
                cursor.execute(f"SELECT {columns} FROM {table} WHERE 1 = 0")  # noqa: S608 -- names of models
        except ProgrammingError as error:
            if sqlstate(error) != PERMISSION_DENIED_SQLSTATE:
                raise


def _places(queues: Mapping[str, conf.QueueSettings]) -> Iterator[CheckMessage]:
    """E002: a queue has an unknown database, or E003: table. E013: DBTASKQUEUE["READ_ALIAS"] names such a database."""
    named = [(f"Queue {name!r} is on", queue.database, "dbtaskqueue.E002") for name, queue in queues.items()]
    read = sorted({name for pair in standby.read_aliases().items() for name in pair})
    named += [('DBTASKQUEUE["READ_ALIAS"] names', alias, "dbtaskqueue.E013") for alias in read]
    for who, alias, number in named:
        if alias not in django_settings.DATABASES:
            words = f"{who} database {alias!r}, which is not in DATABASES."
            yield Error(words, hint=f"Aliases: {', '.join(django_settings.DATABASES)}.", id=number)
    for name in queues:
        for fault in _faults(partial(model_for, name)):
            yield Error(f"Queue {name!r}: {fault}", id="dbtaskqueue.E003")


def _problems(processor: Processor) -> Iterator[CheckMessage]:
    """E004: an atomic processor writes to another database than its queue's."""
    who, aliases = f"{processor.name} of queue {processor.queue!r}", aliases_of(processor.queue)
    if processor.mode == "atomic" and processor.using is not None and aliases != (processor.using,):
        own, there = repr(processor.using), ", ".join(map(repr, aliases))
        words = f"is mode='atomic' and writes to database {own}, but the queue is on {there}"
        hint = f"Use mode='separate' and make the processor idempotent, or set the queue's database to {own}."
        yield Error(f"{who} {words}: one transaction cannot span both.", hint=hint, id="dbtaskqueue.E004")


def _listeners() -> Iterator[CheckMessage]:
    """E006: DBTASKQUEUE["LISTENERS"] names something that is not a listener."""
    calls = (partial(signals.made, path) for path in conf.settings().listeners)
    yield from (Error(fault, id="dbtaskqueue.E006") for fault in _faults(*calls))


def _middleware(processors: Iterable[Processor]) -> Iterator[CheckMessage]:
    """E011: DBTASKQUEUE["MIDDLEWARE"], or that of a processor, names what cannot be called around a processor."""
    imports = [partial(conf.imported, f"Middleware {path!r}", path) for path in conf.settings().middleware]
    faults = _faults(*imports, *(processor.with_middleware for processor in processors))
    yield from (Error(fault, id="dbtaskqueue.E011") for fault in faults)


def _code(queues: Mapping[str, conf.QueueSettings], processors: Iterable[Processor]) -> Iterator[CheckMessage]:
    """E005: an executor, a rule on users, or the router or strategy of a queue, cannot be imported or called."""
    paths = [(f'DBTASKQUEUE["{key}"]', getattr(conf.settings(), key.lower())) for key in ("CAN_OPERATE", "CAN_VIEW")]
    paths += [(f"{one.name} ({one.queue}): executor", one.executor) for one in processors if one.executor != PROCESS]
    for name, queue in queues.items():
        strategy = queue.strategy if "." in queue.strategy else None
        paths += [(f"Queue {name!r}: router", queue.router), (f"Queue {name!r}: strategy", strategy)]
    calls = [partial(conf.imported, f"{what}={path!r}", path) for what, path in paths if isinstance(path, str)]
    hint = "Give the dotted path of a callable; of an executor also that of an object with submit()."
    yield from (Error(fault, hint=hint, id="dbtaskqueue.E005") for fault in _faults(*calls))


def _doubts(queues: Mapping[str, conf.QueueSettings]) -> Iterator[CheckMessage]:
    """W001: settings of a queue contradict each other. W002: an isolation level that makes checkouts fail.

    W003: wake-ups would be lost in a transaction pooler. W006: a pool is smaller than what a poller takes from it.
    """
    for name, queue in queues.items():
        for words, hint in contradictions(queue):
            yield Warning(f"Queue {name!r}: {words}", hint=hint, id="dbtaskqueue.W001")
    for alias in sorted({*django_settings.DATABASES}.intersection(task_aliases())):
        for level in isolation_levels(alias):
            words = f"Database {alias!r} is set to the isolation level {level}."
            yield Warning(words, hint=str(READ_COMMITTED), id="dbtaskqueue.W002")
    settings = conf.settings()
    wanted = settings.threads + POOLED_BY_HELPERS
    for alias, one in django_settings.DATABASES.items():
        pool = (one.get("OPTIONS") or {}).get("pool")
        options = pool if isinstance(pool, dict) else {}
        if pool and (size := options.get("max_size") or options.get("min_size", 4)) < wanted:
            words = f"A poller with {settings.threads} threads uses up to {wanted} connections of the pool of {alias!r}"
            words += f", which has {size}. A task that gets none within the pool's timeout is given back."
            hint = f'Set "max_size" of "pool" to {wanted} or more, or DBTASKQUEUE["THREADS"] to fewer.'
            yield Warning(words, hint=hint, id="dbtaskqueue.W006")
    if settings.notify and not settings.prepare and not settings.listen:
        words = "PREPARE is False, as behind a pooler in transaction mode, and NOTIFY is on: the pooler loses LISTEN."
        hint = 'Give DBTASKQUEUE["LISTEN"] an alias that leads to the server itself, or set NOTIFY to False.'
        yield Warning(words, hint=hint, id="dbtaskqueue.W003")


def _bridge(queues: Container[str]) -> Iterator[CheckMessage]:
    """E012: the HTTP bridge cannot work. W005: a peer may send to a queue that is not known here."""
    peers = conf.settings().bridge.peers
    if peers and find_spec("standardwebhooks") is None:
        hint = "Run: pip install django-dbtaskqueue[bridge]"
        yield Error("The HTTP bridge needs the package standardwebhooks.", hint=hint, id="dbtaskqueue.E012")
    for name, peer in peers.items():
        if peer.ca_file is not None and not Path(peer.ca_file).is_file():
            hint = "Give the path of a file in the format PEM."
            yield Error(f"Peer {name!r}: there is no file {peer.ca_file!r}.", hint=hint, id="dbtaskqueue.E012")
        for queue in peer.queues:
            if queue not in queues:
                words = f"Peer {name!r} may send to queue {queue!r}, which neither the settings nor the code know."
                hint = 'Add it to DBTASKQUEUE["QUEUES"], or register a processor; else its tasks are not received.'
                yield Warning(words, hint=hint, id="dbtaskqueue.W005")


def _apps() -> Iterator[CheckMessage]:
    """E007: an app that the pages in the admin need is not installed."""
    if apps.is_installed("django.contrib.admin") and not apps.is_installed("django_tables2"):
        hint = "Add 'django_tables2' to INSTALLED_APPS. pip has installed it with django-dbtaskqueue."
        yield Error("The task queue's pages in the admin need django_tables2.", hint=hint, id="dbtaskqueue.E007")


def contradictions(settings: conf.QueueSettings) -> Iterator[tuple[str, str]]:
    """Yield the settings of a queue that contradict each other, each with the remedy."""
    poll, idle, lease, ttl = settings.poll_interval, settings.idle_interval, settings.lease, settings.ttl
    if poll > idle:
        words = f"poll_interval={poll} is longer than idle_interval={idle}, the longest pause."
        yield words, "Make idle_interval at least as long as poll_interval."
    if settings.settle_interval * 2 > lease:
        words = f"settle_interval={settings.settle_interval} is more than half of lease={lease}"
        remedy = "Make the lease longer or settle_interval shorter."
        yield f"{words}: outcomes would wait until their lease has expired.", remedy
    if ttl is not None and ttl < poll:
        words = f"ttl={ttl} is shorter than poll_interval={poll}: tasks can expire before a poller has checked once."
        yield words, "Make ttl longer, or poll_interval shorter."
    if settings.capacity is not None and settings.shards:
        remedy = "Give the capacity that one shard may hold, or leave shards out."
        yield "capacity is counted in each shard separately.", remedy
    if settings.paused and settings.concurrency == 0:
        words = "paused=True and concurrency=0 both stop the queue: resuming it would start nothing."
        yield words, "Leave one of them out."


def isolation_levels(alias: str) -> list[str]:
    """Return the isolation level in a database's OPTIONS, if a queue should not run with it."""
    level = django_settings.DATABASES[alias].get("OPTIONS", {}).get("isolation_level")
    name = STRICT_LEVELS.get(level, str(level).upper())
    return [name] if name in STRICT_LEVELS.values() else []


def _faults(*calls: Callable[[], object]) -> Iterable[str]:
    """Return what is wrong with settings that calls refuse, each once."""
    faults: dict[str, None] = {}
    for call in calls:
        try:
            call()
        except ImproperlyConfigured as error:
            faults[str(error)] = None
    return faults
