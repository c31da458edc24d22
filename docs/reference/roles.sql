-- Least privilege on PostgreSQL: four roles for four kinds of process. Run it as the owner of the tables, after
-- `python manage.py migrate`, and again after an upgrade. Give a login the role it needs: GRANT dbtaskqueue_poller TO app;
-- What an earlier version of this script granted too much is taken back first.
-- Each login that may connect can take any advisory lock, also those of groups and of `archive`: producers of such a group
-- then wait. So let other logins not connect: REVOKE CONNECT ON DATABASE mysite FROM PUBLIC; and end waits of producers by
-- ALTER ROLE web SET lock_timeout = '5s'; (`enqueue` then raises OperationalError).

DO $$
DECLARE
    wanted text;
BEGIN
    FOREACH wanted IN ARRAY ARRAY['dbtaskqueue_producer', 'dbtaskqueue_poller', 'dbtaskqueue_archiver', 'dbtaskqueue_reader'] LOOP
        IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = wanted) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', wanted);
        END IF;
    END LOOP;
END $$;

REVOKE INSERT ON dbtaskqueue_task FROM dbtaskqueue_producer;
REVOKE INSERT, UPDATE ON dbtaskqueue_queue FROM dbtaskqueue_producer, dbtaskqueue_poller;
REVOKE SELECT ON dbtaskqueue_failuregroup FROM dbtaskqueue_reader;

-- Times that a producer may write, and that migrations leave unchecked: 'infinity' would make pages fail for everybody.
DO $$
DECLARE
    place text[];
BEGIN
    FOREACH place SLICE 1 IN ARRAY ARRAY[['task', 'last_update_time'], ['queue', 'create_time'], ['minutecount', 'minute']] LOOP
        IF NOT EXISTS (SELECT 1 FROM pg_constraint WHERE conname = format('dbtaskqueue_%s_readable', place[1])) THEN
            EXECUTE format(
                'ALTER TABLE %I ADD CONSTRAINT %I CHECK (%I BETWEEN %L AND %L) NOT VALID', 'dbtaskqueue_' || place[1],
                format('dbtaskqueue_%s_readable', place[1]), place[2], '1900-01-01 00:00Z', '9900-01-01 00:00Z'
            );
        END IF;
    END LOOP;
END $$;

-- A producer enqueues. It inserts no status, result or count of attempts. It updates only what `on_duplicate="replace"`,
-- groups and rules of uniqueness change; "replace_running", which ends what runs, is for operators.
GRANT SELECT ON dbtaskqueue_task TO dbtaskqueue_producer;
GRANT INSERT (id, queue_name, reference_number, payload, payload_type, priority, tag, group_key, context, max_attempts,
              lease_seconds, ready_time, parked_by, next_process_time, expire_time)
    ON dbtaskqueue_task TO dbtaskqueue_producer;
GRANT USAGE ON SEQUENCE dbtaskqueue_task_id_seq TO dbtaskqueue_producer; -- enqueue_many numbers its rows itself
GRANT UPDATE (reference_number, payload, payload_type, priority, tag, context, max_attempts, lease_seconds, ready_time,
              parked_by, next_process_time, expire_time, last_update_time, signals)
    ON dbtaskqueue_task TO dbtaskqueue_producer;
-- Signals to tasks (with any text as their actor: a processor that asks who approved must trust producers); a task that is replaced loses its steps.
-- Without the columns of a kind and a position, what it inserts is a signal and no step.
GRANT SELECT, INSERT (location, task_id, task_time, name, result, actor), DELETE ON dbtaskqueue_step TO dbtaskqueue_producer;
-- The lock of a queue with a capacity: PostgreSQL lets a role lock a row that may update one of its columns. What pollers
-- and other producers obey (overrides, a pause) a producer cannot write.
GRANT SELECT, INSERT (name), UPDATE (create_time) ON dbtaskqueue_queue TO dbtaskqueue_producer;
-- References that stay taken (`unique_over="history"`), or for a period (rules of uniqueness, the HTTP bridge).
GRANT SELECT, INSERT, UPDATE (create_time, expire_time) ON dbtaskqueue_usedreference TO dbtaskqueue_producer;
-- An operator's bulk delete frees them, and pollers delete what has expired.
GRANT SELECT, UPDATE (expire_time), DELETE ON dbtaskqueue_usedreference TO dbtaskqueue_poller;
-- Tasks that wait for others, and batches.
GRANT UPDATE (watched, batch) ON dbtaskqueue_task TO dbtaskqueue_producer;
GRANT SELECT, INSERT ON dbtaskqueue_dependency, dbtaskqueue_hold TO dbtaskqueue_producer;
GRANT SELECT, INSERT, UPDATE (callback_location, callback_id) ON dbtaskqueue_batch TO dbtaskqueue_producer;

