-- Made by `python -m tests.core.statements --write`; do not edit. %(name)s is a parameter, %% is %.

-- Statements.ages
SELECT x.priority, max((julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')) - julianday(x.ready_time)) *
    86400.0)
FROM "dbtaskqueue_task" AS x
WHERE queue_name = %(queue_name)s
AND ready_time IS NOT NULL
AND ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND attempt < max_attempts
AND (tag IS NULL OR tag IN (
    SELECT value
    FROM json_each(%(tags)s)
))
AND NOT EXISTS (
    SELECT 1
    FROM "dbtaskqueue_queue" AS q
    WHERE q.name = %(queue_name)s
    AND q.paused_time IS NOT NULL
    AND (q.paused_until IS NULL OR q.paused_until > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))
)
GROUP BY x.priority;

-- Statements.all_running
SELECT id, total_attempt
FROM "dbtaskqueue_task"
WHERE queue_name = %(queue_name)s
AND ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND status IN ('PROCESSING');

-- Statements.ask_again
UPDATE "dbtaskqueue_task"
SET watched = true
WHERE id IN (
    SELECT value
    FROM json_each(%(ids)s)
)
AND final_status IN ('ERROR', 'POISON')
AND NOT watched;

-- Statements.attempts
INSERT INTO "dbtaskqueue_attempt" (location, task_id, queue_name, attempt, total_attempt, poller_instance,
    start_time, error_type, message, traceback, fingerprint)
SELECT %(location)s, t.id, t.queue_name, t.attempt, t.total_attempt, t.poller_instance, t.start_time,
    u.error_type, u.message, u.traceback, u.failure_key
FROM "dbtaskqueue_task" AS t
JOIN (
    SELECT value ->> '$.task_id' AS task_id, value ->> '$.token' AS token, value ->> '$.error_type' AS
        error_type, value ->> '$.message' AS message, value ->> '$.traceback' AS traceback, value ->>
        '$.failure_key' AS failure_key
    FROM json_each(%(rows)s)
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.status IN ('PROCESSING');

-- Statements.cancel_held
UPDATE "dbtaskqueue_task" AS t
SET status = 'POISON', final_status = 'POISON', parked_by = NULL, finish_time = strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), process_result =
    u.reason_text
FROM (
    SELECT value ->> '$.child' AS child, value ->> '$.reason_text' AS reason_text
    FROM json_each(%(rows)s)
) AS u
WHERE t.id = u.child
AND t.parked_by = 'parents'
AND t.status IN ('CREATED', 'PROCESSING')
RETURNING id, queue_name, watched;

-- Statements.charge_groups
UPDATE "dbtaskqueue_limit" AS l
SET tokens = l.tokens - u.taken, full_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f
    seconds', (%(burst)s - l.tokens + u.taken) / %(rate)s))
FROM (
    SELECT value ->> '$.group_name' AS group_name, value ->> '$.taken' AS taken
    FROM json_each(%(rows)s)
) AS u
WHERE l.queue_name = %(queue_name)s
AND l.group_key = u.group_name;

-- Statements.checkout_expired
UPDATE "dbtaskqueue_task"
SET status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time =
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    next_process_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds',
    max(coalesce(lease_seconds, %(lease)s), %(min_lease)s))), poller_instance = %(poller_instance)s,
    lost_leases = CASE WHEN status = 'PROCESSING' THEN min(abs(lost_leases) + 1, 1000) ELSE -abs(lost_leases)
    END, ready_time = coalesce(ready_time, next_process_time), parked_by = NULL
WHERE id IN (
    SELECT t.id
    FROM "dbtaskqueue_task" AS t
    WHERE t.id IN (
        SELECT value
        FROM json_each(%(ids)s)
    )
    AND t.status = 'CREATED'
    AND t.expire_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
    AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
)
RETURNING id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, CAST(payload AS text), CAST(context AS text), CAST(create_time AS text), CAST(start_time AS
    text), CAST(next_process_time AS text), poller_instance, CAST(ready_time AS text), group_key,
    CAST(expire_time AS text), lease_seconds, lost_leases;

-- Statements.checkout_optimistic
UPDATE "dbtaskqueue_task"
SET status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time =
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    next_process_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds',
    max(coalesce(lease_seconds, %(lease)s), %(min_lease)s))), poller_instance = %(poller_instance)s,
    lost_leases = CASE WHEN status = 'PROCESSING' THEN min(abs(lost_leases) + 1, 1000) ELSE -abs(lost_leases)
    END
WHERE id IN (
    SELECT t.id
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT value ->> '$.task_id' AS task_id, value ->> '$.token' AS token
        FROM json_each(%(rows)s)
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('CREATED', 'PROCESSING')
    AND (ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') AND next_process_time <=
        strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') AND attempt < max_attempts AND (tag IS NULL OR tag IN (
        SELECT value
        FROM json_each(%(tags)s)
    )) AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = %(queue_name)s
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))
    )) IS TRUE
)
RETURNING id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, CAST(payload AS text), CAST(context AS text), CAST(create_time AS text), CAST(start_time AS
    text), CAST(next_process_time AS text), poller_instance, CAST(ready_time AS text), group_key,
    CAST(expire_time AS text), lease_seconds, lost_leases;

-- Statements.checkout_single_writer
UPDATE "dbtaskqueue_task"
SET status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time =
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    next_process_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds',
    max(coalesce(lease_seconds, %(lease)s), %(min_lease)s))), poller_instance = %(poller_instance)s,
    lost_leases = CASE WHEN status = 'PROCESSING' THEN min(abs(lost_leases) + 1, 1000) ELSE -abs(lost_leases)
    END
WHERE id IN (
    SELECT id
    FROM "dbtaskqueue_task"
    WHERE queue_name = %(queue_name)s
    AND ready_time IS NOT NULL
    AND ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
    AND next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
    AND attempt < max_attempts
    AND (tag IS NULL OR tag IN (
        SELECT value
        FROM json_each(%(tags)s)
    ))
    AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = %(queue_name)s
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))
    )
    AND status IN ('CREATED', 'PROCESSING')
    ORDER BY priority, ready_time, id
    LIMIT %(limit)s
)
RETURNING id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, CAST(payload AS text), CAST(context AS text), CAST(create_time AS text), CAST(start_time AS
    text), CAST(next_process_time AS text), poller_instance, CAST(ready_time AS text), group_key,
    CAST(expire_time AS text), lease_seconds, lost_leases;

-- Statements.checkout_single_writer (aged)
UPDATE "dbtaskqueue_task"
SET status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time =
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    next_process_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds',
    max(coalesce(lease_seconds, %(lease)s), %(min_lease)s))), poller_instance = %(poller_instance)s,
    lost_leases = CASE WHEN status = 'PROCESSING' THEN min(abs(lost_leases) + 1, 1000) ELSE -abs(lost_leases)
    END
WHERE id IN (
    SELECT id
    FROM "dbtaskqueue_task"
    WHERE queue_name = %(queue_name)s
    AND ready_time IS NOT NULL
    AND ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
    AND next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
    AND attempt < max_attempts
    AND (tag IS NULL OR tag IN (
        SELECT value
        FROM json_each(%(tags)s)
    ))
    AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = %(queue_name)s
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))
    )
    AND status IN ('CREATED', 'PROCESSING')
    ORDER BY priority NOT IN (
        SELECT value
        FROM json_each(%(aged)s)
    ), priority, ready_time, id
    LIMIT %(limit)s
)
RETURNING id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, CAST(payload AS text), CAST(context AS text), CAST(create_time AS text), CAST(start_time AS
    text), CAST(next_process_time AS text), poller_instance, CAST(ready_time AS text), group_key,
    CAST(expire_time AS text), lease_seconds, lost_leases;

-- Statements.claim_periods
INSERT INTO "dbtaskqueue_usedreference" AS l (queue_name, reference_number, expire_time)
SELECT %(queue_name)s, u.reference_number, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds',
    %(period)s))
FROM (
    SELECT value ->> '$.reference_number' AS reference_number
    FROM json_each(%(rows)s)
) AS u
WHERE true
ORDER BY u.reference_number
ON CONFLICT (queue_name, reference_number) DO UPDATE
SET expire_time = excluded.expire_time, create_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
WHERE l.create_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds', %(ago)s))
RETURNING reference_number;

-- Statements.claim_references
INSERT INTO "dbtaskqueue_usedreference" (queue_name, reference_number)
SELECT %(queue_name)s, u.reference_number
FROM (
    SELECT value ->> '$.reference_number' AS reference_number
    FROM json_each(%(rows)s)
) AS u
WHERE true
ORDER BY u.reference_number
ON CONFLICT (queue_name, reference_number) DO NOTHING
RETURNING reference_number;

-- Statements.complete
UPDATE "dbtaskqueue_task" AS t
SET status = 'COMPLETED', final_status = 'COMPLETED', ready_time = NULL, finish_time = strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), process_result =
    NULL, result = u.result_json
FROM (
    SELECT value ->> '$.task_id' AS task_id, value ->> '$.token' AS token, value ->> '$.result_json' AS
        result_json
    FROM json_each(%(rows)s)
) AS u
WHERE t.id = u.task_id
AND t.total_attempt = u.token
AND t.status IN ('PROCESSING')
RETURNING id, watched;

-- Statements.complete_plain
UPDATE "dbtaskqueue_task" AS t
SET status = 'COMPLETED', final_status = 'COMPLETED', ready_time = NULL, finish_time = strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), process_result =
    NULL, result = NULL
FROM (
    SELECT value ->> '$.task_id' AS task_id, value ->> '$.token' AS token
    FROM json_each(%(rows)s)
) AS u
WHERE t.id = u.task_id
AND t.total_attempt = u.token
AND t.status IN ('PROCESSING')
RETURNING id, watched;

-- Statements.count_all
INSERT INTO "dbtaskqueue_minutecount" (kind, queue_name, count)
SELECT 'deletion', queue_name, count(*)
FROM {table}
GROUP BY queue_name;

-- Statements.count_chosen
INSERT INTO "dbtaskqueue_minutecount" (kind, queue_name, count)
SELECT 'deletion', t.queue_name, count(*)
FROM "dbtaskqueue_task" AS t
WHERE t.id IN (
    SELECT value
    FROM json_each(%(ids)s)
)
GROUP BY t.queue_name;

-- Statements.count_deleted
INSERT INTO "dbtaskqueue_minutecount" (kind, queue_name, count)
SELECT 'deletion', x.q, count(*)
FROM (
    SELECT t.queue_name AS q
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT value ->> '$.task_id' AS task_id, value ->> '$.token' AS token
        FROM json_each(%(rows)s)
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('PROCESSING')
) AS x
GROUP BY x.q;

-- Statements.count_down
UPDATE "dbtaskqueue_hold" AS t
SET remaining = t.remaining - u.number
FROM (
    SELECT value ->> '$.child' AS child, value ->> '$.number' AS number
    FROM json_each(%(rows)s)
) AS u
WHERE t.location = %(location)s
AND t.task_id = u.child
RETURNING task_id, remaining;

-- Statements.count_in_limit
UPDATE "dbtaskqueue_limit" AS l
SET tokens = min(%(burst)s, l.tokens + max((julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')) -
    julianday(l.check_time)) * 86400.0, 0.0) * %(rate)s) - %(taken)s, check_time = max(l.check_time,
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')), idle_seconds = (julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    'now')) - julianday(l.check_time)) * 86400.0, leases = %(leases)s, stamp = %(stamp)s
WHERE queue_name = %(queue_name)s
AND group_key = ''
AND stamp = %(known)s
AND (julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')) - julianday(l.check_time)) * 86400.0 <= %(watched)s
AND (%(rate)s = 0 OR min(%(burst)s, l.tokens + max((julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')) -
    julianday(l.check_time)) * 86400.0, 0.0) * %(rate)s) >= %(taken)s)
RETURNING tokens;

-- Statements.count_signal
UPDATE "dbtaskqueue_task" AS t
SET signals = coalesce(t.signals, 0) + 1
WHERE t.id = %(task_id)s
AND t.status IN ('CREATED', 'PROCESSING')
AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
RETURNING queue_name, group_key;

-- Statements.delete_chosen
DELETE
FROM "dbtaskqueue_task"
WHERE id IN (
    SELECT value
    FROM json_each(%(ids)s)
)
RETURNING queue_name, batch, status;

-- Statements.delete_counted
WITH gone AS (
    DELETE
    FROM "dbtaskqueue_task"
    WHERE id IN (
        SELECT t.id
        FROM "dbtaskqueue_task" AS t
        JOIN (
            SELECT value ->> '$.task_id' AS task_id, value ->> '$.token' AS token
            FROM json_each(%(rows)s)
        ) AS u
        ON t.id = u.task_id
        AND t.total_attempt = u.token
        WHERE t.status IN ('PROCESSING')
    )
    RETURNING id, watched, queue_name AS q
), counted AS (
    INSERT INTO "dbtaskqueue_minutecount" (kind, queue_name, count)
    SELECT 'deletion', q, count(*)
    FROM gone
    GROUP BY q
)
SELECT id, watched
FROM gone;

-- Statements.delete_history [1]
INSERT INTO "dbtaskqueue_minutecount" (kind, queue_name, count)
SELECT 'deletion', queue_name, count(*)
FROM {table}
WHERE id IN (
    SELECT value
    FROM json_each(%(ids)s)
)
GROUP BY queue_name;

-- Statements.delete_history [2]
DELETE
FROM {table}
WHERE id IN (
    SELECT value
    FROM json_each(%(ids)s)
)
RETURNING id;

-- Statements.delete_settled
DELETE
FROM "dbtaskqueue_task"
WHERE id IN (
    SELECT t.id
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT value ->> '$.task_id' AS task_id, value ->> '$.token' AS token
        FROM json_each(%(rows)s)
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('PROCESSING')
)
RETURNING id, watched;

-- Statements.drop_edges
DELETE
FROM "dbtaskqueue_dependency"
WHERE child_location = %(location)s
AND child_id IN (
    SELECT value
    FROM json_each(%(ids)s)
);

-- Statements.drop_holds
DELETE
FROM "dbtaskqueue_hold"
WHERE location = %(location)s
AND task_id IN (
    SELECT value
    FROM json_each(%(ids)s)
);

-- Statements.edge_range
SELECT min(id), max(id)
FROM "dbtaskqueue_dependency";

-- Statements.end_edges
UPDATE "dbtaskqueue_dependency"
SET outcome = %(status)s
WHERE id IN (
    SELECT value
    FROM json_each(%(ids)s)
);

-- Statements.ended_watched
SELECT id
FROM "dbtaskqueue_task"
WHERE watched
AND final_status IS NOT NULL
AND id > %(after)s
ORDER BY id
LIMIT %(limit)s;

-- Statements.exhausted
SELECT id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, CAST(payload AS text), CAST(context AS text), CAST(create_time AS text), CAST(start_time AS
    text), CAST(next_process_time AS text), poller_instance, CAST(ready_time AS text), group_key,
    CAST(expire_time AS text), lease_seconds, lost_leases
FROM "dbtaskqueue_task" AS t
WHERE t.queue_name = %(queue_name)s
AND t.ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND t.attempt >= t.max_attempts
AND t.status IN ('PROCESSING')
AND t.next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
ORDER BY t.priority, t.ready_time, t.id
LIMIT %(limit)s;

-- Statements.expired
SELECT id
FROM "dbtaskqueue_task"
WHERE queue_name = %(queue_name)s
AND status = 'CREATED'
AND expire_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND ready_time IS NOT NULL
UNION ALL
SELECT id
FROM "dbtaskqueue_task"
WHERE queue_name = %(queue_name)s
AND status = 'CREATED'
AND expire_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND parked_by IS NOT NULL
LIMIT %(limit)s;

-- Statements.find
SELECT id, reference_number, status, group_key
FROM "dbtaskqueue_task" AS t
WHERE queue_name = %(queue_name)s
AND reference_number IN (
    SELECT value
    FROM json_each(%(references)s)
);

-- Statements.finished
SELECT id, (julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')) - julianday(coalesce(finish_time,
    last_update_time))) * 86400.0, (julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')) -
    julianday(create_time)) * 86400.0
FROM "dbtaskqueue_task"
WHERE queue_name = %(queue_name)s
AND final_status = %(status)s
AND id > %(after)s
ORDER BY id
LIMIT %(limit)s;

-- Statements.first_ready
SELECT id, total_attempt
FROM "dbtaskqueue_task"
WHERE queue_name = %(queue_name)s
AND ready_time IS NOT NULL
AND ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND attempt < max_attempts
AND (tag IS NULL OR tag IN (
    SELECT value
    FROM json_each(%(tags)s)
))
AND NOT EXISTS (
    SELECT 1
    FROM "dbtaskqueue_queue" AS q
    WHERE q.name = %(queue_name)s
    AND q.paused_time IS NOT NULL
    AND (q.paused_until IS NULL OR q.paused_until > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))
)
ORDER BY priority, ready_time, id
LIMIT %(limit)s;

-- Statements.first_ready_of_group
WITH ready AS MATERIALIZED (
    SELECT id, total_attempt, priority, ready_time
    FROM "dbtaskqueue_task" AS t
    WHERE queue_name = %(queue_name)s
    AND group_key = %(group)s
    AND coalesce(t.parked_by, t.final_status) IS NULL
    AND ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
    AND next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
    AND attempt < max_attempts
    AND (tag IS NULL OR tag IN (
        SELECT value
        FROM json_each(%(tags)s)
    ))
    AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = %(queue_name)s
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))
    )
)
SELECT id, total_attempt
FROM ready
ORDER BY priority, ready_time, id
LIMIT %(limit)s;

-- Statements.free
UPDATE "dbtaskqueue_task"
SET reference_number = reference_number || ':' || id
WHERE id IN (
    SELECT t.id
    FROM "dbtaskqueue_task" AS t
    WHERE t.queue_name = %(queue_name)s
    AND t.reference_number IN (
        SELECT value
        FROM json_each(%(references)s)
    )
    AND NOT CASE WHEN t.status = 'CREATED' AND (t.attempt > 0 OR t.reenqueue_attempt > 0 OR EXISTS (
        SELECT 1
        FROM "dbtaskqueue_step" AS step
        WHERE step.location = %(location)s
        AND step.task_id = t.id
        AND step.task_time = t.create_time
        AND step.kind <> 'sent'
    )) THEN 'PROCESSING' ELSE t.status END IN (
        SELECT value
        FROM json_each(%(keeping)s)
    )
    AND t.create_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds', %(ago)s))
    ORDER BY t.reference_number
)
RETURNING id;

-- Statements.groups_over
SELECT group_key
FROM "dbtaskqueue_task" AS t
WHERE queue_name = %(queue_name)s
AND group_key IS NOT NULL
AND coalesce(t.parked_by, t.final_status) IS NULL
GROUP BY group_key
HAVING count(*) > %(number)s;

-- Statements.heads_before
SELECT x.id, count(*), (julianday(max(t.ready_time)) - julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')))
    * 86400.0
FROM (
    SELECT value ->> '$.task_id' AS task_id, value ->> '$.token' AS token
    FROM json_each(%(rows)s)
) AS u
JOIN "dbtaskqueue_task" AS x
ON x.id = u.task_id
JOIN "dbtaskqueue_task" AS t
ON t.queue_name = x.queue_name
AND t.group_key = x.group_key
AND coalesce(t.parked_by, t.final_status) IS NULL
AND t.next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND t.priority = x.priority
AND t.id < x.id
AND t.ready_time > x.ready_time
GROUP BY x.id;

-- Statements.held_leases
SELECT id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, CAST(payload AS text), CAST(context AS text), CAST(create_time AS text), CAST(start_time AS
    text), CAST(next_process_time AS text), poller_instance, CAST(ready_time AS text), group_key,
    CAST(expire_time AS text), lease_seconds, lost_leases, (julianday(next_process_time) -
    julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))) * 86400.0
FROM "dbtaskqueue_task" AS t
JOIN (
    SELECT value ->> '$.task_id' AS task_id, value ->> '$.token' AS token
    FROM json_each(%(rows)s)
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.status IN ('PROCESSING');

-- Statements.hold_again
UPDATE "dbtaskqueue_task" AS t
SET status = 'CREATED', final_status = NULL, parked_by = 'parents', attempt = 0, finish_time = NULL,
    process_result = NULL, last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), poller_instance =
    NULL, next_process_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), expire_time = strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', expire_time, printf('%%.3f seconds', (julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))
    - julianday(min(t.next_process_time, coalesce(t.ready_time, t.next_process_time)))) * 86400.0)), watched =
    CASE WHEN watched IS NOT NULL THEN true END
WHERE id IN (
    SELECT value
    FROM json_each(%(ids)s)
)
AND status IN ('POISON')
RETURNING id, queue_name;

-- Statements.in_period
SELECT reference_number
FROM "dbtaskqueue_usedreference"
WHERE queue_name = %(queue_name)s
AND reference_number IN (
    SELECT value
    FROM json_each(%(references)s)
)
AND create_time > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds', %(ago)s));

-- Statements.insert
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
VALUES (%(queue_name)s, %(reference_number)s, %(max_attempts)s, %(priority)s, %(payload)s, %(payload_type)s,
    %(context)s, %(group_key)s, %(tag)s, %(lease_seconds)s, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), NULL, NULL)
RETURNING id, create_time;

-- Statements.insert (referenced)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
VALUES (%(queue_name)s, %(reference_number)s, %(max_attempts)s, %(priority)s, %(payload)s, %(payload_type)s,
    %(context)s, %(group_key)s, %(tag)s, %(lease_seconds)s, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), NULL, NULL)
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, create_time;

-- Statements.insert (timed)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
VALUES (%(queue_name)s, %(reference_number)s, %(max_attempts)s, %(priority)s, %(payload)s, %(payload_type)s,
    %(context)s, %(group_key)s, %(tag)s, %(lease_seconds)s, strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), coalesce(%(run_at)s, strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    'now'))), printf('%%.3f seconds', coalesce(%(delay)s, 0))), strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), coalesce(%(run_at)s, strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    'now'))), printf('%%.3f seconds', coalesce(%(delay)s, 0))), NULL, CASE WHEN %(ttl)s IS NOT NULL THEN
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(%(run_at)s, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(%(delay)s, 0))), printf('%%.3f seconds', %(ttl)s)) END)
RETURNING id, create_time, next_process_time;

-- Statements.insert (timed, referenced)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
VALUES (%(queue_name)s, %(reference_number)s, %(max_attempts)s, %(priority)s, %(payload)s, %(payload_type)s,
    %(context)s, %(group_key)s, %(tag)s, %(lease_seconds)s, strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), coalesce(%(run_at)s, strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    'now'))), printf('%%.3f seconds', coalesce(%(delay)s, 0))), strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), coalesce(%(run_at)s, strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    'now'))), printf('%%.3f seconds', coalesce(%(delay)s, 0))), NULL, CASE WHEN %(ttl)s IS NOT NULL THEN
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(%(run_at)s, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(%(delay)s, 0))), printf('%%.3f seconds', %(ttl)s)) END)
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, create_time, next_process_time;

-- Statements.insert (referenced, bare)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
VALUES (%(queue_name)s, %(reference_number)s, %(max_attempts)s, %(priority)s, %(payload)s, NULL, NULL, NULL,
    NULL, NULL, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), NULL,
    NULL)
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, create_time;

-- Statements.insert_edges
INSERT INTO "dbtaskqueue_dependency" (parent_location, parent_id, child_location, child_id, name, outcome)
SELECT u.parent_location, u.parent_id, u.child_location, u.child_id, u.name, u.outcome
FROM (
    SELECT value ->> '$.parent_location' AS parent_location, value ->> '$.parent_id' AS parent_id, value ->>
        '$.child_location' AS child_location, value ->> '$.child_id' AS child_id, value ->> '$.name' AS name,
        value ->> '$.outcome' AS outcome
    FROM json_each(%(rows)s)
) AS u;

-- Statements.insert_holds
INSERT INTO "dbtaskqueue_hold" (location, task_id, remaining, on_parent_failure)
SELECT u.location, u.task_id, u.remaining, u.on_parent_failure
FROM (
    SELECT value ->> '$.location' AS location, value ->> '$.task_id' AS task_id, value ->> '$.remaining' AS
        remaining, value ->> '$.on_parent_failure' AS on_parent_failure
    FROM json_each(%(rows)s)
) AS u;

-- Statements.insert_many (error)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), NULL, NULL
FROM (
    SELECT value ->> '$.reference_number' AS reference_number, value ->> '$.max_attempts' AS max_attempts,
        value ->> '$.priority' AS priority, nullif(value -> '$.payload', 'null') AS payload, value ->>
        '$.payload_type' AS payload_type, nullif(value -> '$.context', 'null') AS context, value ->>
        '$.group_key' AS group_key, value ->> '$.tag' AS tag, value ->> '$.lease_seconds' AS lease_seconds
    FROM json_each(%(rows)s)
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run;

-- Statements.insert_many (error, grouped)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), CASE WHEN u.group_key IS
    NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') END, CASE WHEN NOT u.group_key IS NULL THEN 'group'
    END, NULL
FROM (
    SELECT value ->> '$.reference_number' AS reference_number, value ->> '$.max_attempts' AS max_attempts,
        value ->> '$.priority' AS priority, nullif(value -> '$.payload', 'null') AS payload, value ->>
        '$.payload_type' AS payload_type, nullif(value -> '$.context', 'null') AS context, value ->>
        '$.group_key' AS group_key, value ->> '$.tag' AS tag, value ->> '$.lease_seconds' AS lease_seconds
    FROM json_each(%(rows)s)
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run;

-- Statements.insert_many (error, timed)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), NULL, CASE WHEN u.ttl IS NOT NULL THEN strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f seconds', coalesce(u.delay,
    0))), printf('%%.3f seconds', u.ttl)) END
FROM (
    SELECT value ->> '$.reference_number' AS reference_number, value ->> '$.max_attempts' AS max_attempts,
        value ->> '$.priority' AS priority, nullif(value -> '$.payload', 'null') AS payload, value ->>
        '$.payload_type' AS payload_type, nullif(value -> '$.context', 'null') AS context, value ->>
        '$.group_key' AS group_key, value ->> '$.tag' AS tag, value ->> '$.lease_seconds' AS lease_seconds,
        value ->> '$.delay' AS delay, value ->> '$.run_at' AS run_at, value ->> '$.ttl' AS ttl
    FROM json_each(%(rows)s)
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run;

-- Statements.insert_many (error, timed, grouped)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), CASE WHEN u.group_key IS NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    'now'))), printf('%%.3f seconds', coalesce(u.delay, 0))) END, CASE WHEN NOT u.group_key IS NULL THEN
    'group' END, CASE WHEN u.ttl IS NOT NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f', strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'))), printf('%%.3f seconds', coalesce(u.delay, 0))), printf('%%.3f seconds', u.ttl))
    END
FROM (
    SELECT value ->> '$.reference_number' AS reference_number, value ->> '$.max_attempts' AS max_attempts,
        value ->> '$.priority' AS priority, nullif(value -> '$.payload', 'null') AS payload, value ->>
        '$.payload_type' AS payload_type, nullif(value -> '$.context', 'null') AS context, value ->>
        '$.group_key' AS group_key, value ->> '$.tag' AS tag, value ->> '$.lease_seconds' AS lease_seconds,
        value ->> '$.delay' AS delay, value ->> '$.run_at' AS run_at, value ->> '$.ttl' AS ttl
    FROM json_each(%(rows)s)
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run;

-- Statements.insert_many (replace, timed)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), NULL, CASE WHEN u.ttl IS NOT NULL THEN strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f seconds', coalesce(u.delay,
    0))), printf('%%.3f seconds', u.ttl)) END
FROM (
    SELECT value ->> '$.reference_number' AS reference_number, value ->> '$.max_attempts' AS max_attempts,
        value ->> '$.priority' AS priority, nullif(value -> '$.payload', 'null') AS payload, value ->>
        '$.payload_type' AS payload_type, nullif(value -> '$.context', 'null') AS context, value ->>
        '$.group_key' AS group_key, value ->> '$.tag' AS tag, value ->> '$.lease_seconds' AS lease_seconds,
        value ->> '$.delay' AS delay, value ->> '$.run_at' AS run_at, value ->> '$.ttl' AS ttl
    FROM json_each(%(rows)s)
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO UPDATE
SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type, context =
    excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds, next_process_time =
    excluded.next_process_time, expire_time = excluded.expire_time, max_attempts = max(excluded.max_attempts,
    t.attempt + 1), ready_time = CASE WHEN t.parked_by = 'signal' THEN excluded.next_process_time ELSE CASE
    WHEN t.parked_by IS NULL THEN excluded.next_process_time END END, parked_by = nullif(t.parked_by,
    'signal'), last_update_time = max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', t.create_time, printf('%%.3f seconds', 0.001)))
WHERE t.status IN ('CREATED')
AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')
AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run;

-- Statements.insert_many (replace, timed, keep_due)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), NULL, CASE WHEN u.ttl IS NOT NULL THEN strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f seconds', coalesce(u.delay,
    0))), printf('%%.3f seconds', u.ttl)) END
FROM (
    SELECT value ->> '$.reference_number' AS reference_number, value ->> '$.max_attempts' AS max_attempts,
        value ->> '$.priority' AS priority, nullif(value -> '$.payload', 'null') AS payload, value ->>
        '$.payload_type' AS payload_type, nullif(value -> '$.context', 'null') AS context, value ->>
        '$.group_key' AS group_key, value ->> '$.tag' AS tag, value ->> '$.lease_seconds' AS lease_seconds,
        value ->> '$.delay' AS delay, value ->> '$.run_at' AS run_at, value ->> '$.ttl' AS ttl
    FROM json_each(%(rows)s)
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO UPDATE
SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type, context =
    excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds, max_attempts =
    max(excluded.max_attempts, t.attempt + 1), ready_time = CASE WHEN t.parked_by = 'signal' THEN
    excluded.next_process_time ELSE t.ready_time END, parked_by = nullif(t.parked_by, 'signal'),
    last_update_time = max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    t.create_time, printf('%%.3f seconds', 0.001)))
WHERE t.status IN ('CREATED')
AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')
AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run;

-- Statements.insert_many (replace_running, timed)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), NULL, CASE WHEN u.ttl IS NOT NULL THEN strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f seconds', coalesce(u.delay,
    0))), printf('%%.3f seconds', u.ttl)) END
FROM (
    SELECT value ->> '$.reference_number' AS reference_number, value ->> '$.max_attempts' AS max_attempts,
        value ->> '$.priority' AS priority, nullif(value -> '$.payload', 'null') AS payload, value ->>
        '$.payload_type' AS payload_type, nullif(value -> '$.context', 'null') AS context, value ->>
        '$.group_key' AS group_key, value ->> '$.tag' AS tag, value ->> '$.lease_seconds' AS lease_seconds,
        value ->> '$.delay' AS delay, value ->> '$.run_at' AS run_at, value ->> '$.ttl' AS ttl
    FROM json_each(%(rows)s)
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO UPDATE
SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type, context =
    excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds, next_process_time =
    excluded.next_process_time, expire_time = excluded.expire_time, poller_instance = CASE WHEN t.status =
    'PROCESSING' THEN NULL ELSE t.poller_instance END, start_time = CASE WHEN t.status = 'PROCESSING' THEN
    NULL ELSE t.start_time END, process_result = CASE WHEN t.status = 'PROCESSING' THEN NULL ELSE
    t.process_result END, lost_leases = CASE WHEN t.status = 'PROCESSING' THEN 0 ELSE t.lost_leases END,
    status = 'CREATED', attempt = CASE WHEN t.status = 'PROCESSING' THEN 0 ELSE t.attempt END, max_attempts =
    max(excluded.max_attempts, CASE WHEN t.status = 'PROCESSING' THEN 0 ELSE t.attempt END + 1), ready_time =
    CASE WHEN t.parked_by = 'signal' THEN excluded.next_process_time ELSE CASE WHEN t.parked_by IS NULL THEN
    excluded.next_process_time END END, parked_by = nullif(t.parked_by, 'signal'), last_update_time =
    max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), strftime('%%Y-%%m-%%d %%H:%%M:%%f', t.create_time,
    printf('%%.3f seconds', 0.001)))