-- A poller takes and settles. It makes no task: a processor that enqueues needs the producer's role, too.
GRANT SELECT, UPDATE, DELETE ON dbtaskqueue_task TO dbtaskqueue_poller;
GRANT SELECT, INSERT ON dbtaskqueue_attempt, dbtaskqueue_taskhistory TO dbtaskqueue_poller;
GRANT SELECT, INSERT, UPDATE, DELETE ON dbtaskqueue_step TO dbtaskqueue_poller;
-- INSERT: a queue that starts paused.
GRANT SELECT, INSERT (name, paused_time, paused_by, paused_reason) ON dbtaskqueue_queue TO dbtaskqueue_poller;
GRANT SELECT, INSERT, UPDATE, DELETE ON dbtaskqueue_poller TO dbtaskqueue_poller;
-- Schedules: their tasks are enqueued by pollers, which need the producer's role, too.
GRANT SELECT, INSERT, UPDATE ON dbtaskqueue_schedule TO dbtaskqueue_poller;
GRANT SELECT, INSERT, UPDATE, DELETE ON dbtaskqueue_limit TO dbtaskqueue_poller; -- queues with limits
GRANT SELECT, UPDATE, DELETE ON dbtaskqueue_dependency, dbtaskqueue_hold TO dbtaskqueue_poller; -- it tells of ends
GRANT SELECT, DELETE ON dbtaskqueue_batch TO dbtaskqueue_poller;
GRANT SELECT, INSERT, UPDATE, DELETE ON dbtaskqueue_minutecount, dbtaskqueue_failuregroup
    TO dbtaskqueue_poller; -- counted in memory, appended, merged
GRANT USAGE ON SEQUENCE dbtaskqueue_taskhistory_id_seq TO dbtaskqueue_poller, dbtaskqueue_archiver;

-- An archiver moves and deletes what is finished.
GRANT SELECT, UPDATE, DELETE ON dbtaskqueue_task TO dbtaskqueue_archiver; -- UPDATE: to lock the rows it moves
GRANT SELECT, INSERT, DELETE ON dbtaskqueue_attempt, dbtaskqueue_taskhistory TO dbtaskqueue_archiver;
GRANT SELECT, INSERT ON dbtaskqueue_minutecount TO dbtaskqueue_archiver; -- it counts deletions
GRANT SELECT, DELETE ON dbtaskqueue_step TO dbtaskqueue_archiver; -- they leave with their task
GRANT SELECT ON dbtaskqueue_dependency, dbtaskqueue_hold TO dbtaskqueue_archiver; -- a parent stays while a task waits
-- Streams of finished tasks and their events. The owner of the tables registers the first stream.
GRANT SELECT, INSERT, UPDATE, DELETE ON dbtaskqueue_streamposition TO dbtaskqueue_archiver;
GRANT SELECT, UPDATE (position) ON dbtaskqueue_streamposition TO dbtaskqueue_poller; -- its retention
GRANT SELECT, DELETE ON dbtaskqueue_finishevent TO dbtaskqueue_archiver, dbtaskqueue_poller;

-- A reader sees how things stand, and no payload, result, context or error text.
CREATE OR REPLACE VIEW dbtaskqueue_task_overview AS
SELECT id, queue_name, reference_number, status, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
       payload_type, group_key, tag, poller_instance, create_time, ready_time, next_process_time, last_update_time,
       expire_time, start_time, finish_time, parked_by
FROM dbtaskqueue_task;
GRANT SELECT ON dbtaskqueue_dependency, dbtaskqueue_hold, dbtaskqueue_batch TO dbtaskqueue_reader;
GRANT SELECT (name, queue_name, cron, timezone, missed, overlap, paused, source, next_time, last_time, last_task)
    ON dbtaskqueue_schedule TO dbtaskqueue_reader;
GRANT SELECT (fingerprint, queue_name, error_type, frame, first_seen, last_seen) ON dbtaskqueue_failuregroup
    TO dbtaskqueue_reader;
GRANT SELECT ON dbtaskqueue_task_overview, dbtaskqueue_queue, dbtaskqueue_poller, dbtaskqueue_minutecount
    TO dbtaskqueue_reader;

-- Statistics of the pull API: appended, and old rows merged. Without it nothing breaks; calls are then not counted.
-- A producer writes counts of calls, and none of what pollers did or deleted. A login that has rights on this table from
-- elsewhere needs a policy, too.
GRANT SELECT, INSERT, UPDATE, DELETE ON dbtaskqueue_minutecount TO dbtaskqueue_producer;
ALTER TABLE dbtaskqueue_minutecount ENABLE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS dbtaskqueue_read ON dbtaskqueue_minutecount;
DROP POLICY IF EXISTS dbtaskqueue_call ON dbtaskqueue_minutecount;
DROP POLICY IF EXISTS dbtaskqueue_count ON dbtaskqueue_minutecount;
CREATE POLICY dbtaskqueue_read ON dbtaskqueue_minutecount FOR SELECT USING (true);
CREATE POLICY dbtaskqueue_call ON dbtaskqueue_minutecount TO dbtaskqueue_producer USING (kind = 'call');
CREATE POLICY dbtaskqueue_count ON dbtaskqueue_minutecount TO dbtaskqueue_poller, dbtaskqueue_archiver USING (true);