WHERE t.status IN ('CREATED', 'PROCESSING')
AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')
AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run;

-- Statements.insert_many (replace_running, timed, keep_due)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), NULL, CASE WHEN u.ttl IS NOT NULL THEN strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f seconds', coalesce(u.delay,
    0))), printf('%%.3f seconds', u.ttl)) END
FROM (
    SELECT value ->> '$.reference_number' AS reference_number, value ->> '$.max_attempts' AS max_attempts,
        value ->> '$.priority' AS priority, nullif(value -> '$.payload', 'null') AS payload, value ->>
        '$.payload_type' AS payload_type, nullif(value -> '$.context', 'null') AS context, value ->>
        '$.group_key' AS group_key, value ->> '$.tag' AS tag, value ->> '$.lease_seconds' AS lease_seconds,
        value ->> '$.delay' AS delay, value ->> '$.run_at' AS run_at, value ->> '$.ttl' AS ttl
    FROM json_each(%(rows)s)
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO UPDATE
SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type, context =
    excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds, poller_instance = CASE WHEN
    t.status = 'PROCESSING' THEN NULL ELSE t.poller_instance END, start_time = CASE WHEN t.status =
    'PROCESSING' THEN NULL ELSE t.start_time END, process_result = CASE WHEN t.status = 'PROCESSING' THEN NULL
    ELSE t.process_result END, lost_leases = CASE WHEN t.status = 'PROCESSING' THEN 0 ELSE t.lost_leases END,
    status = 'CREATED', attempt = CASE WHEN t.status = 'PROCESSING' THEN 0 ELSE t.attempt END,
    next_process_time = CASE WHEN t.status = 'PROCESSING' THEN t.ready_time ELSE t.next_process_time END,
    max_attempts = max(excluded.max_attempts, CASE WHEN t.status = 'PROCESSING' THEN 0 ELSE t.attempt END +
    1), ready_time = CASE WHEN t.parked_by = 'signal' THEN excluded.next_process_time ELSE t.ready_time END,
    parked_by = nullif(t.parked_by, 'signal'), last_update_time = max(strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    'now'), strftime('%%Y-%%m-%%d %%H:%%M:%%f', t.create_time, printf('%%.3f seconds', 0.001)))
WHERE t.status IN ('CREATED', 'PROCESSING')
AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')
AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run;

-- Statements.insert_many (replace, timed, bounded)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), NULL, CASE WHEN u.ttl IS NOT NULL THEN strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f seconds', coalesce(u.delay,
    0))), printf('%%.3f seconds', u.ttl)) END
FROM (
    SELECT value ->> '$.reference_number' AS reference_number, value ->> '$.max_attempts' AS max_attempts,
        value ->> '$.priority' AS priority, nullif(value -> '$.payload', 'null') AS payload, value ->>
        '$.payload_type' AS payload_type, nullif(value -> '$.context', 'null') AS context, value ->>
        '$.group_key' AS group_key, value ->> '$.tag' AS tag, value ->> '$.lease_seconds' AS lease_seconds,
        value ->> '$.delay' AS delay, value ->> '$.run_at' AS run_at, value ->> '$.ttl' AS ttl
    FROM json_each(%(rows)s)
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO UPDATE
SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type, context =
    excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds, next_process_time =
    min(excluded.next_process_time, strftime('%%Y-%%m-%%d %%H:%%M:%%f', t.create_time, printf('%%.3f seconds',
    %(max_wait)s))), expire_time = CASE WHEN (julianday(excluded.expire_time) -
    julianday(excluded.next_process_time)) * 86400.0 IS NOT NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    min(excluded.next_process_time, strftime('%%Y-%%m-%%d %%H:%%M:%%f', t.create_time, printf('%%.3f seconds',
    %(max_wait)s))), printf('%%.3f seconds', (julianday(excluded.expire_time) -
    julianday(excluded.next_process_time)) * 86400.0)) END, max_attempts = max(excluded.max_attempts,
    t.attempt + 1), ready_time = CASE WHEN t.parked_by = 'signal' THEN min(excluded.next_process_time,
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', t.create_time, printf('%%.3f seconds', %(max_wait)s))) ELSE CASE WHEN
    t.parked_by IS NULL THEN min(excluded.next_process_time, strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    t.create_time, printf('%%.3f seconds', %(max_wait)s))) END END, parked_by = nullif(t.parked_by, 'signal'),
    last_update_time = max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    t.create_time, printf('%%.3f seconds', 0.001)))
WHERE CASE WHEN t.status = 'CREATED' AND (t.attempt > 0 OR t.reenqueue_attempt > 0 OR EXISTS (
    SELECT 1
    FROM "dbtaskqueue_step" AS step
    WHERE step.location = %(location)s
    AND step.task_id = t.id
    AND step.task_time = t.create_time
    AND step.kind <> 'sent'
)) THEN 'PROCESSING' ELSE t.status END IN ('CREATED')
AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')
AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run;

-- Statements.insert_many (error, whole)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), NULL, NULL
FROM (
    SELECT value ->> '$.reference_number' AS reference_number, value ->> '$.max_attempts' AS max_attempts,
        value ->> '$.priority' AS priority, nullif(value -> '$.payload', 'null') AS payload, value ->>
        '$.payload_type' AS payload_type, nullif(value -> '$.context', 'null') AS context, value ->>
        '$.group_key' AS group_key, value ->> '$.tag' AS tag, value ->> '$.lease_seconds' AS lease_seconds
    FROM json_each(%(rows)s)
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, create_time, next_process_time, ready_time, attempt, reenqueue_attempt, total_attempt,
    last_update_time, reference_number, last_update_time = create_time AS is_new, total_attempt > 0 OR signals
    > 0 AS has_run;

-- Statements.insert_many (error, waits, whole)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), NULL, 'parents', NULL
FROM (
    SELECT value ->> '$.reference_number' AS reference_number, value ->> '$.max_attempts' AS max_attempts,
        value ->> '$.priority' AS priority, nullif(value -> '$.payload', 'null') AS payload, value ->>
        '$.payload_type' AS payload_type, nullif(value -> '$.context', 'null') AS context, value ->>
        '$.group_key' AS group_key, value ->> '$.tag' AS tag, value ->> '$.lease_seconds' AS lease_seconds
    FROM json_each(%(rows)s)
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, create_time, next_process_time, ready_time, attempt, reenqueue_attempt, total_attempt,
    last_update_time, reference_number, last_update_time = create_time AS is_new, total_attempt > 0 OR signals
    > 0 AS has_run;

-- Statements.is_telling_dear
SELECT true;

-- Statements.join_batch
UPDATE "dbtaskqueue_task"
SET batch = %(batch)s
WHERE id IN (
    SELECT value
    FROM json_each(%(ids)s)
);

-- Statements.joining
SELECT id
FROM "dbtaskqueue_task"
WHERE id IN (
    SELECT value
    FROM json_each(%(ids)s)
)
AND batch IS NULL;

-- Statements.keep
INSERT INTO "dbtaskqueue_taskhistory" (location, task_id, queue_name, reference_number, status, attempt,
    reenqueue_attempt, total_attempt, max_attempts, priority, payload, payload_type, result, process_result,
    context, group_key, tag, poller_instance, create_time, next_process_time, last_update_time, lease_seconds,
    expire_time, start_time, finish_time)
SELECT %(location)s, t.id, t.queue_name, t.reference_number, t.status, t.attempt, t.reenqueue_attempt,
    t.total_attempt, t.max_attempts, t.priority, t.payload, t.payload_type, t.result, t.process_result,
    t.context, t.group_key, t.tag, t.poller_instance, t.create_time, t.next_process_time, t.last_update_time,
    t.lease_seconds, t.expire_time, t.start_time, t.finish_time
FROM "dbtaskqueue_task" AS t
WHERE t.id IN (
    SELECT value
    FROM json_each(%(ids)s)
);

-- Statements.leased_to
SELECT id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, CAST(payload AS text), CAST(context AS text), CAST(create_time AS text), CAST(start_time AS
    text), CAST(next_process_time AS text), poller_instance, CAST(ready_time AS text), group_key,
    CAST(expire_time AS text), lease_seconds, lost_leases
FROM "dbtaskqueue_task"
WHERE queue_name = %(queue_name)s
AND ready_time IS NOT NULL
AND status IN ('PROCESSING')
AND poller_instance = %(poller_instance)s;

-- Statements.let_go
UPDATE "dbtaskqueue_task"
SET parked_by = CASE WHEN group_key IS NOT NULL THEN 'group' END, last_update_time = strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), ready_time = CASE WHEN group_key IS NULL THEN max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), next_process_time) END
WHERE id IN (
    SELECT value
    FROM json_each(%(ids)s)
)
AND parked_by = 'parents'
RETURNING id, queue_name, group_key;

-- Statements.limit_state
SELECT leases, tokens, (julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')) - julianday(check_time)) *
    86400.0
FROM "dbtaskqueue_limit"
WHERE queue_name = %(queue_name)s
AND group_key = '';

-- Statements.live
SELECT count(*)
FROM (
    SELECT 1
    FROM "dbtaskqueue_task"
    WHERE queue_name = %(queue_name)s
    AND ready_time IS NOT NULL
    UNION ALL
    SELECT 1
    FROM "dbtaskqueue_task"
    WHERE queue_name = %(queue_name)s
    AND parked_by IS NOT NULL
    LIMIT %(limit)s
) AS x;

-- Statements.live_unexpired
SELECT count(*)
FROM (
    SELECT 1
    FROM "dbtaskqueue_task"
    WHERE queue_name = %(queue_name)s
    AND ready_time IS NOT NULL
    AND (expire_time IS NULL OR expire_time > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') OR status =
        'PROCESSING')
    UNION ALL
    SELECT 1
    FROM "dbtaskqueue_task"
    WHERE queue_name = %(queue_name)s
    AND parked_by IS NOT NULL
    AND (expire_time IS NULL OR expire_time > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') OR status =
        'PROCESSING')
    LIMIT %(limit)s
) AS x;

-- Statements.lock_ended
SELECT t.id, t.status
FROM "dbtaskqueue_task" AS t
WHERE t.id IN (
    SELECT value
    FROM json_each(%(ids)s)
)
AND t.watched
AND t.final_status IS NOT NULL
ORDER BY t.id;

-- Statements.lock_finished
SELECT t.id, t.watched
FROM "dbtaskqueue_task" AS t
WHERE t.id IN (
    SELECT value
    FROM json_each(%(ids)s)
)
AND t.final_status = %(status)s
AND t.status IN ('COMPLETED', 'ERROR', 'POISON')
AND (t.watched IS NULL OR NOT t.watched)
ORDER BY t.id;

-- Statements.lock_found
SELECT id, reference_number, CASE WHEN t.status = 'CREATED' AND (t.attempt > 0 OR t.reenqueue_attempt > 0 OR
    EXISTS (
    SELECT 1
    FROM "dbtaskqueue_step" AS step
    WHERE step.location = %(location)s
    AND step.task_id = t.id
    AND step.task_time = t.create_time
    AND step.kind <> 'sent'
)) THEN 'PROCESSING' ELSE t.status END, group_key
FROM "dbtaskqueue_task" AS t
WHERE queue_name = %(queue_name)s
AND reference_number IN (
    SELECT value
    FROM json_each(%(references)s)
);

-- Statements.lock_group_limits
INSERT INTO "dbtaskqueue_limit" AS l (queue_name, group_key, tokens, check_time, full_time)
SELECT %(queue_name)s, g.g, %(burst)s, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now')
FROM (
    SELECT value AS g
    FROM json_each(%(groups)s)
) AS g
WHERE true
ORDER BY g.g
ON CONFLICT (queue_name, group_key) DO UPDATE
SET tokens = min(%(burst)s, l.tokens + max((julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')) -
    julianday(l.check_time)) * 86400.0, 0.0) * %(rate)s), check_time = max(l.check_time, strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'))
RETURNING group_key, tokens;

-- Statements.lock_groups
SELECT 1;

-- Statements.lock_holds
SELECT t.task_id, t.on_parent_failure
FROM "dbtaskqueue_hold" AS t
WHERE t.location = %(location)s
AND t.task_id IN (
    SELECT value
    FROM json_each(%(ids)s)
)
ORDER BY t.task_id;

-- Statements.lock_limit
INSERT INTO "dbtaskqueue_limit" AS l (queue_name, tokens)
VALUES (%(queue_name)s, %(burst)s)
ON CONFLICT (queue_name, group_key) DO UPDATE
SET tokens = min(%(burst)s, l.tokens + max((julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')) -
    julianday(l.check_time)) * 86400.0, 0.0) * %(rate)s), check_time = max(l.check_time, strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now')), idle_seconds = (julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')) -
    julianday(l.check_time)) * 86400.0
RETURNING stamp, CASE WHEN stamp <> %(stamp)s THEN leases END, tokens, idle_seconds;

-- Statements.lock_parents
SELECT id, status
FROM "dbtaskqueue_task" AS t
WHERE id IN (
    SELECT value
    FROM json_each(%(ids)s)
)
AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
ORDER BY id;

-- Statements.lock_reported
SELECT t.id
FROM "dbtaskqueue_task" AS t
WHERE NOT t.watched
AND t.final_status IN ('COMPLETED', 'ERROR', 'POISON')
ORDER BY t.id;

-- Statements.make_queue
INSERT INTO "dbtaskqueue_queue" (name)
VALUES (%(queue_name)s)
ON CONFLICT (name) DO NOTHING;

-- Statements.make_ready
UPDATE "dbtaskqueue_task"
SET parked_by = NULL, ready_time = max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), next_process_time)
WHERE id IN (
    SELECT value
    FROM json_each(%(ids)s)
)
AND parked_by = 'group'
RETURNING id;

-- Statements.mark_reported
UPDATE "dbtaskqueue_task"
SET watched = CASE WHEN id IN (
    SELECT value
    FROM json_each(%(open)s)
) THEN false END
WHERE id IN (
    SELECT value
    FROM json_each(%(ids)s)
);

-- Statements.moved
SELECT h.task_id
FROM "dbtaskqueue_taskhistory" AS h
JOIN (
    SELECT value ->> '$.task_id' AS task_id, value ->> '$.token' AS token
    FROM json_each(%(rows)s)
) AS u
ON h.task_id = u.task_id
AND h.total_attempt = u.token
WHERE h.location = %(location)s;

-- Statements.moved_statuses
SELECT task_id, status
FROM "dbtaskqueue_taskhistory"
WHERE location = %(location)s
AND task_id IN (
    SELECT value
    FROM json_each(%(ids)s)
);

-- Statements.needed
SELECT DISTINCT d.parent_id
FROM "dbtaskqueue_dependency" AS d
JOIN "dbtaskqueue_hold" AS h
ON h.location = d.child_location
AND h.task_id = d.child_id
WHERE d.parent_location = %(location)s
AND d.parent_id IN (
    SELECT value
    FROM json_each(%(ids)s)
)
AND d.outcome IS NULL;

-- Statements.next_due
SELECT x.queue_name, (julianday(min(x.ready_time)) - julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))) *
    86400.0
FROM "dbtaskqueue_task" AS x
WHERE queue_name IN (
    SELECT value
    FROM json_each(%(queues)s)
)
AND ready_time > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
GROUP BY x.queue_name;

-- Statements.next_signal
SELECT coalesce(t.signals, 0), (
    SELECT min(step.id)
    FROM "dbtaskqueue_step" AS step
    WHERE step.location = %(location)s
    AND step.task_id = t.id
    AND step.task_time = t.create_time
    AND step.name = %(name)s
    AND step.kind = 'sent'
)
FROM "dbtaskqueue_task" AS t
WHERE t.id = %(task_id)s
AND t.total_attempt = %(token)s
AND t.status IN ('PROCESSING');

-- Statements.note_chosen
INSERT INTO "dbtaskqueue_minutecount" (kind, queue_name, name, count)
SELECT 'batch_' || batch, queue_name, status, count(*)
FROM "dbtaskqueue_task" AS t
WHERE t.id IN (
    SELECT value
    FROM json_each(%(ids)s)
)
AND batch IS NOT NULL
AND status <> 'COMPLETED'
GROUP BY batch, queue_name, status;

-- Statements.note_expired
INSERT INTO "dbtaskqueue_minutecount" (kind, queue_name, name, count)
SELECT 'batch_' || batch, queue_name, status, count(*)
FROM (
    SELECT t.batch, t.queue_name, 'DELETED' AS status
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT value ->> '$.task_id' AS task_id, value ->> '$.token' AS token
        FROM json_each(%(rows)s)
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('PROCESSING')
) AS x
WHERE true
AND batch IS NOT NULL
AND status <> 'COMPLETED'
GROUP BY batch, queue_name, status;

-- Statements.old_history
SELECT id
FROM {table} AS t
WHERE moved_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds', %(age)s))
ORDER BY id
LIMIT %(limit)s;

-- Statements.open_edges
SELECT t.id, t.parent_id, t.child_location, t.child_id
FROM "dbtaskqueue_dependency" AS t
WHERE t.parent_location = %(location)s
AND t.parent_id IN (
    SELECT value
    FROM json_each(%(ids)s)
)
AND t.outcome IS NULL
ORDER BY t.id;

-- Statements.open_parents
SELECT DISTINCT parent_id
FROM "dbtaskqueue_dependency"
WHERE id > %(after)s
AND id <= %(until)s
AND parent_location = %(location)s
AND outcome IS NULL;

-- Statements.outcome_of
SELECT t.id, t.status
FROM "dbtaskqueue_task" AS t
JOIN (
    SELECT value ->> '$.task_id' AS task_id, value ->> '$.token' AS token
    FROM json_each(%(rows)s)
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.start_time IS NOT NULL
AND (t.status NOT IN ('ERROR', 'POISON') OR t.poller_instance IS NOT NULL AND t.lost_leases <= 0);

-- Statements.park
UPDATE "dbtaskqueue_task"
SET parked_by = 'group', ready_time = NULL
WHERE id IN (
    SELECT value
    FROM json_each(%(ids)s)
)
AND status = 'CREATED'
RETURNING id;

-- Statements.park_unleased
UPDATE "dbtaskqueue_task"
SET status = 'CREATED', parked_by = %(reason)s, ready_time = NULL, poller_instance = NULL, last_update_time =
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
WHERE id = %(task_id)s
AND total_attempt = %(token)s
AND ready_time IS NOT NULL
AND status IN ('CREATED', 'PROCESSING')
AND next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
RETURNING id;

-- Statements.parked
SELECT 1
FROM "dbtaskqueue_task"
WHERE queue_name = %(queue_name)s
AND parked_by LIKE 'no handler%%' ESCAPE '\'
ORDER BY payload_type
LIMIT 1;

-- Statements.place_heads
WITH members AS (
    SELECT g.g AS g, t.id AS id, CASE WHEN t.status = 'PROCESSING' THEN 0 WHEN %(hold)s AND t.attempt > 0 AND
        t.process_result IS NOT NULL AND t.result IS NULL THEN 1 ELSE 2 END AS kind, true AS ready,
        max((julianday(t.next_process_time) - julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))) *
        86400.0, 0) AS wait, t.priority AS priority
    FROM (
        SELECT value AS g
        FROM json_each(%(groups)s)
    ) AS g
    JOIN "dbtaskqueue_task" AS t
    WHERE t.queue_name = %(queue_name)s
    AND t.group_key = g.g
    AND coalesce(t.parked_by, t.final_status) IS NULL
    UNION ALL
    SELECT g.g, t.id, 2, false, max((julianday(t.next_process_time) - julianday(strftime('%%Y-%%m-%%d
        %%H:%%M:%%f', 'now'))) * 86400.0, 0), t.priority
    FROM (
        SELECT value AS g
        FROM json_each(%(groups)s)
    ) AS g
    JOIN "dbtaskqueue_task" AS t
    ON t.id IN (
        SELECT t.id
        FROM "dbtaskqueue_task" AS t
        WHERE t.queue_name = %(queue_name)s
        AND t.group_key = g.g
        AND coalesce(t.parked_by, '') = 'group'
        AND t.next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
        ORDER BY t.priority, t.id
        LIMIT %(number)s
    )
    UNION ALL
    SELECT g.g, t.id, 2, false, max((julianday(t.next_process_time) - julianday(strftime('%%Y-%%m-%%d
        %%H:%%M:%%f', 'now'))) * 86400.0, 0), t.priority
    FROM (
        SELECT value AS g
        FROM json_each(%(groups)s)
    ) AS g
    JOIN "dbtaskqueue_task" AS t
    ON (
        SELECT count(*)
        FROM (
            SELECT t.id
            FROM "dbtaskqueue_task" AS t
            WHERE t.queue_name = %(queue_name)s
            AND t.group_key = g.g
            AND coalesce(t.parked_by, '') = 'group'
            AND t.next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
            LIMIT %(number)s
        )
    ) < %(number)s
    AND t.id IN (
        SELECT t.id
        FROM "dbtaskqueue_task" AS t
        WHERE t.queue_name = %(queue_name)s
        AND t.group_key = g.g
        AND coalesce(t.parked_by, '') = 'group'
        AND t.next_process_time > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
        ORDER BY t.next_process_time, t.priority, t.id
        LIMIT %(number)s
    )
), ranked AS (
    SELECT m.*, row_number() OVER (PARTITION BY m.g ORDER BY m.kind, m.wait, m.priority, m.id) <= %(number)s
        AS stays
    FROM members AS m
) UPDATE "dbtaskqueue_task"
SET parked_by = CASE WHEN parked_by IS NULL THEN 'group' END, ready_time = CASE WHEN parked_by IS NOT NULL
    THEN max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), next_process_time) END
WHERE (parked_by = 'group' OR parked_by IS NULL AND status = 'CREATED')
AND id IN (
    SELECT r.id
    FROM ranked AS r
    WHERE r.stays <> r.ready
    AND r.kind > 0
)
RETURNING ready_time IS NOT NULL;

-- Statements.present
SELECT id
FROM "dbtaskqueue_task"
WHERE id IN (
    SELECT value
    FROM json_each(%(ids)s)
);

-- Statements.progress
UPDATE "dbtaskqueue_task"
SET process_result = %(note)s, last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
WHERE id = %(id)s
AND total_attempt = %(total_attempt)s
AND status IN ('PROCESSING')
RETURNING id;

-- Statements.put_off
UPDATE "dbtaskqueue_task" AS t
SET last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), next_process_time = strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), ready_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds',
    u.delay)), attempt = t.attempt - 1, status = CASE WHEN t.lost_leases > 0 THEN t.status ELSE 'CREATED' END,
    poller_instance = CASE WHEN t.lost_leases > 0 THEN t.poller_instance END, lost_leases = CASE WHEN
    t.lost_leases > 0 THEN t.lost_leases - 1 ELSE t.lost_leases END
FROM (
    SELECT value ->> '$.task_id' AS task_id, value ->> '$.token' AS token, value ->> '$.delay' AS delay
    FROM json_each(%(rows)s)
) AS u
WHERE t.id = u.task_id
AND t.total_attempt = u.token
AND t.status IN ('PROCESSING')
RETURNING id;

-- Statements.receive_signal
DELETE
FROM "dbtaskqueue_step"
WHERE id = %(signal)s
RETURNING CAST(result AS text), actor;

-- Statements.renew
UPDATE "dbtaskqueue_task"
SET next_process_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds',
    max(coalesce(lease_seconds, %(lease)s), %(min_lease)s)))
WHERE id IN (
    SELECT t.id
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT value ->> '$.task_id' AS task_id, value ->> '$.token' AS token
        FROM json_each(%(rows)s)
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('PROCESSING')
)
AND next_process_time > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds', %(since)s))
RETURNING id;

-- Statements.running_of
SELECT id, total_attempt, (julianday(next_process_time) - julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    'now'))) * 86400.0
FROM "dbtaskqueue_task"
WHERE id IN (
    SELECT value
    FROM json_each(%(ids)s)
)
AND status IN ('PROCESSING');

-- Statements.save_metadata
UPDATE "dbtaskqueue_task"
SET payload = json_set(payload, '$.metadata', json(%(metadata)s))
WHERE id = %(task_id)s
AND (CAST(%(token)s AS bigint) IS NULL OR total_attempt = %(token)s AND status = 'PROCESSING')
RETURNING id;

-- Statements.seconds_until_exhausted
SELECT (julianday(min(t.next_process_time)) - julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))) * 86400.0
FROM "dbtaskqueue_task" AS t
WHERE t.queue_name = %(queue_name)s
AND t.ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND t.attempt >= t.max_attempts
AND t.status IN ('PROCESSING');

-- Statements.soon
SELECT 1
FROM "dbtaskqueue_task"
WHERE queue_name = %(queue_name)s
AND ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds', %(horizon)s))
AND (status = 'PROCESSING' OR next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f
    seconds', %(horizon)s)) AND attempt < max_attempts)
AND (tag IS NULL OR tag IN (
    SELECT value
    FROM json_each(%(tags)s)
))
AND NOT EXISTS (
    SELECT 1
    FROM "dbtaskqueue_queue" AS q
    WHERE q.name = %(queue_name)s
    AND q.paused_time IS NOT NULL
    AND (q.paused_until IS NULL OR q.paused_until > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))
)
ORDER BY priority, ready_time, id
LIMIT 1;

-- Statements.start_paused
INSERT INTO "dbtaskqueue_queue" (name, paused_time, paused_by, paused_reason)
VALUES (%(queue_name)s, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), 'settings', 'starts paused')
ON CONFLICT (name) DO NOTHING;

-- Statements.steps
SELECT step.position, step.kind, step.name, CAST(step.result AS text), (julianday(step.until_time) -
    julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))) * 86400.0, step.actor, step.task_time =
    t.create_time
FROM "dbtaskqueue_step" AS step
JOIN "dbtaskqueue_task" AS t
ON t.id = step.task_id
WHERE step.location = %(location)s
AND step.task_id = %(task_id)s
AND step.kind <> 'sent';

-- Statements.store_limit
UPDATE "dbtaskqueue_limit"
SET leases = %(leases)s, stamp = %(stamp)s, tokens = tokens - %(taken)s
WHERE queue_name = %(queue_name)s
AND group_key = '';

-- Statements.store_signal
INSERT INTO "dbtaskqueue_step" (location, task_id, task_time, name, result, actor)
SELECT %(location)s, t.id, t.create_time, %(name)s, %(data)s, %(actor)s
FROM "dbtaskqueue_task" AS t
WHERE t.id = %(task_id)s;

-- Statements.store_step
INSERT INTO "dbtaskqueue_step" AS step (location, task_id, task_time, position, name, kind, result, actor,
    until_time)
SELECT %(location)s, t.id, t.create_time, %(position)s, %(name)s, %(kind)s, %(result)s, %(actor)s, CASE WHEN
    CAST(%(seconds)s AS float8) IS NOT NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f', strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), printf('%%.3f seconds', CAST(%(seconds)s AS float8))) END
FROM "dbtaskqueue_task" AS t
WHERE t.id = %(task_id)s
AND t.total_attempt = %(token)s
AND t.status IN ('PROCESSING')
ON CONFLICT (location, task_id, position) DO UPDATE
SET kind = excluded.kind, result = excluded.result, actor = excluded.actor, create_time =
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
WHERE step.kind = 'wait'
RETURNING 1;

-- Statements.store_step_atomic
INSERT INTO "dbtaskqueue_step" AS step (location, task_id, task_time, position, name, kind, result, actor,
    until_time)
SELECT %(location)s, t.id, t.create_time, %(position)s, %(name)s, %(kind)s, %(result)s, %(actor)s, CASE WHEN
    CAST(%(seconds)s AS float8) IS NOT NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f', strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), printf('%%.3f seconds', CAST(%(seconds)s AS float8))) END
FROM "dbtaskqueue_task" AS t
WHERE t.id = %(task_id)s
AND t.total_attempt = %(token)s
AND t.status IN ('PROCESSING')
ON CONFLICT (location, task_id, position) DO UPDATE
SET kind = excluded.kind, result = excluded.result, actor = excluded.actor, create_time =
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
WHERE step.kind = 'wait'
RETURNING 1;

-- Statements.task_with_attempts
SELECT queue_name, reference_number, status, attempt, reenqueue_attempt, total_attempt, max_attempts,
    priority, CAST(payload AS text), payload_type, CAST(result AS text), process_result, CAST(context AS
    text), group_key, tag, poller_instance, create_time, next_process_time, last_update_time, lease_seconds,
    expire_time, start_time, finish_time, (
    SELECT json_group_array(json_array(a.error_type, a.traceback, a.poller_instance, a.start_time,
        a.total_attempt))
    FROM (
        SELECT *
        FROM "dbtaskqueue_attempt" AS a
        WHERE a.location = %(location)s
        AND a.task_id = %(task_id)s
        ORDER BY a.total_attempt
    ) AS a
)
FROM "dbtaskqueue_task"
WHERE id = %(task_id)s
UNION ALL
SELECT queue_name, reference_number, status, attempt, reenqueue_attempt, total_attempt, max_attempts,
    priority, CAST(payload AS text), payload_type, CAST(result AS text), process_result, CAST(context AS
    text), group_key, tag, poller_instance, create_time, next_process_time, last_update_time, lease_seconds,
    expire_time, start_time, finish_time, (
    SELECT json_group_array(json_array(a.error_type, a.traceback, a.poller_instance, a.start_time,
        a.total_attempt))
    FROM (
        SELECT *
        FROM "dbtaskqueue_attempt" AS a
        WHERE a.location = %(location)s
        AND a.task_id = %(task_id)s
        ORDER BY a.total_attempt
    ) AS a
)
FROM "dbtaskqueue_taskhistory"
WHERE location = %(location)s
AND task_id = %(task_id)s
LIMIT 1;

-- Statements.to_history
INSERT INTO "dbtaskqueue_taskhistory" (location, task_id, queue_name, reference_number, status, attempt,
    reenqueue_attempt, total_attempt, max_attempts, priority, payload, payload_type, result, process_result,
    context, group_key, tag, poller_instance, create_time, next_process_time, last_update_time, lease_seconds,
    expire_time, start_time, finish_time)
SELECT %(location)s, t.id, t.queue_name, t.reference_number, 'COMPLETED', t.attempt, t.reenqueue_attempt,
    t.total_attempt, t.max_attempts, t.priority, t.payload, t.payload_type, u.result_json, NULL, t.context,
    t.group_key, t.tag, t.poller_instance, t.create_time, t.next_process_time, strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), t.lease_seconds, t.expire_time, t.start_time, strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    'now')
FROM "dbtaskqueue_task" AS t
JOIN (
    SELECT value ->> '$.task_id' AS task_id, value ->> '$.token' AS token, value ->> '$.result_json' AS
        result_json
    FROM json_each(%(rows)s)
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.status IN ('PROCESSING');

-- Statements.to_prepare
SELECT q.q, (
    SELECT 1
    FROM "dbtaskqueue_task" AS t
    WHERE queue_name = q.q
    AND parked_by LIKE 'no handler%%' ESCAPE '\'
    LIMIT 1
) IS NOT NULL, (
    SELECT 1
    FROM "dbtaskqueue_task" AS t
    WHERE queue_name = q.q
    AND group_key IS NOT NULL
    AND coalesce(t.parked_by, t.final_status) IS NULL
    LIMIT 1
) IS NOT NULL
FROM (
    SELECT value AS q
    FROM json_each(%(queues)s)
) AS q;

-- Statements.touch
UPDATE "dbtaskqueue_task"
SET next_process_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', next_process_time, printf('%%.3f seconds',
    %(delta)s)), expire_time = CASE WHEN %(delta)s IS NOT NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    expire_time, printf('%%.3f seconds', %(delta)s)) END
WHERE id = %(id)s
AND total_attempt = %(total_attempt)s
AND status IN ('PROCESSING')
AND next_process_time > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds', %(since)s))
RETURNING CAST(next_process_time AS text);

-- Statements.unlocked
SELECT t.id
FROM "dbtaskqueue_task" AS t
JOIN (
    SELECT value ->> '$.task_id' AS task_id, value ->> '$.token' AS token
    FROM json_each(%(rows)s)
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.status IN ('PROCESSING');

-- Statements.unpark
UPDATE "dbtaskqueue_task"
SET parked_by = CASE WHEN group_key IS NOT NULL THEN 'group' END, last_update_time = strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), ready_time = CASE WHEN group_key IS NULL THEN max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), next_process_time) END
WHERE queue_name = %(queue_name)s
AND status IN ('CREATED')
AND parked_by LIKE 'no handler%%' ESCAPE '\'
AND (payload_type IS NULL AND %(untyped)s OR payload_type IN (
    SELECT value
    FROM json_each(%(types)s)
))
RETURNING id, group_key;

-- Statements.unwatch
UPDATE "dbtaskqueue_task"
SET watched = NULL
WHERE id IN (
    SELECT value
    FROM json_each(%(ids)s)
);

-- Statements.waited_for
SELECT DISTINCT child_id
FROM "dbtaskqueue_dependency"
WHERE id > %(after)s
AND id <= %(until)s
AND child_location = %(location)s;

-- Statements.wake_signalled
UPDATE "dbtaskqueue_task" AS t
SET next_process_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), last_update_time = strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), parked_by = CASE WHEN t.group_key IS NULL OR t.ready_time IS NOT NULL THEN NULL ELSE
    'group' END, ready_time = CASE WHEN t.group_key IS NULL OR t.ready_time IS NOT NULL THEN
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') END, expire_time = CASE WHEN t.expire_time IS NOT NULL THEN
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', t.expire_time, printf('%%.3f seconds',
    (julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')) - julianday(min(t.next_process_time,
    coalesce(t.ready_time, t.next_process_time)))) * 86400.0)) END
WHERE t.id = %(task_id)s
AND t.status IN ('CREATED')
AND (t.parked_by IS NULL OR t.parked_by IN ('signal', 'group'))
AND EXISTS (
    SELECT 1
    FROM "dbtaskqueue_step" AS step
    WHERE step.location = %(location)s
    AND step.task_id = t.id
    AND step.name = %(name)s
    AND step.kind = 'wait'
)
RETURNING id;

-- Statements.watch
UPDATE "dbtaskqueue_task"
SET watched = final_status IS NULL OR coalesce(watched, false)
WHERE id IN (
    SELECT value
    FROM json_each(%(ids)s)
);

-- Statements.write
UPDATE "dbtaskqueue_task" AS t
SET status = u.new_status, last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), parked_by = CASE
    WHEN u.signals_seen <> coalesce(t.signals, 0) THEN NULL ELSE u.park_reason END, ready_time = CASE WHEN
    u.new_status <> 'CREATED' OR CASE WHEN u.signals_seen <> coalesce(t.signals, 0) THEN NULL ELSE
    u.park_reason END IS NOT NULL THEN NULL WHEN u.delay IS NULL THEN t.ready_time ELSE strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now', printf('%%.3f seconds', CASE WHEN u.signals_seen <> coalesce(t.signals, 0) THEN 0
    ELSE coalesce(u.delay, 0) END)) END, next_process_time = CASE WHEN u.new_status = 'CREATED' THEN
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds', CASE WHEN u.signals_seen <>
    coalesce(t.signals, 0) THEN 0 ELSE coalesce(u.delay, 0) END)) WHEN u.new_status IN ('ERROR', 'POISON')
    THEN t.ready_time ELSE t.next_process_time END, expire_time = CASE WHEN t.expire_time IS NULL OR u.delay
    IS NULL THEN t.expire_time ELSE strftime('%%Y-%%m-%%d %%H:%%M:%%f', t.expire_time, printf('%%.3f seconds',
    (julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds', CASE WHEN u.signals_seen <>
    coalesce(t.signals, 0) THEN 0 ELSE coalesce(u.delay, 0) END))) - julianday(t.ready_time)) * 86400.0)) END,
    attempt = CASE WHEN u.attempts_added IS NULL THEN 0 WHEN u.new_status = 'CREATED' THEN min(t.attempt +
    u.attempts_added, t.max_attempts - 1) ELSE t.attempt + u.attempts_added END, reenqueue_attempt =
    t.reenqueue_attempt + u.reenqueues_added, process_result = CASE WHEN u.new_status = 'CREATED' AND u.delay
    IS NULL THEN t.process_result ELSE u.result_text END, result = CASE WHEN u.new_status = 'CREATED' AND
    u.delay IS NULL THEN t.result ELSE u.result_json END, poller_instance = CASE WHEN u.new_status = 'CREATED'
    THEN NULL ELSE t.poller_instance END, finish_time = CASE WHEN u.new_status = 'CREATED' THEN NULL ELSE
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') END, lost_leases = CASE WHEN u.attempts_added = -1 AND u.delay
    IS NULL THEN t.lost_leases ELSE u.deaths END, final_status = nullif(u.new_status, 'CREATED'), fingerprint
    = coalesce(u.failure_key, t.fingerprint)
FROM (
    SELECT value ->> '$.task_id' AS task_id, value ->> '$.token' AS token, value ->> '$.new_status' AS
        new_status, value ->> '$.delay' AS delay, value ->> '$.attempts_added' AS attempts_added, value ->>
        '$.reenqueues_added' AS reenqueues_added, value ->> '$.deaths' AS deaths, value ->> '$.result_text' AS
        result_text, value ->> '$.result_json' AS result_json, value ->> '$.park_reason' AS park_reason, value
        ->> '$.failure_key' AS failure_key, value ->> '$.signals_seen' AS signals_seen
    FROM json_each(%(rows)s)
) AS u
WHERE t.id = u.task_id
AND t.total_attempt = u.token
AND t.status IN ('PROCESSING')
RETURNING id, watched
AND final_status IS NOT NULL;

-- StatsStatements.counts_exact
SELECT queue_name, status, parked_by IS NOT NULL, count(*), sum(CASE WHEN h.status = 'PROCESSING' AND
    h.next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') THEN 1 ELSE 0 END), max(CASE WHEN
    h.status = 'PROCESSING' AND h.next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') THEN
    (julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')) - julianday(h.next_process_time)) * 86400.0 END)
FROM "dbtaskqueue_task" AS h
GROUP BY 1, 2, 3;

-- StatsStatements.crowded
SELECT CAST(strftime('%%s', minute) AS integer) / %(step)s
FROM "dbtaskqueue_minutecount"
WHERE kind = %(kind)s
AND minute >= %(start)s
AND minute <= %(end)s
GROUP BY 1
HAVING count(*) > count(DISTINCT queue_name || ' ' || name)
ORDER BY 1
LIMIT %(limit)s;

-- StatsStatements.due_ages
SELECT x.queue_name, x.priority, max((julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')) -
    julianday(x.ready_time)) * 86400.0)
FROM "dbtaskqueue_task" AS x
WHERE x.ready_time IS NOT NULL
AND ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND attempt < max_attempts
AND status = 'CREATED'
GROUP BY 1, 2;

-- StatsStatements.durations
SELECT {by}, h.key, sum(h.value)
FROM "dbtaskqueue_minutecount", json_each({times}) AS h
WHERE kind = 'outcome'
AND minute >= %(start)s
AND minute <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND (CAST(%(every)s AS boolean) OR queue_name IN (
    SELECT value
    FROM json_each(%(queues)s)
))
AND h.type = 'integer'
AND h.value BETWEEN 0 AND 1e15
AND (h.key GLOB '[0-9]' OR h.key GLOB '[0-9][0-9]')
GROUP BY 1, 2;

-- StatsStatements.ended
SELECT queue_name, name, CAST((julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')) - julianday(minute)) *
    86400.0 / %(step)s AS integer), CAST(total(count) AS integer)
FROM "dbtaskqueue_minutecount"
WHERE kind = 'outcome'
AND minute >= %(start)s
AND minute <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
GROUP BY 1, 2, 3;

-- StatsStatements.names
SELECT DISTINCT queue_name
FROM "dbtaskqueue_task"
LIMIT 1000;

-- StatsStatements.open_failures
SELECT f.f, (
    SELECT count(*)
    FROM (
        SELECT 1
        FROM "dbtaskqueue_task" AS t
        WHERE t.fingerprint = f.f
        AND t.final_status IN ('ERROR', 'POISON')
        LIMIT {most}
    ) AS x
)
FROM (
    SELECT value AS f
    FROM json_each(%(prints)s)
) AS f;

-- StatsStatements.outcomes
SELECT CAST(strftime('%%s', minute) AS integer) / %(step)s, name, CAST(total(count) AS integer)
FROM "dbtaskqueue_minutecount"
WHERE kind = 'outcome'
AND minute >= %(start)s
AND minute <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND (CAST(%(every)s AS boolean) OR queue_name IN (
    SELECT value
    FROM json_each(%(queues)s)
))
GROUP BY 1, 2;

-- StatsStatements.ready_order_counts
SELECT y.before, y.holder, y.payload_type, count(*)
FROM (
    SELECT x.holder, x.payload_type, (x.priority, x.ready_time, x.id) < (
        SELECT t.priority, t.ready_time, t.id
        FROM "dbtaskqueue_task" AS t
        WHERE t.id = %(task_id)s
    ) AS before
    FROM (
        SELECT id, priority, ready_time, payload_type, CASE WHEN status = 'PROCESSING' AND next_process_time >
            strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') THEN coalesce(poller_instance, '') END AS holder
        FROM "dbtaskqueue_task"
        WHERE ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
        AND queue_name = %(queue_name)s
        ORDER BY priority, ready_time, id
        LIMIT 10000
    ) AS x
) AS y
GROUP BY 1, 2, 3;

-- StagingStatements.abandoned
SELECT name
FROM sqlite_master
WHERE type = 'table'
AND name LIKE 'dbtaskqueue_stg_%%'
AND name < 'dbtaskqueue_stg_' || strftime('%%Y%%m%%d%%H%%M%%S', strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now',
    printf('%%.3f seconds', -%(age)s))) || '~'
ORDER BY name;

-- StagingStatements.conflicts
SELECT u.queue_name, u.reference_number, t.id, t.status
FROM "dbtaskqueue_stg_20260131000000_x" AS u
JOIN "dbtaskqueue_task" AS t
ON t.reference_number = u.reference_number
AND t.queue_name = u.queue_name
WHERE u._attempt IN (
    SELECT value
    FROM json_each(%(attempts)s)
)
ORDER BY 2, 1
LIMIT 1;

-- StagingStatements.create
CREATE TABLE "dbtaskqueue_stg_20260131000000_x" (_attempt bigint, queue_name text, reference_number text,
    max_attempts int, priority smallint, payload jsonb, payload_type text, context jsonb, group_key text, tag
    text, lease_seconds float8, delay float8, run_at timestamptz, ttl float8);

-- StagingStatements.enter
INSERT INTO "dbtaskqueue_usedreference" (queue_name, reference_number)
VALUES ('streams/', %(entry)s)
ON CONFLICT (queue_name, reference_number) DO NOTHING;

-- StagingStatements.entries
SELECT reference_number
FROM "dbtaskqueue_usedreference"
WHERE queue_name = 'streams/'
AND substr(reference_number, 1, length(CAST(%(prefix)s AS text))) = CAST(%(prefix)s AS text)
ORDER BY id;

-- StagingStatements.groups
SELECT count(*)
FROM (
    SELECT DISTINCT u.queue_name AS q, u.group_key AS k
    FROM "dbtaskqueue_stg_20260131000000_x" AS u
    WHERE u._attempt IN (
        SELECT value
        FROM json_each(%(attempts)s)
    )
    AND u.group_key > ''
) AS g;

-- StagingStatements.insert (timed)
INSERT INTO "dbtaskqueue_task" (queue_name, reference_number, max_attempts, priority, payload, payload_type,
    context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by, expire_time)
SELECT u.queue_name, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), NULL, CASE WHEN u.ttl IS NOT NULL THEN strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f seconds', coalesce(u.delay,
    0))), printf('%%.3f seconds', u.ttl)) END
FROM "dbtaskqueue_stg_20260131000000_x" AS u
WHERE u._attempt IN (
    SELECT value
    FROM json_each(%(attempts)s)
)
ORDER BY u.reference_number, u.queue_name;

-- StagingStatements.insert (timed, grouped)
INSERT INTO "dbtaskqueue_task" (queue_name, reference_number, max_attempts, priority, payload, payload_type,
    context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by, expire_time)
SELECT u.queue_name, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), CASE WHEN u.group_key IS NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    'now'))), printf('%%.3f seconds', coalesce(u.delay, 0))) END, CASE WHEN u.group_key IS NOT NULL THEN
    'group' END, CASE WHEN u.ttl IS NOT NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f', strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'))), printf('%%.3f seconds', coalesce(u.delay, 0))), printf('%%.3f seconds', u.ttl))
    END
FROM "dbtaskqueue_stg_20260131000000_x" AS u
WHERE u._attempt IN (
    SELECT value
    FROM json_each(%(attempts)s)
)
ORDER BY u.reference_number, u.queue_name;

-- StagingStatements.insert (ignore, timed)
INSERT INTO "dbtaskqueue_task" (queue_name, reference_number, max_attempts, priority, payload, payload_type,
    context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by, expire_time)
SELECT u.queue_name, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), NULL, CASE WHEN u.ttl IS NOT NULL THEN strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f seconds', coalesce(u.delay,
    0))), printf('%%.3f seconds', u.ttl)) END
FROM "dbtaskqueue_stg_20260131000000_x" AS u
WHERE u._attempt IN (
    SELECT value
    FROM json_each(%(attempts)s)
)
ORDER BY u.reference_number, u.queue_name
ON CONFLICT (reference_number, queue_name) DO NOTHING;

-- StagingStatements.insert (ignore, timed, grouped)
INSERT INTO "dbtaskqueue_task" (queue_name, reference_number, max_attempts, priority, payload, payload_type,
    context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by, expire_time)
SELECT u.queue_name, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), CASE WHEN u.group_key IS NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    'now'))), printf('%%.3f seconds', coalesce(u.delay, 0))) END, CASE WHEN u.group_key IS NOT NULL THEN
    'group' END, CASE WHEN u.ttl IS NOT NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f', strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'))), printf('%%.3f seconds', coalesce(u.delay, 0))), printf('%%.3f seconds', u.ttl))
    END
FROM "dbtaskqueue_stg_20260131000000_x" AS u
WHERE u._attempt IN (
    SELECT value
    FROM json_each(%(attempts)s)
)
ORDER BY u.reference_number, u.queue_name
ON CONFLICT (reference_number, queue_name) DO NOTHING;

-- StagingStatements.misplaced
SELECT m.id, m.ready
FROM (
    SELECT t.id AS id, t.ready_time IS NOT NULL AS ready, t.status AS s, row_number() OVER (PARTITION BY
        t.queue_name, t.group_key ORDER BY CASE WHEN t.status = 'PROCESSING' THEN 0 WHEN t.ready_time IS NOT
        NULL AND t.attempt > 0 AND t.process_result IS NOT NULL AND t.result IS NULL THEN 1 ELSE 2 END,
        max((julianday(t.next_process_time) - julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))) *
        86400.0, 0), t.priority, t.id) AS place
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT DISTINCT u.queue_name AS q, u.group_key AS k
        FROM "dbtaskqueue_stg_20260131000000_x" AS u
        WHERE u._attempt IN (
            SELECT value
            FROM json_each(%(attempts)s)
        )
        AND u.group_key > ''
    ) AS g
    ON t.queue_name = g.q
    AND t.group_key = g.k
    WHERE coalesce(t.parked_by, t.final_status) IS NULL OR coalesce(t.parked_by, '') = 'group'
) AS m
WHERE m.place = 1
AND NOT m.ready OR m.place > 1
AND m.ready
AND m.s <> 'PROCESSING';

-- StagingStatements.name
SELECT 'dbtaskqueue_stg_' || strftime('%%Y%%m%%d%%H%%M%%S', strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now',
    printf('%%.3f seconds', -%(age)s)));

-- StagingStatements.new
SELECT (
    SELECT count(*)
    FROM "dbtaskqueue_stg_20260131000000_x" AS u
    WHERE u._attempt IN (
        SELECT value
        FROM json_each(%(attempts)s)
    )
    AND u.reference_number IS NULL
) + count(*)
FROM (
    SELECT DISTINCT u.queue_name, u.reference_number
    FROM "dbtaskqueue_stg_20260131000000_x" AS u
    WHERE u._attempt IN (
        SELECT value
        FROM json_each(%(attempts)s)
    )
    AND u.reference_number IS NOT NULL
    AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_task" AS t
        WHERE t.reference_number = u.reference_number
        AND t.queue_name = u.queue_name
    )
) AS n;

-- StagingStatements.staged
SELECT count(*)
FROM "dbtaskqueue_stg_20260131000000_x" AS u
WHERE u._attempt IN (
    SELECT value
    FROM json_each(%(attempts)s)
);

-- StagingStatements.twice
SELECT u.queue_name, u.reference_number
FROM "dbtaskqueue_stg_20260131000000_x" AS u
WHERE u._attempt IN (
    SELECT value
    FROM json_each(%(attempts)s)
)
AND u.reference_number IS NOT NULL
GROUP BY u.queue_name, u.reference_number
HAVING count(*) > 1
ORDER BY 2, 1
LIMIT 1;

-- ArchiveStatements.batch_abandoned
UPDATE "dbtaskqueue_archivebatch"
SET state = 'abandoned', note = %(note)s, close_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
WHERE token = %(token)s
AND state = 'open';

-- ArchiveStatements.batch_closed
UPDATE "dbtaskqueue_archivebatch"
SET state = 'closed', tasks = %(tasks)s, attempts = %(attempts)s, size = %(size)s, withdrawn = %(withdrawn)s,
    close_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
WHERE token = %(token)s
AND state = 'open';

-- ArchiveStatements.cutoff
SELECT strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds', -%(age)s));

-- ArchiveStatements.frozen
SELECT min(x.id), max(x.id), count(*)
FROM (
    SELECT id
    FROM "dbtaskqueue_task"
    WHERE id > %(after)s
    AND status IN ('COMPLETED', 'ERROR', 'POISON')
    AND status IN (
        SELECT value
        FROM json_each(%(statuses)s)
    )
    AND coalesce(finish_time, last_update_time) < %(cutoff)s
    AND (%(every)s OR queue_name IN (
        SELECT value
        FROM json_each(%(queues)s)
    ))
    AND watched IS NULL
    ORDER BY id
    LIMIT %(limit)s
) AS x;

-- ArchiveStatements.note_locked
INSERT INTO "dbtaskqueue_minutecount" (kind, queue_name, name, count)
SELECT 'batch_' || batch, queue_name, status, count(*)
FROM "dbtaskqueue_task"
WHERE id IN (
    SELECT row_id
    FROM archived_gone
)
AND batch IS NOT NULL
AND status <> 'COMPLETED'
GROUP BY batch, queue_name, status;

-- ArchiveStatements.remove_attempts
DELETE
FROM "dbtaskqueue_attempt"
WHERE id IN (
    SELECT a.id
    FROM archived_attempt AS a
    JOIN archived_gone AS g
    ON a.task_id = g.id
    AND a.location = g.location
);

-- ArchiveStatements.remove_exported_attempts
DELETE
FROM "dbtaskqueue_attempt"
WHERE id IN (
    SELECT id
    FROM archived_attempt
);

-- ArchiveStatements.remove_locked
DELETE
FROM "dbtaskqueue_task"
WHERE id IN (
    SELECT row_id
    FROM archived_gone
);

-- ArchiveStatements.stayed
SELECT k.location, k.id
FROM archived_key AS k
WHERE NOT EXISTS (
    SELECT 1
    FROM archived_gone AS g
    WHERE g.id = k.id
    AND g.location = k.location
);

-- ArchiveStatements.temporary, archived_key
CREATE TEMPORARY TABLE archived_key (location text, id bigint, total_attempt bigint, status text,
    last_update_time text);

-- ArchiveStatements.temporary, archived_attempt
CREATE TEMPORARY TABLE archived_attempt (id bigint, location text, task_id bigint);

-- ArchiveStatements.temporary, archived_gone
CREATE TEMPORARY TABLE archived_gone (location text, id bigint, row_id bigint);

-- EraseStatements.about, attempts [1]
SELECT count(*)
FROM "dbtaskqueue_attempt" AS t
JOIN (
    SELECT value ->> '$.location' AS location, value ->> '$.task_id' AS task_id
    FROM json_each(%(rows)s)
) AS u
ON t.location = u.location
AND t.task_id = u.task_id;

-- EraseStatements.about, attempts [2]
DELETE
FROM "dbtaskqueue_attempt"
WHERE id IN (
    SELECT t.id
    FROM "dbtaskqueue_attempt" AS t
    JOIN (
        SELECT value ->> '$.location' AS location, value ->> '$.task_id' AS task_id
        FROM json_each(%(rows)s)
    ) AS u
    ON t.location = u.location
    AND t.task_id = u.task_id
);

-- EraseStatements.about, steps and signals [1]
SELECT count(*)
FROM "dbtaskqueue_step" AS t
JOIN (
    SELECT value ->> '$.location' AS location, value ->> '$.task_id' AS task_id
    FROM json_each(%(rows)s)
) AS u
ON t.location = u.location
AND t.task_id = u.task_id;

-- EraseStatements.about, steps and signals [2]
DELETE
FROM "dbtaskqueue_step"
WHERE id IN (
    SELECT t.id
    FROM "dbtaskqueue_step" AS t
    JOIN (
        SELECT value ->> '$.location' AS location, value ->> '$.task_id' AS task_id
        FROM json_each(%(rows)s)
    ) AS u
    ON t.location = u.location
    AND t.task_id = u.task_id
);

-- EraseStatements.about, changes by operators [1]
SELECT count(DISTINCT t.id)
FROM "dbtaskqueue_taskchange" AS t
JOIN (
    SELECT value ->> '$.location' AS location, value ->> '$.task_id' AS task_id
    FROM json_each(%(rows)s)
) AS u
ON t.location = u.location
AND u.task_id BETWEEN t.first_task_id AND t.last_task_id
AND u.task_id IN (
    SELECT named.value
    FROM json_each(t.task_ids) AS named
)
WHERE t.before IS NOT NULL OR t.difference IS NOT NULL;

-- EraseStatements.about, changes by operators [2]
UPDATE "dbtaskqueue_taskchange"
SET before = NULL, difference = NULL
WHERE id IN (
    SELECT t.id
    FROM "dbtaskqueue_taskchange" AS t
    JOIN (
        SELECT value ->> '$.location' AS location, value ->> '$.task_id' AS task_id
        FROM json_each(%(rows)s)
    ) AS u
    ON t.location = u.location
    AND u.task_id BETWEEN t.first_task_id AND t.last_task_id
    AND u.task_id IN (
        SELECT named.value
        FROM json_each(t.task_ids) AS named
    )
    WHERE t.before IS NOT NULL OR t.difference IS NOT NULL
);

-- EraseStatements.audit
INSERT INTO "dbtaskqueue_auditentry" (actor, source, verb, reason, details)
VALUES (%(actor)s, 'command', 'erase', %(reason)s, %(details)s)
RETURNING id;

-- EraseStatements.audited
UPDATE "dbtaskqueue_auditentry"
SET changed = %(changed)s, details = %(details)s
WHERE id = %(id)s;

-- EraseStatements.count_archived
INSERT INTO "dbtaskqueue_minutecount" (kind, queue_name, count)
VALUES ('deletion', %(queue)s, %(count)s);

-- EraseStatements.count_history
INSERT INTO "dbtaskqueue_minutecount" (kind, queue_name, count)
SELECT 'deletion', queue_name, count(*)
FROM "dbtaskqueue_taskhistory"
WHERE reference_number IN (
    SELECT value
    FROM json_each(%(references)s)
)
AND (%(every)s OR queue_name IN (
    SELECT value
    FROM json_each(%(queues)s)
))
GROUP BY queue_name;

-- EraseStatements.delete_history
DELETE
FROM "dbtaskqueue_taskhistory"
WHERE reference_number IN (
    SELECT value
    FROM json_each(%(references)s)
)
AND (%(every)s OR queue_name IN (
    SELECT value
    FROM json_each(%(queues)s)
));

-- EraseStatements.delete_staged
DELETE
FROM {table}
WHERE reference_number IN (
    SELECT value
    FROM json_each(%(references)s)
)
AND (%(every)s OR queue_name IN (
    SELECT value
    FROM json_each(%(queues)s)
))
RETURNING reference_number;

-- EraseStatements.delete_used_references
DELETE
FROM "dbtaskqueue_usedreference"
WHERE reference_number IN (
    SELECT value
    FROM json_each(%(references)s)
)
AND (%(every)s OR queue_name IN (
    SELECT value
    FROM json_each(%(queues)s)
));

-- EraseStatements.history
SELECT reference_number, location, task_id
FROM "dbtaskqueue_taskhistory"
WHERE reference_number IN (
    SELECT value
    FROM json_each(%(references)s)
)
AND (%(every)s OR queue_name IN (
    SELECT value
    FROM json_each(%(queues)s)
));

-- EraseStatements.lakes
SELECT DISTINCT lake
FROM "dbtaskqueue_archivebatch"
WHERE state = 'closed'
ORDER BY lake;

-- EraseStatements.staged
SELECT reference_number
FROM {table}
WHERE reference_number IN (
    SELECT value
    FROM json_each(%(references)s)
)
AND (%(every)s OR queue_name IN (
    SELECT value
    FROM json_each(%(queues)s)
));

-- EraseStatements.tasks
SELECT t.reference_number, t.id, t.status, t.watched
FROM "dbtaskqueue_task" AS t
WHERE reference_number IN (
    SELECT value
    FROM json_each(%(references)s)
)
AND (%(every)s OR queue_name IN (
    SELECT value
    FROM json_each(%(queues)s)
))
ORDER BY t.id;

-- EraseStatements.used_references
SELECT reference_number
FROM "dbtaskqueue_usedreference"
WHERE reference_number IN (
    SELECT value
    FROM json_each(%(references)s)
)
AND (%(every)s OR queue_name IN (
    SELECT value
    FROM json_each(%(queues)s)
));

-- Statements.attempts (one row)
INSERT INTO "dbtaskqueue_attempt" (location, task_id, queue_name, attempt, total_attempt, poller_instance,
    start_time, error_type, message, traceback, fingerprint)
SELECT %(location)s, t.id, t.queue_name, t.attempt, t.total_attempt, t.poller_instance, t.start_time,
    u.error_type, u.message, u.traceback, u.failure_key
FROM "dbtaskqueue_task" AS t
JOIN (
    SELECT %(task_id)s AS task_id, %(token)s AS token, %(error_type)s AS error_type, %(message)s AS message,
        %(traceback)s AS traceback, %(failure_key)s AS failure_key
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.status IN ('PROCESSING');

-- Statements.cancel_held (one row)
UPDATE "dbtaskqueue_task" AS t
SET status = 'POISON', final_status = 'POISON', parked_by = NULL, finish_time = strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), process_result =
    u.reason_text
FROM (
    SELECT %(child)s AS child, %(reason_text)s AS reason_text
) AS u
WHERE t.id = u.child
AND t.parked_by = 'parents'
AND t.status IN ('CREATED', 'PROCESSING')
RETURNING id, queue_name, watched;

-- Statements.charge_groups (one row)
UPDATE "dbtaskqueue_limit" AS l
SET tokens = l.tokens - u.taken, full_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f
    seconds', (%(burst)s - l.tokens + u.taken) / %(rate)s))
FROM (
    SELECT %(group_name)s AS group_name, %(taken)s AS taken
) AS u
WHERE l.queue_name = %(queue_name)s
AND l.group_key = u.group_name;

-- Statements.checkout_optimistic (one row)
UPDATE "dbtaskqueue_task"
SET status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time =
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    next_process_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds',
    max(coalesce(lease_seconds, %(lease)s), %(min_lease)s))), poller_instance = %(poller_instance)s,
    lost_leases = CASE WHEN status = 'PROCESSING' THEN min(abs(lost_leases) + 1, 1000) ELSE -abs(lost_leases)
    END
WHERE id IN (
    SELECT t.id
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT %(task_id)s AS task_id, %(token)s AS token
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('CREATED', 'PROCESSING')
    AND (ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') AND next_process_time <=
        strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') AND attempt < max_attempts AND (tag IS NULL OR tag IN (
        SELECT value
        FROM json_each(%(tags)s)
    )) AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = %(queue_name)s
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))
    )) IS TRUE
)
RETURNING id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, CAST(payload AS text), CAST(context AS text), CAST(create_time AS text), CAST(start_time AS
    text), CAST(next_process_time AS text), poller_instance, CAST(ready_time AS text), group_key,
    CAST(expire_time AS text), lease_seconds, lost_leases;

-- Statements.claim_periods (one row)
INSERT INTO "dbtaskqueue_usedreference" AS l (queue_name, reference_number, expire_time)
SELECT %(queue_name)s, u.reference_number, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds',
    %(period)s))
FROM (
    SELECT %(reference_number)s AS reference_number
) AS u
WHERE true
ORDER BY u.reference_number
ON CONFLICT (queue_name, reference_number) DO UPDATE
SET expire_time = excluded.expire_time, create_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
WHERE l.create_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds', %(ago)s))
RETURNING reference_number;

-- Statements.claim_references (one row)
INSERT INTO "dbtaskqueue_usedreference" (queue_name, reference_number)
SELECT %(queue_name)s, u.reference_number
FROM (
    SELECT %(reference_number)s AS reference_number
) AS u
WHERE true
ORDER BY u.reference_number
ON CONFLICT (queue_name, reference_number) DO NOTHING
RETURNING reference_number;

-- Statements.complete (one row)
UPDATE "dbtaskqueue_task" AS t
SET status = 'COMPLETED', final_status = 'COMPLETED', ready_time = NULL, finish_time = strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), process_result =
    NULL, result = u.result_json
FROM (
    SELECT %(task_id)s AS task_id, %(token)s AS token, %(result_json)s AS result_json
) AS u
WHERE t.id = u.task_id
AND t.total_attempt = u.token
AND t.status IN ('PROCESSING')
RETURNING id, watched;

-- Statements.complete_plain (one row)
UPDATE "dbtaskqueue_task" AS t
SET status = 'COMPLETED', final_status = 'COMPLETED', ready_time = NULL, finish_time = strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), process_result =
    NULL, result = NULL
FROM (
    SELECT %(task_id)s AS task_id, %(token)s AS token
) AS u
WHERE t.id = u.task_id
AND t.total_attempt = u.token
AND t.status IN ('PROCESSING')
RETURNING id, watched;

-- Statements.count_deleted (one row)
INSERT INTO "dbtaskqueue_minutecount" (kind, queue_name, count)
SELECT 'deletion', x.q, count(*)
FROM (
    SELECT t.queue_name AS q
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT %(task_id)s AS task_id, %(token)s AS token
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('PROCESSING')
) AS x
GROUP BY x.q;

-- Statements.count_down (one row)
UPDATE "dbtaskqueue_hold" AS t
SET remaining = t.remaining - u.number
FROM (
    SELECT %(child)s AS child, %(number)s AS number
) AS u
WHERE t.location = %(location)s
AND t.task_id = u.child
RETURNING task_id, remaining;

-- Statements.delete_counted (one row)
WITH gone AS (
    DELETE
    FROM "dbtaskqueue_task"
    WHERE id IN (
        SELECT t.id
        FROM "dbtaskqueue_task" AS t
        JOIN (
            SELECT %(task_id)s AS task_id, %(token)s AS token
        ) AS u
        ON t.id = u.task_id
        AND t.total_attempt = u.token
        WHERE t.status IN ('PROCESSING')
    )
    RETURNING id, watched, queue_name AS q
), counted AS (
    INSERT INTO "dbtaskqueue_minutecount" (kind, queue_name, count)
    SELECT 'deletion', q, count(*)
    FROM gone
    GROUP BY q
)
SELECT id, watched
FROM gone;

-- Statements.delete_settled (one row)
DELETE
FROM "dbtaskqueue_task"
WHERE id IN (
    SELECT t.id
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT %(task_id)s AS task_id, %(token)s AS token
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('PROCESSING')
)
RETURNING id, watched;

-- Statements.heads_before (one row)
SELECT x.id, count(*), (julianday(max(t.ready_time)) - julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')))
    * 86400.0
FROM (
    SELECT %(task_id)s AS task_id, %(token)s AS token
) AS u
JOIN "dbtaskqueue_task" AS x
ON x.id = u.task_id
JOIN "dbtaskqueue_task" AS t
ON t.queue_name = x.queue_name
AND t.group_key = x.group_key
AND coalesce(t.parked_by, t.final_status) IS NULL
AND t.next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND t.priority = x.priority
AND t.id < x.id
AND t.ready_time > x.ready_time
GROUP BY x.id;

-- Statements.held_leases (one row)
SELECT id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, CAST(payload AS text), CAST(context AS text), CAST(create_time AS text), CAST(start_time AS
    text), CAST(next_process_time AS text), poller_instance, CAST(ready_time AS text), group_key,
    CAST(expire_time AS text), lease_seconds, lost_leases, (julianday(next_process_time) -
    julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))) * 86400.0
FROM "dbtaskqueue_task" AS t
JOIN (
    SELECT %(task_id)s AS task_id, %(token)s AS token
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.status IN ('PROCESSING');

-- Statements.insert_edges (one row)
INSERT INTO "dbtaskqueue_dependency" (parent_location, parent_id, child_location, child_id, name, outcome)
SELECT u.parent_location, u.parent_id, u.child_location, u.child_id, u.name, u.outcome
FROM (
    SELECT %(parent_location)s AS parent_location, %(parent_id)s AS parent_id, %(child_location)s AS
        child_location, %(child_id)s AS child_id, %(name)s AS name, %(outcome)s AS outcome
) AS u;

-- Statements.insert_holds (one row)
INSERT INTO "dbtaskqueue_hold" (location, task_id, remaining, on_parent_failure)
SELECT u.location, u.task_id, u.remaining, u.on_parent_failure
FROM (
    SELECT %(location)s AS location, %(task_id)s AS task_id, %(remaining)s AS remaining, %(on_parent_failure)s
        AS on_parent_failure
) AS u;

-- Statements.insert_many (error) (one row)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), NULL, NULL
FROM (
    SELECT %(reference_number)s AS reference_number, %(max_attempts)s AS max_attempts, %(priority)s AS
        priority, %(payload)s AS payload, %(payload_type)s AS payload_type, %(context)s AS context,
        %(group_key)s AS group_key, %(tag)s AS tag, %(lease_seconds)s AS lease_seconds
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run;

-- Statements.insert_many (error, grouped) (one row)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), CASE WHEN u.group_key IS
    NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') END, CASE WHEN NOT u.group_key IS NULL THEN 'group'
    END, NULL
FROM (
    SELECT %(reference_number)s AS reference_number, %(max_attempts)s AS max_attempts, %(priority)s AS
        priority, %(payload)s AS payload, %(payload_type)s AS payload_type, %(context)s AS context,
        %(group_key)s AS group_key, %(tag)s AS tag, %(lease_seconds)s AS lease_seconds
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run;

-- Statements.insert_many (error, timed) (one row)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), NULL, CASE WHEN u.ttl IS NOT NULL THEN strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f seconds', coalesce(u.delay,
    0))), printf('%%.3f seconds', u.ttl)) END
FROM (
    SELECT %(reference_number)s AS reference_number, %(max_attempts)s AS max_attempts, %(priority)s AS
        priority, %(payload)s AS payload, %(payload_type)s AS payload_type, %(context)s AS context,
        %(group_key)s AS group_key, %(tag)s AS tag, %(lease_seconds)s AS lease_seconds, %(delay)s AS delay,
        %(run_at)s AS run_at, %(ttl)s AS ttl
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run;

-- Statements.insert_many (error, timed, grouped) (one row)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), CASE WHEN u.group_key IS NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    'now'))), printf('%%.3f seconds', coalesce(u.delay, 0))) END, CASE WHEN NOT u.group_key IS NULL THEN
    'group' END, CASE WHEN u.ttl IS NOT NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f', strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'))), printf('%%.3f seconds', coalesce(u.delay, 0))), printf('%%.3f seconds', u.ttl))
    END
FROM (
    SELECT %(reference_number)s AS reference_number, %(max_attempts)s AS max_attempts, %(priority)s AS
        priority, %(payload)s AS payload, %(payload_type)s AS payload_type, %(context)s AS context,
        %(group_key)s AS group_key, %(tag)s AS tag, %(lease_seconds)s AS lease_seconds, %(delay)s AS delay,
        %(run_at)s AS run_at, %(ttl)s AS ttl
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run;

-- Statements.insert_many (replace, timed) (one row)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), NULL, CASE WHEN u.ttl IS NOT NULL THEN strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f seconds', coalesce(u.delay,
    0))), printf('%%.3f seconds', u.ttl)) END
FROM (
    SELECT %(reference_number)s AS reference_number, %(max_attempts)s AS max_attempts, %(priority)s AS
        priority, %(payload)s AS payload, %(payload_type)s AS payload_type, %(context)s AS context,
        %(group_key)s AS group_key, %(tag)s AS tag, %(lease_seconds)s AS lease_seconds, %(delay)s AS delay,
        %(run_at)s AS run_at, %(ttl)s AS ttl
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO UPDATE
SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type, context =
    excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds, next_process_time =
    excluded.next_process_time, expire_time = excluded.expire_time, max_attempts = max(excluded.max_attempts,
    t.attempt + 1), ready_time = CASE WHEN t.parked_by = 'signal' THEN excluded.next_process_time ELSE CASE
    WHEN t.parked_by IS NULL THEN excluded.next_process_time END END, parked_by = nullif(t.parked_by,
    'signal'), last_update_time = max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', t.create_time, printf('%%.3f seconds', 0.001)))
WHERE t.status IN ('CREATED')
AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')
AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run;

-- Statements.insert_many (replace, timed, keep_due) (one row)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), NULL, CASE WHEN u.ttl IS NOT NULL THEN strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f seconds', coalesce(u.delay,
    0))), printf('%%.3f seconds', u.ttl)) END
FROM (
    SELECT %(reference_number)s AS reference_number, %(max_attempts)s AS max_attempts, %(priority)s AS
        priority, %(payload)s AS payload, %(payload_type)s AS payload_type, %(context)s AS context,
        %(group_key)s AS group_key, %(tag)s AS tag, %(lease_seconds)s AS lease_seconds, %(delay)s AS delay,
        %(run_at)s AS run_at, %(ttl)s AS ttl
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO UPDATE
SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type, context =
    excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds, max_attempts =
    max(excluded.max_attempts, t.attempt + 1), ready_time = CASE WHEN t.parked_by = 'signal' THEN
    excluded.next_process_time ELSE t.ready_time END, parked_by = nullif(t.parked_by, 'signal'),
    last_update_time = max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    t.create_time, printf('%%.3f seconds', 0.001)))
WHERE t.status IN ('CREATED')
AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')
AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run;

-- Statements.insert_many (replace_running, timed) (one row)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), NULL, CASE WHEN u.ttl IS NOT NULL THEN strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f seconds', coalesce(u.delay,
    0))), printf('%%.3f seconds', u.ttl)) END
FROM (
    SELECT %(reference_number)s AS reference_number, %(max_attempts)s AS max_attempts, %(priority)s AS
        priority, %(payload)s AS payload, %(payload_type)s AS payload_type, %(context)s AS context,
        %(group_key)s AS group_key, %(tag)s AS tag, %(lease_seconds)s AS lease_seconds, %(delay)s AS delay,
        %(run_at)s AS run_at, %(ttl)s AS ttl
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO UPDATE
SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type, context =
    excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds, next_process_time =
    excluded.next_process_time, expire_time = excluded.expire_time, poller_instance = CASE WHEN t.status =
    'PROCESSING' THEN NULL ELSE t.poller_instance END, start_time = CASE WHEN t.status = 'PROCESSING' THEN
    NULL ELSE t.start_time END, process_result = CASE WHEN t.status = 'PROCESSING' THEN NULL ELSE
    t.process_result END, lost_leases = CASE WHEN t.status = 'PROCESSING' THEN 0 ELSE t.lost_leases END,
    status = 'CREATED', attempt = CASE WHEN t.status = 'PROCESSING' THEN 0 ELSE t.attempt END, max_attempts =
    max(excluded.max_attempts, CASE WHEN t.status = 'PROCESSING' THEN 0 ELSE t.attempt END + 1), ready_time =
    CASE WHEN t.parked_by = 'signal' THEN excluded.next_process_time ELSE CASE WHEN t.parked_by IS NULL THEN
    excluded.next_process_time END END, parked_by = nullif(t.parked_by, 'signal'), last_update_time =
    max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), strftime('%%Y-%%m-%%d %%H:%%M:%%f', t.create_time,
    printf('%%.3f seconds', 0.001)))
WHERE t.status IN ('CREATED', 'PROCESSING')
AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')
AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run;

-- Statements.insert_many (replace_running, timed, keep_due) (one row)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), NULL, CASE WHEN u.ttl IS NOT NULL THEN strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f seconds', coalesce(u.delay,
    0))), printf('%%.3f seconds', u.ttl)) END
FROM (
    SELECT %(reference_number)s AS reference_number, %(max_attempts)s AS max_attempts, %(priority)s AS
        priority, %(payload)s AS payload, %(payload_type)s AS payload_type, %(context)s AS context,
        %(group_key)s AS group_key, %(tag)s AS tag, %(lease_seconds)s AS lease_seconds, %(delay)s AS delay,
        %(run_at)s AS run_at, %(ttl)s AS ttl
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO UPDATE
SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type, context =
    excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds, poller_instance = CASE WHEN
    t.status = 'PROCESSING' THEN NULL ELSE t.poller_instance END, start_time = CASE WHEN t.status =
    'PROCESSING' THEN NULL ELSE t.start_time END, process_result = CASE WHEN t.status = 'PROCESSING' THEN NULL
    ELSE t.process_result END, lost_leases = CASE WHEN t.status = 'PROCESSING' THEN 0 ELSE t.lost_leases END,
    status = 'CREATED', attempt = CASE WHEN t.status = 'PROCESSING' THEN 0 ELSE t.attempt END,
    next_process_time = CASE WHEN t.status = 'PROCESSING' THEN t.ready_time ELSE t.next_process_time END,
    max_attempts = max(excluded.max_attempts, CASE WHEN t.status = 'PROCESSING' THEN 0 ELSE t.attempt END +
    1), ready_time = CASE WHEN t.parked_by = 'signal' THEN excluded.next_process_time ELSE t.ready_time END,
    parked_by = nullif(t.parked_by, 'signal'), last_update_time = max(strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    'now'), strftime('%%Y-%%m-%%d %%H:%%M:%%f', t.create_time, printf('%%.3f seconds', 0.001)))
WHERE t.status IN ('CREATED', 'PROCESSING')
AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')
AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run;

-- Statements.insert_many (replace, timed, bounded) (one row)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f
    seconds', coalesce(u.delay, 0))), NULL, CASE WHEN u.ttl IS NOT NULL THEN strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', strftime('%%Y-%%m-%%d %%H:%%M:%%f', max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    coalesce(u.run_at, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))), printf('%%.3f seconds', coalesce(u.delay,
    0))), printf('%%.3f seconds', u.ttl)) END
FROM (
    SELECT %(reference_number)s AS reference_number, %(max_attempts)s AS max_attempts, %(priority)s AS
        priority, %(payload)s AS payload, %(payload_type)s AS payload_type, %(context)s AS context,
        %(group_key)s AS group_key, %(tag)s AS tag, %(lease_seconds)s AS lease_seconds, %(delay)s AS delay,
        %(run_at)s AS run_at, %(ttl)s AS ttl
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO UPDATE
SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type, context =
    excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds, next_process_time =
    min(excluded.next_process_time, strftime('%%Y-%%m-%%d %%H:%%M:%%f', t.create_time, printf('%%.3f seconds',
    %(max_wait)s))), expire_time = CASE WHEN (julianday(excluded.expire_time) -
    julianday(excluded.next_process_time)) * 86400.0 IS NOT NULL THEN strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    min(excluded.next_process_time, strftime('%%Y-%%m-%%d %%H:%%M:%%f', t.create_time, printf('%%.3f seconds',
    %(max_wait)s))), printf('%%.3f seconds', (julianday(excluded.expire_time) -
    julianday(excluded.next_process_time)) * 86400.0)) END, max_attempts = max(excluded.max_attempts,
    t.attempt + 1), ready_time = CASE WHEN t.parked_by = 'signal' THEN min(excluded.next_process_time,
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', t.create_time, printf('%%.3f seconds', %(max_wait)s))) ELSE CASE WHEN
    t.parked_by IS NULL THEN min(excluded.next_process_time, strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    t.create_time, printf('%%.3f seconds', %(max_wait)s))) END END, parked_by = nullif(t.parked_by, 'signal'),
    last_update_time = max(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    t.create_time, printf('%%.3f seconds', 0.001)))
WHERE CASE WHEN t.status = 'CREATED' AND (t.attempt > 0 OR t.reenqueue_attempt > 0 OR EXISTS (
    SELECT 1
    FROM "dbtaskqueue_step" AS step
    WHERE step.location = %(location)s
    AND step.task_id = t.id
    AND step.task_time = t.create_time
    AND step.kind <> 'sent'
)) THEN 'PROCESSING' ELSE t.status END IN ('CREATED')
AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')
AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run;

-- Statements.insert_many (error, whole) (one row)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), NULL, NULL
FROM (
    SELECT %(reference_number)s AS reference_number, %(max_attempts)s AS max_attempts, %(priority)s AS
        priority, %(payload)s AS payload, %(payload_type)s AS payload_type, %(context)s AS context,
        %(group_key)s AS group_key, %(tag)s AS tag, %(lease_seconds)s AS lease_seconds
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, create_time, next_process_time, ready_time, attempt, reenqueue_attempt, total_attempt,
    last_update_time, reference_number, last_update_time = create_time AS is_new, total_attempt > 0 OR signals
    > 0 AS has_run;

-- Statements.insert_many (error, waits, whole) (one row)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), NULL, 'parents', NULL
FROM (
    SELECT %(reference_number)s AS reference_number, %(max_attempts)s AS max_attempts, %(priority)s AS
        priority, %(payload)s AS payload, %(payload_type)s AS payload_type, %(context)s AS context,
        %(group_key)s AS group_key, %(tag)s AS tag, %(lease_seconds)s AS lease_seconds
) AS u
WHERE true
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, create_time, next_process_time, ready_time, attempt, reenqueue_attempt, total_attempt,
    last_update_time, reference_number, last_update_time = create_time AS is_new, total_attempt > 0 OR signals
    > 0 AS has_run;

-- Statements.moved (one row)
SELECT h.task_id
FROM "dbtaskqueue_taskhistory" AS h
JOIN (
    SELECT %(task_id)s AS task_id, %(token)s AS token
) AS u
ON h.task_id = u.task_id
AND h.total_attempt = u.token
WHERE h.location = %(location)s;

-- Statements.note_expired (one row)
INSERT INTO "dbtaskqueue_minutecount" (kind, queue_name, name, count)
SELECT 'batch_' || batch, queue_name, status, count(*)
FROM (
    SELECT t.batch, t.queue_name, 'DELETED' AS status
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT %(task_id)s AS task_id, %(token)s AS token
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('PROCESSING')
) AS x
WHERE true
AND batch IS NOT NULL
AND status <> 'COMPLETED'
GROUP BY batch, queue_name, status;

-- Statements.outcome_of (one row)
SELECT t.id, t.status
FROM "dbtaskqueue_task" AS t
JOIN (
    SELECT %(task_id)s AS task_id, %(token)s AS token
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.start_time IS NOT NULL
AND (t.status NOT IN ('ERROR', 'POISON') OR t.poller_instance IS NOT NULL AND t.lost_leases <= 0);

-- Statements.put_off (one row)
UPDATE "dbtaskqueue_task" AS t
SET last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), next_process_time = strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), ready_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds',
    u.delay)), attempt = t.attempt - 1, status = CASE WHEN t.lost_leases > 0 THEN t.status ELSE 'CREATED' END,
    poller_instance = CASE WHEN t.lost_leases > 0 THEN t.poller_instance END, lost_leases = CASE WHEN
    t.lost_leases > 0 THEN t.lost_leases - 1 ELSE t.lost_leases END
FROM (
    SELECT %(task_id)s AS task_id, %(token)s AS token, %(delay)s AS delay
) AS u
WHERE t.id = u.task_id
AND t.total_attempt = u.token
AND t.status IN ('PROCESSING')
RETURNING id;

-- Statements.renew (one row)
UPDATE "dbtaskqueue_task"
SET next_process_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds',
    max(coalesce(lease_seconds, %(lease)s), %(min_lease)s)))
WHERE id IN (
    SELECT t.id
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT %(task_id)s AS task_id, %(token)s AS token
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('PROCESSING')
)
AND next_process_time > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds', %(since)s))
RETURNING id;

-- Statements.to_history (one row)
INSERT INTO "dbtaskqueue_taskhistory" (location, task_id, queue_name, reference_number, status, attempt,
    reenqueue_attempt, total_attempt, max_attempts, priority, payload, payload_type, result, process_result,
    context, group_key, tag, poller_instance, create_time, next_process_time, last_update_time, lease_seconds,
    expire_time, start_time, finish_time)
SELECT %(location)s, t.id, t.queue_name, t.reference_number, 'COMPLETED', t.attempt, t.reenqueue_attempt,
    t.total_attempt, t.max_attempts, t.priority, t.payload, t.payload_type, u.result_json, NULL, t.context,
    t.group_key, t.tag, t.poller_instance, t.create_time, t.next_process_time, strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now'), t.lease_seconds, t.expire_time, t.start_time, strftime('%%Y-%%m-%%d %%H:%%M:%%f',
    'now')
FROM "dbtaskqueue_task" AS t
JOIN (
    SELECT %(task_id)s AS task_id, %(token)s AS token, %(result_json)s AS result_json
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.status IN ('PROCESSING');

-- Statements.unlocked (one row)
SELECT t.id
FROM "dbtaskqueue_task" AS t
JOIN (
    SELECT %(task_id)s AS task_id, %(token)s AS token
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.status IN ('PROCESSING');

-- Statements.write (one row)
UPDATE "dbtaskqueue_task" AS t
SET status = u.new_status, last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), parked_by = CASE
    WHEN u.signals_seen <> coalesce(t.signals, 0) THEN NULL ELSE u.park_reason END, ready_time = CASE WHEN
    u.new_status <> 'CREATED' OR CASE WHEN u.signals_seen <> coalesce(t.signals, 0) THEN NULL ELSE
    u.park_reason END IS NOT NULL THEN NULL WHEN u.delay IS NULL THEN t.ready_time ELSE strftime('%%Y-%%m-%%d
    %%H:%%M:%%f', 'now', printf('%%.3f seconds', CASE WHEN u.signals_seen <> coalesce(t.signals, 0) THEN 0
    ELSE coalesce(u.delay, 0) END)) END, next_process_time = CASE WHEN u.new_status = 'CREATED' THEN
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds', CASE WHEN u.signals_seen <>
    coalesce(t.signals, 0) THEN 0 ELSE coalesce(u.delay, 0) END)) WHEN u.new_status IN ('ERROR', 'POISON')
    THEN t.ready_time ELSE t.next_process_time END, expire_time = CASE WHEN t.expire_time IS NULL OR u.delay
    IS NULL THEN t.expire_time ELSE strftime('%%Y-%%m-%%d %%H:%%M:%%f', t.expire_time, printf('%%.3f seconds',
    (julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds', CASE WHEN u.signals_seen <>
    coalesce(t.signals, 0) THEN 0 ELSE coalesce(u.delay, 0) END))) - julianday(t.ready_time)) * 86400.0)) END,
    attempt = CASE WHEN u.attempts_added IS NULL THEN 0 WHEN u.new_status = 'CREATED' THEN min(t.attempt +
    u.attempts_added, t.max_attempts - 1) ELSE t.attempt + u.attempts_added END, reenqueue_attempt =
    t.reenqueue_attempt + u.reenqueues_added, process_result = CASE WHEN u.new_status = 'CREATED' AND u.delay
    IS NULL THEN t.process_result ELSE u.result_text END, result = CASE WHEN u.new_status = 'CREATED' AND
    u.delay IS NULL THEN t.result ELSE u.result_json END, poller_instance = CASE WHEN u.new_status = 'CREATED'
    THEN NULL ELSE t.poller_instance END, finish_time = CASE WHEN u.new_status = 'CREATED' THEN NULL ELSE
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') END, lost_leases = CASE WHEN u.attempts_added = -1 AND u.delay
    IS NULL THEN t.lost_leases ELSE u.deaths END, final_status = nullif(u.new_status, 'CREATED'), fingerprint
    = coalesce(u.failure_key, t.fingerprint)
FROM (
    SELECT %(task_id)s AS task_id, %(token)s AS token, %(new_status)s AS new_status, %(delay)s AS delay,
        %(attempts_added)s AS attempts_added, %(reenqueues_added)s AS reenqueues_added, %(deaths)s AS deaths,
        %(result_text)s AS result_text, %(result_json)s AS result_json, %(park_reason)s AS park_reason,
        %(failure_key)s AS failure_key, %(signals_seen)s AS signals_seen
) AS u
WHERE t.id = u.task_id
AND t.total_attempt = u.token
AND t.status IN ('PROCESSING')
RETURNING id, watched
AND final_status IS NOT NULL;

-- Statements.ages (without some payload types)
SELECT x.priority, max((julianday(strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')) - julianday(x.ready_time)) *
    86400.0)
FROM "dbtaskqueue_task" AS x
WHERE queue_name = %(queue_name)s
AND ready_time IS NOT NULL
AND ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND attempt < max_attempts
AND (tag IS NULL OR tag IN (
    SELECT value
    FROM json_each(%(tags)s)
))
AND NOT coalesce(payload_type, '') IN (
    SELECT value
    FROM json_each(%(without)s)
)
AND NOT EXISTS (
    SELECT 1
    FROM "dbtaskqueue_queue" AS q
    WHERE q.name = %(queue_name)s
    AND q.paused_time IS NOT NULL
    AND (q.paused_until IS NULL OR q.paused_until > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))
)
GROUP BY x.priority;

-- Statements.checkout_optimistic (without some payload types)
UPDATE "dbtaskqueue_task"
SET status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time =
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    next_process_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds',
    max(coalesce(lease_seconds, %(lease)s), %(min_lease)s))), poller_instance = %(poller_instance)s,
    lost_leases = CASE WHEN status = 'PROCESSING' THEN min(abs(lost_leases) + 1, 1000) ELSE -abs(lost_leases)
    END
WHERE id IN (
    SELECT t.id
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT value ->> '$.task_id' AS task_id, value ->> '$.token' AS token
        FROM json_each(%(rows)s)
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('CREATED', 'PROCESSING')
    AND (ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') AND next_process_time <=
        strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now') AND attempt < max_attempts AND (tag IS NULL OR tag IN (
        SELECT value
        FROM json_each(%(tags)s)
    )) AND NOT coalesce(payload_type, '') IN (
        SELECT value
        FROM json_each(%(without)s)
    ) AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = %(queue_name)s
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))
    )) IS TRUE
)
RETURNING id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, CAST(payload AS text), CAST(context AS text), CAST(create_time AS text), CAST(start_time AS
    text), CAST(next_process_time AS text), poller_instance, CAST(ready_time AS text), group_key,
    CAST(expire_time AS text), lease_seconds, lost_leases;

-- Statements.checkout_single_writer (without some payload types)
UPDATE "dbtaskqueue_task"
SET status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time =
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    next_process_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds',
    max(coalesce(lease_seconds, %(lease)s), %(min_lease)s))), poller_instance = %(poller_instance)s,
    lost_leases = CASE WHEN status = 'PROCESSING' THEN min(abs(lost_leases) + 1, 1000) ELSE -abs(lost_leases)
    END
WHERE id IN (
    SELECT id
    FROM "dbtaskqueue_task"
    WHERE queue_name = %(queue_name)s
    AND ready_time IS NOT NULL
    AND ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
    AND next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
    AND attempt < max_attempts
    AND (tag IS NULL OR tag IN (
        SELECT value
        FROM json_each(%(tags)s)
    ))
    AND NOT coalesce(payload_type, '') IN (
        SELECT value
        FROM json_each(%(without)s)
    )
    AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = %(queue_name)s
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))
    )
    AND status IN ('CREATED', 'PROCESSING')
    ORDER BY priority, ready_time, id
    LIMIT %(limit)s
)
RETURNING id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, CAST(payload AS text), CAST(context AS text), CAST(create_time AS text), CAST(start_time AS
    text), CAST(next_process_time AS text), poller_instance, CAST(ready_time AS text), group_key,
    CAST(expire_time AS text), lease_seconds, lost_leases;

-- Statements.checkout_single_writer (aged) (without some payload types)
UPDATE "dbtaskqueue_task"
SET status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time =
    strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'), last_update_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'),
    next_process_time = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds',
    max(coalesce(lease_seconds, %(lease)s), %(min_lease)s))), poller_instance = %(poller_instance)s,
    lost_leases = CASE WHEN status = 'PROCESSING' THEN min(abs(lost_leases) + 1, 1000) ELSE -abs(lost_leases)
    END
WHERE id IN (
    SELECT id
    FROM "dbtaskqueue_task"
    WHERE queue_name = %(queue_name)s
    AND ready_time IS NOT NULL
    AND ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
    AND next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
    AND attempt < max_attempts
    AND (tag IS NULL OR tag IN (
        SELECT value
        FROM json_each(%(tags)s)
    ))
    AND NOT coalesce(payload_type, '') IN (
        SELECT value
        FROM json_each(%(without)s)
    )
    AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = %(queue_name)s
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))
    )
    AND status IN ('CREATED', 'PROCESSING')
    ORDER BY priority NOT IN (
        SELECT value
        FROM json_each(%(aged)s)
    ), priority, ready_time, id
    LIMIT %(limit)s
)
RETURNING id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, CAST(payload AS text), CAST(context AS text), CAST(create_time AS text), CAST(start_time AS
    text), CAST(next_process_time AS text), poller_instance, CAST(ready_time AS text), group_key,
    CAST(expire_time AS text), lease_seconds, lost_leases;

-- Statements.first_ready (without some payload types)
SELECT id, total_attempt
FROM "dbtaskqueue_task"
WHERE queue_name = %(queue_name)s
AND ready_time IS NOT NULL
AND ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
AND attempt < max_attempts
AND (tag IS NULL OR tag IN (
    SELECT value
    FROM json_each(%(tags)s)
))
AND NOT coalesce(payload_type, '') IN (
    SELECT value
    FROM json_each(%(without)s)
)
AND NOT EXISTS (
    SELECT 1
    FROM "dbtaskqueue_queue" AS q
    WHERE q.name = %(queue_name)s
    AND q.paused_time IS NOT NULL
    AND (q.paused_until IS NULL OR q.paused_until > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))
)
ORDER BY priority, ready_time, id
LIMIT %(limit)s;

-- Statements.first_ready_of_group (without some payload types)
WITH ready AS MATERIALIZED (
    SELECT id, total_attempt, priority, ready_time
    FROM "dbtaskqueue_task" AS t
    WHERE queue_name = %(queue_name)s
    AND group_key = %(group)s
    AND coalesce(t.parked_by, t.final_status) IS NULL
    AND ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
    AND next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')
    AND attempt < max_attempts
    AND (tag IS NULL OR tag IN (
        SELECT value
        FROM json_each(%(tags)s)
    ))
    AND NOT coalesce(payload_type, '') IN (
        SELECT value
        FROM json_each(%(without)s)
    )
    AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = %(queue_name)s
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))
    )
)
SELECT id, total_attempt
FROM ready
ORDER BY priority, ready_time, id
LIMIT %(limit)s;

-- Statements.soon (without some payload types)
SELECT 1
FROM "dbtaskqueue_task"
WHERE queue_name = %(queue_name)s
AND ready_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f seconds', %(horizon)s))
AND (status = 'PROCESSING' OR next_process_time <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%.3f
    seconds', %(horizon)s)) AND attempt < max_attempts)
AND (tag IS NULL OR tag IN (
    SELECT value
    FROM json_each(%(tags)s)
))
AND NOT coalesce(payload_type, '') IN (
    SELECT value
    FROM json_each(%(without)s)
)
AND NOT EXISTS (
    SELECT 1
    FROM "dbtaskqueue_queue" AS q
    WHERE q.name = %(queue_name)s
    AND q.paused_time IS NOT NULL
    AND (q.paused_until IS NULL OR q.paused_until > strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'))
)
ORDER BY priority, ready_time, id
LIMIT 1;

-- ArchiveStatements.frozen (history)
SELECT min(x.id), max(x.id), count(*)
FROM (
    SELECT id
    FROM "dbtaskqueue_taskhistory"
    WHERE id > %(after)s
    AND status IN ('COMPLETED', 'ERROR', 'POISON')
    AND status IN (
        SELECT value
        FROM json_each(%(statuses)s)
    )
    AND coalesce(finish_time, last_update_time) < %(cutoff)s
    AND (%(every)s OR queue_name IN (
        SELECT value
        FROM json_each(%(queues)s)
    ))
    ORDER BY id
    LIMIT %(limit)s
) AS x;

-- ArchiveStatements.note_locked (history)
SELECT 1;

-- ArchiveStatements.remove_locked (history)
DELETE
FROM "dbtaskqueue_taskhistory"
WHERE id IN (
    SELECT row_id
    FROM archived_gone
);

-- pipeline.OPEN_BATCHES
SELECT token, location, lake
FROM "dbtaskqueue_archivebatch"
WHERE state = 'open'
ORDER BY id;

-- pipeline.CREATE_BATCH
INSERT INTO "dbtaskqueue_archivebatch" (token, location, source, lake, first_id, last_id, cutoff, statuses,
    queues)
VALUES (%(token)s, %(location)s, %(source)s, %(lake)s, %(first_id)s, %(last_id)s, %(cutoff)s, %(statuses)s,
    %(queues)s);
