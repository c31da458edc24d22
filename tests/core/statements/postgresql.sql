-- Made by `python -m tests.core.statements --write`; do not edit. %(name)s is a parameter, %% is %.

-- Statements.ages
SELECT b.p, extract(epoch FROM statement_timestamp() - x.ready_time)::float8
FROM unnest(%(priorities)s::smallint[], %(times)s::timestamptz[], %(ids)s::bigint[]) AS b(p, bound_time,
    bound_id)
CROSS JOIN LATERAL (
    SELECT ready_time
    FROM "dbtaskqueue_task"
    WHERE queue_name = %(queue_name)s
    AND priority = b.p
    AND (ready_time, id) > (b.bound_time, b.bound_id)
    AND ready_time <= statement_timestamp()
    AND next_process_time <= statement_timestamp()
    AND attempt < max_attempts
    AND (tag IS NULL OR tag = ANY(%(tags)s::text[]))
    AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = %(queue_name)s
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
    )
    ORDER BY ready_time, id
    LIMIT 1
) AS x;

-- Statements.all_running
SELECT id, total_attempt
FROM "dbtaskqueue_task"
WHERE queue_name = %(queue_name)s
AND ready_time <= statement_timestamp()
AND status IN ('PROCESSING');

-- Statements.ask_again
UPDATE "dbtaskqueue_task"
SET watched = true
WHERE id IN (
    SELECT unnest(%(ids)s::bigint[])
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
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(task_id bigint, token bigint, error_type text, message
            text, traceback text, failure_key text)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.status IN ('PROCESSING')
FOR NO KEY UPDATE OF t;

-- Statements.cancel_held
UPDATE "dbtaskqueue_task" AS t
SET status = 'POISON', final_status = 'POISON', parked_by = NULL, finish_time = statement_timestamp(),
    last_update_time = statement_timestamp(), process_result = u.reason_text
FROM (
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(child bigint, reason_text text)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
) AS u
WHERE t.id = u.child
AND t.parked_by = 'parents'
AND t.status IN ('CREATED', 'PROCESSING')
RETURNING id, queue_name, watched;

-- Statements.candidates
SELECT x.*
FROM unnest(%(priorities)s::smallint[], %(times)s::timestamptz[], %(ids)s::bigint[]) AS b(p, bound_time,
    bound_id)
CROSS JOIN LATERAL (
    SELECT id, total_attempt, priority, ready_time
    FROM "dbtaskqueue_task"
    WHERE queue_name = %(queue_name)s
    AND priority = b.p
    AND (ready_time, id) > (b.bound_time, b.bound_id)
    AND ready_time <= statement_timestamp()
    AND next_process_time <= statement_timestamp()
    AND attempt < max_attempts
    AND (tag IS NULL OR tag = ANY(%(tags)s::text[]))
    AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = %(queue_name)s
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
    )
    ORDER BY ready_time, id
    LIMIT %(limit)s
) AS x
LIMIT %(limit)s;

-- Statements.charge_groups
UPDATE "dbtaskqueue_limit" AS l
SET tokens = l.tokens - u.taken, full_time = statement_timestamp() + (%(burst)s - l.tokens + u.taken) /
    %(rate)s * interval '1 second'
FROM (
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(group_name text, taken float8)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
) AS u
WHERE l.queue_name = %(queue_name)s
AND l.group_key = u.group_name;

-- Statements.checkout_beside_others
WITH b AS MATERIALIZED (
    SELECT DISTINCT
    ON (p) p, bound_time, bound_id
    FROM (
        SELECT b.*
        FROM unnest(%(priorities)s::smallint[], %(times)s::timestamptz[], %(ids)s::bigint[]) AS b(p,
            bound_time, bound_id)
        UNION ALL
        SELECT taken_priority, taken_time, taken_id
        FROM "dbtaskqueue_poller"
        WHERE taken_queue = %(queue_name)s
        AND taken_time <= statement_timestamp()
    ) AS m
    WHERE p = ANY(%(priorities)s::smallint[])
    ORDER BY p, bound_time DESC, bound_id DESC
), found AS MATERIALIZED (
    SELECT x.*
    FROM b
    CROSS JOIN LATERAL (
        SELECT ctid, priority, ready_time, id
        FROM "dbtaskqueue_task"
        WHERE queue_name = %(queue_name)s
        AND priority = b.p
        AND (ready_time, id) > (b.bound_time, b.bound_id)
        AND ready_time <= statement_timestamp()
        AND next_process_time <= statement_timestamp()
        AND attempt < max_attempts
        AND (tag IS NULL OR tag = ANY(%(tags)s::text[]))
        AND NOT EXISTS (
            SELECT 1
            FROM "dbtaskqueue_queue" AS q
            WHERE q.name = %(queue_name)s
            AND q.paused_time IS NOT NULL
            AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
        )
        AND age(xmax) > (
            SELECT age(pg_snapshot_xmin(pg_current_snapshot())::xid)
        )
        ORDER BY ready_time, id
        LIMIT %(limit)s
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS x
    LIMIT %(limit)s
), told AS (
    UPDATE "dbtaskqueue_poller"
    SET taken_queue = %(queue_name)s, (taken_priority, taken_time, taken_id) = (
        SELECT priority, ready_time, id
        FROM found
        ORDER BY priority DESC, ready_time DESC, id DESC
        LIMIT 1
    )
    WHERE instance IN (
        SELECT p.instance
        FROM "dbtaskqueue_poller" AS p
        WHERE p.instance = %(poller_instance)s
        AND EXISTS (
            SELECT
            FROM found
        )
        FOR NO KEY UPDATE OF p SKIP LOCKED
    )
) UPDATE "dbtaskqueue_task"
SET status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time =
    statement_timestamp(), last_update_time = statement_timestamp(), next_process_time = statement_timestamp()
    + greatest(coalesce(lease_seconds, %(lease)s), %(min_lease)s) * interval '1 second', poller_instance =
    %(poller_instance)s, lost_leases = CASE WHEN status = 'PROCESSING' THEN least(abs(lost_leases) + 1, 1000)
    ELSE -abs(lost_leases) END
WHERE ctid = ANY(ARRAY(
    SELECT ctid
    FROM found
))
RETURNING id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, payload::text, context::text, create_time::text, start_time::text, next_process_time::text,
    poller_instance, ready_time::text, group_key, expire_time::text, lease_seconds, lost_leases;

-- Statements.checkout_expired
UPDATE "dbtaskqueue_task"
SET status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time =
    statement_timestamp(), last_update_time = statement_timestamp(), next_process_time = statement_timestamp()
    + greatest(coalesce(lease_seconds, %(lease)s), %(min_lease)s) * interval '1 second', poller_instance =
    %(poller_instance)s, lost_leases = CASE WHEN status = 'PROCESSING' THEN least(abs(lost_leases) + 1, 1000)
    ELSE -abs(lost_leases) END, ready_time = coalesce(ready_time, next_process_time), parked_by = NULL
WHERE id = ANY(ARRAY(
    SELECT t.id
    FROM "dbtaskqueue_task" AS t
    WHERE t.id IN (
        SELECT unnest(%(ids)s::bigint[])
    )
    AND t.status = 'CREATED'
    AND t.expire_time <= statement_timestamp()
    AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
    FOR NO KEY UPDATE OF t SKIP LOCKED
))
RETURNING id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, payload::text, context::text, create_time::text, start_time::text, next_process_time::text,
    poller_instance, ready_time::text, group_key, expire_time::text, lease_seconds, lost_leases;

-- Statements.checkout_of_many
UPDATE "dbtaskqueue_task"
SET status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time =
    statement_timestamp(), last_update_time = statement_timestamp(), next_process_time = statement_timestamp()
    + greatest(coalesce(lease_seconds, %(lease)s), %(min_lease)s) * interval '1 second', poller_instance =
    %(poller_instance)s, lost_leases = CASE WHEN status = 'PROCESSING' THEN least(abs(lost_leases) + 1, 1000)
    ELSE -abs(lost_leases) END
WHERE ctid = ANY(ARRAY(
    SELECT y.*
    FROM unnest(%(queues)s::text[], %(limits)s::int[], %(firsts)s::int[], %(lasts)s::int[]) AS l(q, max_tasks,
        b1, b2)
    CROSS JOIN LATERAL (
        SELECT x.*
        FROM unnest((%(priorities)s::smallint[])[l.b1:l.b2], (%(times)s::timestamptz[])[l.b1:l.b2],
            (%(ids)s::bigint[])[l.b1:l.b2]) AS b(p, bound_time, bound_id)
        CROSS JOIN LATERAL (
            SELECT ctid
            FROM "dbtaskqueue_task"
            WHERE queue_name = l.q
            AND priority = b.p
            AND (ready_time, id) > (b.bound_time, b.bound_id)
            AND ready_time <= statement_timestamp()
            AND next_process_time <= statement_timestamp()
            AND attempt < max_attempts
            AND (tag IS NULL OR tag = ANY(%(tags)s::text[]))
            ORDER BY ready_time, id
            LIMIT l.max_tasks
            FOR NO KEY UPDATE SKIP LOCKED
        ) AS x
        LIMIT l.max_tasks
    ) AS y
    WHERE l.q <> ALL(ARRAY(
        SELECT q.name
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = ANY(%(queues)s)
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
    ))
    LIMIT %(limit)s
))
RETURNING id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, payload::text, context::text, create_time::text, start_time::text, next_process_time::text,
    poller_instance, ready_time::text, group_key, expire_time::text, lease_seconds, lost_leases;

-- Statements.checkout_optimistic
UPDATE "dbtaskqueue_task"
SET status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time =
    statement_timestamp(), last_update_time = statement_timestamp(), next_process_time = statement_timestamp()
    + greatest(coalesce(lease_seconds, %(lease)s), %(min_lease)s) * interval '1 second', poller_instance =
    %(poller_instance)s, lost_leases = CASE WHEN status = 'PROCESSING' THEN least(abs(lost_leases) + 1, 1000)
    ELSE -abs(lost_leases) END
WHERE id = ANY(ARRAY(
    SELECT t.id
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT *
        FROM (
            SELECT *
            FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(task_id bigint, token bigint)
            LIMIT (
                SELECT 1000000
            )
        ) AS u
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('CREATED', 'PROCESSING')
    AND (ready_time <= statement_timestamp() AND next_process_time <= statement_timestamp() AND attempt <
        max_attempts AND (tag IS NULL OR tag = ANY(%(tags)s::text[])) AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = %(queue_name)s
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
    )) IS TRUE
    FOR NO KEY UPDATE OF t SKIP LOCKED
))
RETURNING id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, payload::text, context::text, create_time::text, start_time::text, next_process_time::text,
    poller_instance, ready_time::text, group_key, expire_time::text, lease_seconds, lost_leases;

-- Statements.checkout_skip_locked
UPDATE "dbtaskqueue_task"
SET status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time =
    statement_timestamp(), last_update_time = statement_timestamp(), next_process_time = statement_timestamp()
    + greatest(coalesce(lease_seconds, %(lease)s), %(min_lease)s) * interval '1 second', poller_instance =
    %(poller_instance)s, lost_leases = CASE WHEN status = 'PROCESSING' THEN least(abs(lost_leases) + 1, 1000)
    ELSE -abs(lost_leases) END
WHERE ctid = ANY(ARRAY(
    SELECT x.*
    FROM unnest(%(priorities)s::smallint[], %(times)s::timestamptz[], %(ids)s::bigint[]) AS b(p, bound_time,
        bound_id)
    CROSS JOIN LATERAL (
        SELECT ctid
        FROM "dbtaskqueue_task"
        WHERE queue_name = %(queue_name)s
        AND priority = b.p
        AND (ready_time, id) > (b.bound_time, b.bound_id)
        AND ready_time <= statement_timestamp()
        AND next_process_time <= statement_timestamp()
        AND attempt < max_attempts
        AND (tag IS NULL OR tag = ANY(%(tags)s::text[]))
        AND NOT EXISTS (
            SELECT 1
            FROM "dbtaskqueue_queue" AS q
            WHERE q.name = %(queue_name)s
            AND q.paused_time IS NOT NULL
            AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
        )
        ORDER BY ready_time, id
        LIMIT %(limit)s
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS x
    LIMIT %(limit)s
))
RETURNING id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, payload::text, context::text, create_time::text, start_time::text, next_process_time::text,
    poller_instance, ready_time::text, group_key, expire_time::text, lease_seconds, lost_leases;

-- Statements.claim_periods
INSERT INTO "dbtaskqueue_usedreference" AS l (queue_name, reference_number, expire_time)
SELECT %(queue_name)s, u.reference_number, statement_timestamp() + %(period)s * interval '1 second'
FROM (
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(reference_number text)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
) AS u
WHERE true
ORDER BY u.reference_number COLLATE "C"
ON CONFLICT (queue_name, reference_number) DO UPDATE
SET expire_time = excluded.expire_time, create_time = statement_timestamp()
WHERE l.create_time <= statement_timestamp() + %(ago)s * interval '1 second'
RETURNING reference_number;

-- Statements.claim_references
INSERT INTO "dbtaskqueue_usedreference" (queue_name, reference_number)
SELECT %(queue_name)s, u.reference_number
FROM (
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(reference_number text)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
) AS u
WHERE true
ORDER BY u.reference_number COLLATE "C"
ON CONFLICT (queue_name, reference_number) DO NOTHING
RETURNING reference_number;

-- Statements.complete
UPDATE "dbtaskqueue_task" AS t
SET status = 'COMPLETED', final_status = 'COMPLETED', ready_time = NULL, finish_time = statement_timestamp(),
    last_update_time = statement_timestamp(), process_result = NULL, result = u.result_json::jsonb
FROM (
    SELECT *
    FROM unnest((
        SELECT %(task_id)s::bigint[]
    ), (
        SELECT %(token)s::bigint[]
    ), (
        SELECT %(result_json)s::text[]
    )) AS u(task_id, token, result_json)
    LIMIT (
        SELECT 1000000
    )
) AS u
WHERE t.id = u.task_id
AND t.total_attempt = u.token
AND t.status IN ('PROCESSING')
RETURNING id, watched;

-- Statements.complete_plain
UPDATE "dbtaskqueue_task" AS t
SET status = 'COMPLETED', final_status = 'COMPLETED', ready_time = NULL, finish_time = statement_timestamp(),
    last_update_time = statement_timestamp(), process_result = NULL, result = NULL
FROM (
    SELECT *
    FROM unnest((
        SELECT %(task_id)s::bigint[]
    ), (
        SELECT %(token)s::bigint[]
    )) AS u(task_id, token)
    LIMIT (
        SELECT 1000000
    )
) AS u
WHERE t.id = u.task_id
AND t.total_attempt = u.token
AND t.status IN ('PROCESSING')
RETURNING id, watched;

-- Statements.copy_uniform
COPY "dbtaskqueue_task" (queue_name, payload, reference_number, id)
FROM STDIN;

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
    SELECT unnest(%(ids)s::bigint[])
)
GROUP BY t.queue_name;

-- Statements.count_deleted
INSERT INTO "dbtaskqueue_minutecount" (kind, queue_name, count)
SELECT 'deletion', x.q, count(*)
FROM (
    SELECT t.queue_name AS q
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT *
        FROM (
            SELECT *
            FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(task_id bigint, token bigint)
            LIMIT (
                SELECT 1000000
            )
        ) AS u
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('PROCESSING')
    FOR NO KEY UPDATE OF t
) AS x
GROUP BY x.q;

-- Statements.count_down
UPDATE "dbtaskqueue_hold" AS t
SET remaining = t.remaining - u.number
FROM (
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(child bigint, number int)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
) AS u
WHERE t.location = %(location)s
AND t.task_id = u.child
RETURNING task_id, remaining;

-- Statements.count_in_limit
UPDATE "dbtaskqueue_limit" AS l
SET tokens = least(%(burst)s, l.tokens + greatest(extract(epoch FROM statement_timestamp() -
    l.check_time)::float8, 0.0) * %(rate)s) - %(taken)s, check_time = greatest(l.check_time,
    statement_timestamp()), idle_seconds = extract(epoch FROM statement_timestamp() - l.check_time)::float8,
    leases = %(leases)s, stamp = %(stamp)s
WHERE queue_name = %(queue_name)s
AND group_key = ''
AND stamp = %(known)s
AND extract(epoch FROM statement_timestamp() - l.check_time)::float8 <= %(watched)s
AND (%(rate)s = 0 OR least(%(burst)s, l.tokens + greatest(extract(epoch FROM statement_timestamp() -
    l.check_time)::float8, 0.0) * %(rate)s) >= %(taken)s)
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
    SELECT unnest(%(ids)s::bigint[])
)
RETURNING queue_name, batch, status;

-- Statements.delete_counted
WITH gone AS (
    DELETE
    FROM "dbtaskqueue_task"
    WHERE id = ANY(ARRAY(
        SELECT t.id
        FROM "dbtaskqueue_task" AS t
        JOIN (
            SELECT *
            FROM (
                SELECT *
                FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(task_id bigint, token bigint)
                LIMIT (
                    SELECT 1000000
                )
            ) AS u
            LIMIT (
                SELECT 1000000
            )
        ) AS u
        ON t.id = u.task_id
        AND t.total_attempt = u.token
        WHERE t.status IN ('PROCESSING')
        FOR NO KEY UPDATE OF t
    ))
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
    SELECT unnest(%(ids)s::bigint[])
)
GROUP BY queue_name;

-- Statements.delete_history [2]
DELETE
FROM {table}
WHERE id IN (
    SELECT unnest(%(ids)s::bigint[])
)
RETURNING id;

-- Statements.delete_settled
DELETE
FROM "dbtaskqueue_task"
WHERE id = ANY(ARRAY(
    SELECT t.id
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT *
        FROM (
            SELECT *
            FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(task_id bigint, token bigint)
            LIMIT (
                SELECT 1000000
            )
        ) AS u
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('PROCESSING')
))
RETURNING id, watched;

-- Statements.drop_edges
DELETE
FROM "dbtaskqueue_dependency"
WHERE child_location = %(location)s
AND child_id IN (
    SELECT unnest(%(ids)s::bigint[])
);

-- Statements.drop_holds
DELETE
FROM "dbtaskqueue_hold"
WHERE location = %(location)s
AND task_id IN (
    SELECT unnest(%(ids)s::bigint[])
);

-- Statements.edge_range
SELECT min(id), max(id)
FROM "dbtaskqueue_dependency";

-- Statements.end_edges
UPDATE "dbtaskqueue_dependency"
SET outcome = %(status)s
WHERE id IN (
    SELECT unnest(%(ids)s::bigint[])
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
    payload_type, payload::text, context::text, create_time::text, start_time::text, next_process_time::text,
    poller_instance, ready_time::text, group_key, expire_time::text, lease_seconds, lost_leases
FROM "dbtaskqueue_task" AS t
WHERE t.queue_name = %(queue_name)s
AND t.ready_time <= statement_timestamp()
AND t.attempt >= t.max_attempts
AND t.status IN ('PROCESSING')
AND t.next_process_time <= statement_timestamp()
ORDER BY t.priority, t.ready_time, t.id
LIMIT %(limit)s
FOR NO KEY UPDATE OF t SKIP LOCKED;

-- Statements.expired
SELECT id
FROM "dbtaskqueue_task"
WHERE queue_name = %(queue_name)s
AND status = 'CREATED'
AND expire_time <= statement_timestamp()
AND ready_time IS NOT NULL
UNION ALL
SELECT id
FROM "dbtaskqueue_task"
WHERE queue_name = %(queue_name)s
AND status = 'CREATED'
AND expire_time <= statement_timestamp()
AND parked_by IS NOT NULL
LIMIT %(limit)s;

-- Statements.find
SELECT id, reference_number, status, group_key
FROM "dbtaskqueue_task" AS t
WHERE queue_name = %(queue_name)s
AND reference_number = ANY(%(references)s::text[]);

-- Statements.finished
SELECT id, extract(epoch FROM statement_timestamp() - coalesce(finish_time, last_update_time))::float8,
    extract(epoch FROM statement_timestamp() - create_time)::float8
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
AND ready_time <= statement_timestamp()
AND next_process_time <= statement_timestamp()
AND attempt < max_attempts
AND (tag IS NULL OR tag = ANY(%(tags)s::text[]))
AND NOT EXISTS (
    SELECT 1
    FROM "dbtaskqueue_queue" AS q
    WHERE q.name = %(queue_name)s
    AND q.paused_time IS NOT NULL
    AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
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
    AND ready_time <= statement_timestamp()
    AND next_process_time <= statement_timestamp()
    AND attempt < max_attempts
    AND (tag IS NULL OR tag = ANY(%(tags)s::text[]))
    AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = %(queue_name)s
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
    )
)
SELECT id, total_attempt
FROM ready
ORDER BY priority, ready_time, id
LIMIT %(limit)s;

-- Statements.free
UPDATE "dbtaskqueue_task"
SET reference_number = reference_number || ':' || id
WHERE id = ANY(ARRAY(
    SELECT t.id
    FROM "dbtaskqueue_task" AS t
    WHERE t.queue_name = %(queue_name)s
    AND t.reference_number = ANY(%(references)s::text[])
    AND NOT CASE WHEN t.status = 'CREATED' AND (t.attempt > 0 OR t.reenqueue_attempt > 0 OR EXISTS (
        SELECT 1
        FROM "dbtaskqueue_step" AS step
        WHERE step.location = %(location)s
        AND step.task_id = t.id
        AND step.task_time = t.create_time
        AND step.kind <> 'sent'
    )) THEN 'PROCESSING' ELSE t.status END = ANY(%(keeping)s::text[])
    AND t.create_time <= statement_timestamp() + %(ago)s * interval '1 second'
    ORDER BY t.reference_number COLLATE "C"
    FOR NO KEY UPDATE OF t
))
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
SELECT x.id, count(*), extract(epoch FROM max(t.ready_time) - statement_timestamp())::float8
FROM (
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(task_id bigint, token bigint)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
) AS u
JOIN "dbtaskqueue_task" AS x
ON x.id = u.task_id
JOIN "dbtaskqueue_task" AS t
ON t.queue_name = x.queue_name
AND t.group_key = x.group_key
AND coalesce(t.parked_by, t.final_status) IS NULL
AND t.next_process_time <= statement_timestamp()
AND t.priority = x.priority
AND t.id < x.id
AND t.ready_time > x.ready_time
GROUP BY x.id;

-- Statements.held_leases
SELECT id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, payload::text, context::text, create_time::text, start_time::text, next_process_time::text,
    poller_instance, ready_time::text, group_key, expire_time::text, lease_seconds, lost_leases, extract(epoch
    FROM next_process_time - statement_timestamp())::float8
FROM "dbtaskqueue_task" AS t
JOIN (
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(task_id bigint, token bigint)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.status IN ('PROCESSING');

-- Statements.hold_again
UPDATE "dbtaskqueue_task" AS t
SET status = 'CREATED', final_status = NULL, parked_by = 'parents', attempt = 0, finish_time = NULL,
    process_result = NULL, last_update_time = statement_timestamp(), poller_instance = NULL, next_process_time
    = statement_timestamp(), expire_time = expire_time + extract(epoch FROM statement_timestamp() -
    least(t.next_process_time, coalesce(t.ready_time, t.next_process_time)))::float8 * interval '1 second',
    watched = CASE WHEN watched IS NOT NULL THEN true END
WHERE id IN (
    SELECT unnest(%(ids)s::bigint[])
)
AND status IN ('POISON')
RETURNING id, queue_name;

-- Statements.in_period
SELECT reference_number
FROM "dbtaskqueue_usedreference"
WHERE queue_name = %(queue_name)s
AND reference_number = ANY(%(references)s::text[])
AND create_time > statement_timestamp() + %(ago)s * interval '1 second';

-- Statements.insert
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
VALUES (%(queue_name)s, %(reference_number)s, %(max_attempts)s, %(priority)s, %(payload)s, %(payload_type)s,
    %(context)s, %(group_key)s, %(tag)s, %(lease_seconds)s, statement_timestamp(), statement_timestamp(),
    NULL, NULL)
RETURNING id, create_time;

-- Statements.insert (referenced)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
VALUES (%(queue_name)s, %(reference_number)s, %(max_attempts)s, %(priority)s, %(payload)s, %(payload_type)s,
    %(context)s, %(group_key)s, %(tag)s, %(lease_seconds)s, statement_timestamp(), statement_timestamp(),
    NULL, NULL)
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, create_time;

-- Statements.insert (timed)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
VALUES (%(queue_name)s, %(reference_number)s, %(max_attempts)s, %(priority)s, %(payload)s, %(payload_type)s,
    %(context)s, %(group_key)s, %(tag)s, %(lease_seconds)s, greatest(statement_timestamp(),
    coalesce(%(run_at)s::timestamptz, statement_timestamp())) + coalesce(%(delay)s, 0) * interval '1 second',
    greatest(statement_timestamp(), coalesce(%(run_at)s::timestamptz, statement_timestamp())) +
    coalesce(%(delay)s, 0) * interval '1 second', NULL, greatest(statement_timestamp(),
    coalesce(%(run_at)s::timestamptz, statement_timestamp())) + coalesce(%(delay)s, 0) * interval '1 second' +
    %(ttl)s * interval '1 second')
RETURNING id, create_time, next_process_time;

-- Statements.insert (timed, referenced)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
VALUES (%(queue_name)s, %(reference_number)s, %(max_attempts)s, %(priority)s, %(payload)s, %(payload_type)s,
    %(context)s, %(group_key)s, %(tag)s, %(lease_seconds)s, greatest(statement_timestamp(),
    coalesce(%(run_at)s::timestamptz, statement_timestamp())) + coalesce(%(delay)s, 0) * interval '1 second',
    greatest(statement_timestamp(), coalesce(%(run_at)s::timestamptz, statement_timestamp())) +
    coalesce(%(delay)s, 0) * interval '1 second', NULL, greatest(statement_timestamp(),
    coalesce(%(run_at)s::timestamptz, statement_timestamp())) + coalesce(%(delay)s, 0) * interval '1 second' +
    %(ttl)s * interval '1 second')
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, create_time, next_process_time;

-- Statements.insert (referenced, bare)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
VALUES (%(queue_name)s, %(reference_number)s, %(max_attempts)s, %(priority)s, %(payload)s, NULL, NULL, NULL,
    NULL, NULL, statement_timestamp(), statement_timestamp(), NULL, NULL)
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, create_time;

-- Statements.insert_edges
INSERT INTO "dbtaskqueue_dependency" (parent_location, parent_id, child_location, child_id, name, outcome)
SELECT u.parent_location, u.parent_id, u.child_location, u.child_id, u.name, u.outcome
FROM (
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(parent_location text, parent_id bigint, child_location
            text, child_id bigint, name text, outcome text)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
) AS u;

-- Statements.insert_holds
INSERT INTO "dbtaskqueue_hold" (location, task_id, remaining, on_parent_failure)
SELECT u.location, u.task_id, u.remaining, u.on_parent_failure
FROM (
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(location text, task_id bigint, remaining int,
            on_parent_failure text)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
) AS u;

-- Statements.insert_many (error)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
        u.context, u.group_key, u.tag, u.lease_seconds, statement_timestamp(), statement_timestamp(), NULL,
        NULL
    FROM (
        SELECT nextval((
            SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
        )::regclass) AS id, u.*
        FROM (
            SELECT *
            FROM (
                SELECT *
                FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(reference_number text, max_attempts int,
                    priority smallint, payload jsonb, payload_type text, context jsonb, group_key text, tag
                    text, lease_seconds float8)
                LIMIT (
                    SELECT 1000000
                )
            ) AS u
            LIMIT (
                SELECT 1000000
            )
        ) AS u
    ) AS u
    ORDER BY u.reference_number COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO NOTHING
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_many (error, grouped)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
        u.context, u.group_key, u.tag, u.lease_seconds, statement_timestamp(), CASE WHEN u.enters THEN
        statement_timestamp() END, CASE WHEN NOT u.enters THEN 'group' END, NULL
    FROM (
        SELECT u.*, u.group_key IS NULL OR row_number() OVER (PARTITION BY u.group_key ORDER BY u.priority,
            u.id) <= %(number)s::int
        AND row_number() OVER (PARTITION BY u.group_key ORDER BY u.priority, u.id) + (
            SELECT count(*)
            FROM (
                SELECT 1
                FROM "dbtaskqueue_task" AS t
                WHERE t.queue_name = %(queue_name)s
                AND t.group_key = u.group_key
                AND coalesce(t.parked_by, t.final_status) IS NULL
                LIMIT %(number)s::int
            ) AS h
        ) <= %(number)s::int AS enters
        FROM (
            SELECT nextval((
                SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
            )::regclass) AS id, u.*
            FROM (
                SELECT *
                FROM (
                    SELECT *
                    FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(reference_number text, max_attempts int,
                        priority smallint, payload jsonb, payload_type text, context jsonb, group_key text,
                        tag text, lease_seconds float8)
                    LIMIT (
                        SELECT 1000000
                    )
                ) AS u
                LIMIT (
                    SELECT 1000000
                )
            ) AS u
        ) AS u
    ) AS u
    ORDER BY u.reference_number COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO NOTHING
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_many (error, timed)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
        u.context, u.group_key, u.tag, u.lease_seconds, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second',
        greatest(statement_timestamp(), coalesce(u.run_at::timestamptz, statement_timestamp())) +
        coalesce(u.delay, 0) * interval '1 second', NULL, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second' +
        u.ttl * interval '1 second'
    FROM (
        SELECT nextval((
            SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
        )::regclass) AS id, u.*
        FROM (
            SELECT *
            FROM (
                SELECT *
                FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(reference_number text, max_attempts int,
                    priority smallint, payload jsonb, payload_type text, context jsonb, group_key text, tag
                    text, lease_seconds float8, delay float8, run_at text, ttl float8)
                LIMIT (
                    SELECT 1000000
                )
            ) AS u
            LIMIT (
                SELECT 1000000
            )
        ) AS u
    ) AS u
    ORDER BY u.reference_number COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO NOTHING
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_many (error, timed, grouped)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
        u.context, u.group_key, u.tag, u.lease_seconds, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second',
        CASE WHEN u.group_key IS NULL THEN greatest(statement_timestamp(), coalesce(u.run_at::timestamptz,
        statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second' END, CASE WHEN NOT u.group_key IS
        NULL THEN 'group' END, greatest(statement_timestamp(), coalesce(u.run_at::timestamptz,
        statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second' + u.ttl * interval '1 second'
    FROM (
        SELECT nextval((
            SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
        )::regclass) AS id, u.*
        FROM (
            SELECT *
            FROM (
                SELECT *
                FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(reference_number text, max_attempts int,
                    priority smallint, payload jsonb, payload_type text, context jsonb, group_key text, tag
                    text, lease_seconds float8, delay float8, run_at text, ttl float8)
                LIMIT (
                    SELECT 1000000
                )
            ) AS u
            LIMIT (
                SELECT 1000000
            )
        ) AS u
    ) AS u
    ORDER BY u.reference_number COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO NOTHING
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_many (replace, timed)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
        u.context, u.group_key, u.tag, u.lease_seconds, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second',
        greatest(statement_timestamp(), coalesce(u.run_at::timestamptz, statement_timestamp())) +
        coalesce(u.delay, 0) * interval '1 second', NULL, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second' +
        u.ttl * interval '1 second'
    FROM (
        SELECT nextval((
            SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
        )::regclass) AS id, u.*
        FROM (
            SELECT *
            FROM (
                SELECT *
                FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(reference_number text, max_attempts int,
                    priority smallint, payload jsonb, payload_type text, context jsonb, group_key text, tag
                    text, lease_seconds float8, delay float8, run_at text, ttl float8)
                LIMIT (
                    SELECT 1000000
                )
            ) AS u
            LIMIT (
                SELECT 1000000
            )
        ) AS u
    ) AS u
    ORDER BY u.reference_number COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO UPDATE
    SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type,
        context = excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds,
        next_process_time = excluded.next_process_time, expire_time = excluded.expire_time, max_attempts =
        greatest(excluded.max_attempts, t.attempt + 1), ready_time = CASE WHEN t.parked_by = 'signal' THEN
        excluded.next_process_time ELSE CASE WHEN t.parked_by IS NULL THEN excluded.next_process_time END END,
        parked_by = nullif(t.parked_by, 'signal'), last_update_time = greatest(statement_timestamp(),
        t.create_time + 0.001 * interval '1 second')
    WHERE t.status IN ('CREATED')
    AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')
    AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_many (replace, timed, keep_due)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
        u.context, u.group_key, u.tag, u.lease_seconds, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second',
        greatest(statement_timestamp(), coalesce(u.run_at::timestamptz, statement_timestamp())) +
        coalesce(u.delay, 0) * interval '1 second', NULL, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second' +
        u.ttl * interval '1 second'
    FROM (
        SELECT nextval((
            SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
        )::regclass) AS id, u.*
        FROM (
            SELECT *
            FROM (
                SELECT *
                FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(reference_number text, max_attempts int,
                    priority smallint, payload jsonb, payload_type text, context jsonb, group_key text, tag
                    text, lease_seconds float8, delay float8, run_at text, ttl float8)
                LIMIT (
                    SELECT 1000000
                )
            ) AS u
            LIMIT (
                SELECT 1000000
            )
        ) AS u
    ) AS u
    ORDER BY u.reference_number COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO UPDATE
    SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type,
        context = excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds, max_attempts =
        greatest(excluded.max_attempts, t.attempt + 1), ready_time = CASE WHEN t.parked_by = 'signal' THEN
        excluded.next_process_time ELSE t.ready_time END, parked_by = nullif(t.parked_by, 'signal'),
        last_update_time = greatest(statement_timestamp(), t.create_time + 0.001 * interval '1 second')
    WHERE t.status IN ('CREATED')
    AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')
    AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_many (replace_running, timed)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
        u.context, u.group_key, u.tag, u.lease_seconds, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second',
        greatest(statement_timestamp(), coalesce(u.run_at::timestamptz, statement_timestamp())) +
        coalesce(u.delay, 0) * interval '1 second', NULL, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second' +
        u.ttl * interval '1 second'
    FROM (
        SELECT nextval((
            SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
        )::regclass) AS id, u.*
        FROM (
            SELECT *
            FROM (
                SELECT *
                FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(reference_number text, max_attempts int,
                    priority smallint, payload jsonb, payload_type text, context jsonb, group_key text, tag
                    text, lease_seconds float8, delay float8, run_at text, ttl float8)
                LIMIT (
                    SELECT 1000000
                )
            ) AS u
            LIMIT (
                SELECT 1000000
            )
        ) AS u
    ) AS u
    ORDER BY u.reference_number COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO UPDATE
    SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type,
        context = excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds,
        next_process_time = excluded.next_process_time, expire_time = excluded.expire_time, poller_instance =
        CASE WHEN t.status = 'PROCESSING' THEN NULL ELSE t.poller_instance END, start_time = CASE WHEN
        t.status = 'PROCESSING' THEN NULL ELSE t.start_time END, process_result = CASE WHEN t.status =
        'PROCESSING' THEN NULL ELSE t.process_result END, lost_leases = CASE WHEN t.status = 'PROCESSING' THEN
        0 ELSE t.lost_leases END, status = 'CREATED', attempt = CASE WHEN t.status = 'PROCESSING' THEN 0 ELSE
        t.attempt END, max_attempts = greatest(excluded.max_attempts, CASE WHEN t.status = 'PROCESSING' THEN 0
        ELSE t.attempt END + 1), ready_time = CASE WHEN t.parked_by = 'signal' THEN excluded.next_process_time
        ELSE CASE WHEN t.parked_by IS NULL THEN excluded.next_process_time END END, parked_by =
        nullif(t.parked_by, 'signal'), last_update_time = greatest(statement_timestamp(), t.create_time +
        0.001 * interval '1 second')
    WHERE t.status IN ('CREATED', 'PROCESSING')
    AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')
    AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_many (replace_running, timed, keep_due)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
        u.context, u.group_key, u.tag, u.lease_seconds, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second',
        greatest(statement_timestamp(), coalesce(u.run_at::timestamptz, statement_timestamp())) +
        coalesce(u.delay, 0) * interval '1 second', NULL, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second' +
        u.ttl * interval '1 second'
    FROM (
        SELECT nextval((
            SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
        )::regclass) AS id, u.*
        FROM (
            SELECT *
            FROM (
                SELECT *
                FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(reference_number text, max_attempts int,
                    priority smallint, payload jsonb, payload_type text, context jsonb, group_key text, tag
                    text, lease_seconds float8, delay float8, run_at text, ttl float8)
                LIMIT (
                    SELECT 1000000
                )
            ) AS u
            LIMIT (
                SELECT 1000000
            )
        ) AS u
    ) AS u
    ORDER BY u.reference_number COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO UPDATE
    SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type,
        context = excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds,
        poller_instance = CASE WHEN t.status = 'PROCESSING' THEN NULL ELSE t.poller_instance END, start_time =
        CASE WHEN t.status = 'PROCESSING' THEN NULL ELSE t.start_time END, process_result = CASE WHEN t.status
        = 'PROCESSING' THEN NULL ELSE t.process_result END, lost_leases = CASE WHEN t.status = 'PROCESSING'
        THEN 0 ELSE t.lost_leases END, status = 'CREATED', attempt = CASE WHEN t.status = 'PROCESSING' THEN 0
        ELSE t.attempt END, next_process_time = CASE WHEN t.status = 'PROCESSING' THEN t.ready_time ELSE
        t.next_process_time END, max_attempts = greatest(excluded.max_attempts, CASE WHEN t.status =
        'PROCESSING' THEN 0 ELSE t.attempt END + 1), ready_time = CASE WHEN t.parked_by = 'signal' THEN
        excluded.next_process_time ELSE t.ready_time END, parked_by = nullif(t.parked_by, 'signal'),
        last_update_time = greatest(statement_timestamp(), t.create_time + 0.001 * interval '1 second')
    WHERE t.status IN ('CREATED', 'PROCESSING')
    AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')
    AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_many (replace, timed, bounded)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
        u.context, u.group_key, u.tag, u.lease_seconds, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second',
        greatest(statement_timestamp(), coalesce(u.run_at::timestamptz, statement_timestamp())) +
        coalesce(u.delay, 0) * interval '1 second', NULL, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second' +
        u.ttl * interval '1 second'
    FROM (
        SELECT nextval((
            SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
        )::regclass) AS id, u.*
        FROM (
            SELECT *
            FROM (
                SELECT *
                FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(reference_number text, max_attempts int,
                    priority smallint, payload jsonb, payload_type text, context jsonb, group_key text, tag
                    text, lease_seconds float8, delay float8, run_at text, ttl float8)
                LIMIT (
                    SELECT 1000000
                )
            ) AS u
            LIMIT (
                SELECT 1000000
            )
        ) AS u
    ) AS u
    ORDER BY u.reference_number COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO UPDATE
    SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type,
        context = excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds,
        next_process_time = least(excluded.next_process_time, t.create_time + %(max_wait)s * interval '1
        second'), expire_time = least(excluded.next_process_time, t.create_time + %(max_wait)s * interval '1
        second') + extract(epoch FROM excluded.expire_time - excluded.next_process_time)::float8 * interval '1
        second', max_attempts = greatest(excluded.max_attempts, t.attempt + 1), ready_time = CASE WHEN
        t.parked_by = 'signal' THEN least(excluded.next_process_time, t.create_time + %(max_wait)s * interval
        '1 second') ELSE CASE WHEN t.parked_by IS NULL THEN least(excluded.next_process_time, t.create_time +
        %(max_wait)s * interval '1 second') END END, parked_by = nullif(t.parked_by, 'signal'),
        last_update_time = greatest(statement_timestamp(), t.create_time + 0.001 * interval '1 second')
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
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_many (error, whole)
INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
    u.context, u.group_key, u.tag, u.lease_seconds, statement_timestamp(), statement_timestamp(), NULL, NULL
FROM (
    SELECT nextval((
        SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
    )::regclass) AS id, u.*
    FROM (
        SELECT *
        FROM (
            SELECT *
            FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(reference_number text, max_attempts int, priority
                smallint, payload jsonb, payload_type text, context jsonb, group_key text, tag text,
                lease_seconds float8)
            LIMIT (
                SELECT 1000000
            )
        ) AS u
        LIMIT (
            SELECT 1000000
        )
    ) AS u
) AS u
ORDER BY u.reference_number COLLATE "C"
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, create_time, next_process_time, ready_time, attempt, reenqueue_attempt, total_attempt,
    last_update_time, reference_number, last_update_time = create_time AS is_new, total_attempt > 0 OR signals
    > 0 AS has_run;

-- Statements.insert_many (error, waits, whole)
INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
    u.context, u.group_key, u.tag, u.lease_seconds, statement_timestamp(), NULL, 'parents', NULL
FROM (
    SELECT nextval((
        SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
    )::regclass) AS id, u.*
    FROM (
        SELECT *
        FROM (
            SELECT *
            FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(reference_number text, max_attempts int, priority
                smallint, payload jsonb, payload_type text, context jsonb, group_key text, tag text,
                lease_seconds float8)
            LIMIT (
                SELECT 1000000
            )
        ) AS u
        LIMIT (
            SELECT 1000000
        )
    ) AS u
) AS u
ORDER BY u.reference_number COLLATE "C"
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, create_time, next_process_time, ready_time, attempt, reenqueue_attempt, total_attempt,
    last_update_time, reference_number, last_update_time = create_time AS is_new, total_attempt > 0 OR signals
    > 0 AS has_run;

-- Statements.insert_uniform (referenced)
INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, payload, max_attempts, priority,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT u.id, %(queue_name)s, u.r, nullif(u.p, 'null'), %(max_attempts)s::int, %(priority)s::smallint,
    %(payload_type)s::text, %(context)s::jsonb, %(group_key)s::text, %(tag)s::text, %(lease_seconds)s::float8,
    statement_timestamp(), statement_timestamp(), NULL, NULL
FROM (
    SELECT nextval((
        SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
    )::regclass) AS id, u.*
    FROM ROWS
    FROM (jsonb_array_elements_text(%(references)s::jsonb), jsonb_array_elements(%(payloads)s::jsonb)) AS u(r,
        p)
) AS u
ORDER BY u.r COLLATE "C"
ON CONFLICT (reference_number, queue_name) DO NOTHING;

-- Statements.insert_uniform (referenced, ids)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, payload, max_attempts, priority,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.r, nullif(u.p, 'null'), %(max_attempts)s::int, %(priority)s::smallint,
        %(payload_type)s::text, %(context)s::jsonb, %(group_key)s::text, %(tag)s::text,
        %(lease_seconds)s::float8, statement_timestamp(), statement_timestamp(), NULL, NULL
    FROM (
        SELECT nextval((
            SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
        )::regclass) AS id, u.*
        FROM ROWS
        FROM (jsonb_array_elements_text(%(references)s::jsonb), jsonb_array_elements(%(payloads)s::jsonb)) AS
            u(r, p)
    ) AS u
    ORDER BY u.r COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO NOTHING
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_uniform (referenced, ordered)
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, payload, max_attempts, priority,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.r, nullif(u.p, 'null'), %(max_attempts)s::int, %(priority)s::smallint,
    %(payload_type)s::text, %(context)s::jsonb, %(group_key)s::text, %(tag)s::text, %(lease_seconds)s::float8,
    statement_timestamp(), statement_timestamp(), NULL, NULL
FROM ROWS
FROM (jsonb_array_elements_text(%(references)s::jsonb), jsonb_array_elements(%(payloads)s::jsonb)) AS u(r, p)
ON CONFLICT (reference_number, queue_name) DO NOTHING;

-- Statements.insert_uniform (referenced, ordered, ids)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, payload, max_attempts, priority,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT %(queue_name)s, u.r, nullif(u.p, 'null'), %(max_attempts)s::int, %(priority)s::smallint,
        %(payload_type)s::text, %(context)s::jsonb, %(group_key)s::text, %(tag)s::text,
        %(lease_seconds)s::float8, statement_timestamp(), statement_timestamp(), NULL, NULL
    FROM ROWS
    FROM (jsonb_array_elements_text(%(references)s::jsonb), jsonb_array_elements(%(payloads)s::jsonb)) AS u(r,
        p)
    ON CONFLICT (reference_number, queue_name) DO NOTHING
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_uniform
INSERT INTO "dbtaskqueue_task" AS t (queue_name, reference_number, payload, max_attempts, priority,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT %(queue_name)s, u.r, nullif(u.p, 'null'), %(max_attempts)s::int, %(priority)s::smallint,
    %(payload_type)s::text, %(context)s::jsonb, %(group_key)s::text, %(tag)s::text, %(lease_seconds)s::float8,
    statement_timestamp(), statement_timestamp(), NULL, NULL
FROM ROWS
FROM (jsonb_array_elements_text(%(references)s::jsonb), jsonb_array_elements(%(payloads)s::jsonb)) AS u(r, p);

-- Statements.is_telling_dear
SELECT pg_stat_get_dead_tuples('"dbtaskqueue_poller"'::regclass) > 1000;

-- Statements.join_batch
UPDATE "dbtaskqueue_task"
SET batch = %(batch)s
WHERE id IN (
    SELECT unnest(%(ids)s::bigint[])
);

-- Statements.joining
SELECT id
FROM "dbtaskqueue_task"
WHERE id IN (
    SELECT unnest(%(ids)s::bigint[])
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
    SELECT unnest(%(ids)s::bigint[])
);

-- Statements.leased_to
SELECT id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, payload::text, context::text, create_time::text, start_time::text, next_process_time::text,
    poller_instance, ready_time::text, group_key, expire_time::text, lease_seconds, lost_leases
FROM "dbtaskqueue_task"
WHERE queue_name = %(queue_name)s
AND ready_time IS NOT NULL
AND status IN ('PROCESSING')
AND poller_instance = %(poller_instance)s;

-- Statements.let_go
UPDATE "dbtaskqueue_task"
SET parked_by = CASE WHEN group_key IS NOT NULL THEN 'group' END, last_update_time = statement_timestamp(),
    ready_time = CASE WHEN group_key IS NULL THEN greatest(statement_timestamp(), next_process_time) END
WHERE id IN (
    SELECT unnest(%(ids)s::bigint[])
)
AND parked_by = 'parents'
RETURNING id, queue_name, group_key;

-- Statements.limit_state
SELECT leases, tokens, extract(epoch FROM statement_timestamp() - check_time)::float8
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
    AND (expire_time IS NULL OR expire_time > statement_timestamp() OR status = 'PROCESSING')
    UNION ALL
    SELECT 1
    FROM "dbtaskqueue_task"
    WHERE queue_name = %(queue_name)s
    AND parked_by IS NOT NULL
    AND (expire_time IS NULL OR expire_time > statement_timestamp() OR status = 'PROCESSING')
    LIMIT %(limit)s
) AS x;

-- Statements.lock_ended
SELECT t.id, t.status
FROM "dbtaskqueue_task" AS t
WHERE t.id IN (
    SELECT unnest(%(ids)s::bigint[])
)
AND t.watched
AND t.final_status IS NOT NULL
ORDER BY t.id
FOR NO KEY UPDATE OF t;

-- Statements.lock_finished
SELECT t.id, t.watched
FROM "dbtaskqueue_task" AS t
WHERE t.id IN (
    SELECT unnest(%(ids)s::bigint[])
)
AND t.final_status = %(status)s
AND t.status IN ('COMPLETED', 'ERROR', 'POISON')
AND (t.watched IS NULL OR NOT t.watched)
ORDER BY t.id
FOR NO KEY UPDATE OF t SKIP LOCKED;

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
AND reference_number = ANY(%(references)s::text[])
ORDER BY reference_number COLLATE "C"
FOR SHARE OF t;

-- Statements.lock_group_limits
INSERT INTO "dbtaskqueue_limit" AS l (queue_name, group_key, tokens, check_time, full_time)
SELECT %(queue_name)s, g.g, %(burst)s, statement_timestamp(), statement_timestamp()
FROM unnest(%(groups)s::text[]) AS g(g)
WHERE true
ORDER BY g.g
ON CONFLICT (queue_name, group_key) DO UPDATE
SET tokens = least(%(burst)s, l.tokens + greatest(extract(epoch FROM statement_timestamp() -
    l.check_time)::float8, 0.0) * %(rate)s), check_time = greatest(l.check_time, statement_timestamp())
RETURNING group_key, tokens;

-- Statements.lock_groups
SELECT count(pg_advisory_xact_lock(hashtextextended(%(queue_name)s || ' ' || g, 0)))
FROM (
    SELECT g
    FROM unnest(%(groups)s::text[]) AS g
    ORDER BY g
) AS x;

-- Statements.lock_holds
SELECT t.task_id, t.on_parent_failure
FROM "dbtaskqueue_hold" AS t
WHERE t.location = %(location)s
AND t.task_id IN (
    SELECT unnest(%(ids)s::bigint[])
)
ORDER BY t.task_id
FOR NO KEY UPDATE OF t;

-- Statements.lock_limit
INSERT INTO "dbtaskqueue_limit" AS l (queue_name, tokens)
VALUES (%(queue_name)s, %(burst)s)
ON CONFLICT (queue_name, group_key) DO UPDATE
SET tokens = least(%(burst)s, l.tokens + greatest(extract(epoch FROM statement_timestamp() -
    l.check_time)::float8, 0.0) * %(rate)s), check_time = greatest(l.check_time, statement_timestamp()),
    idle_seconds = extract(epoch FROM statement_timestamp() - l.check_time)::float8
RETURNING stamp, CASE WHEN stamp <> %(stamp)s THEN leases END, tokens, idle_seconds;

-- Statements.lock_parents
SELECT id, status
FROM "dbtaskqueue_task" AS t
WHERE id IN (
    SELECT unnest(%(ids)s::bigint[])
)
AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
ORDER BY id
FOR NO KEY UPDATE OF t;

-- Statements.lock_reported
SELECT t.id
FROM "dbtaskqueue_task" AS t
WHERE NOT t.watched
AND t.final_status IN ('COMPLETED', 'ERROR', 'POISON')
ORDER BY t.id
FOR NO KEY UPDATE OF t SKIP LOCKED;

-- Statements.make_queue
INSERT INTO "dbtaskqueue_queue" (name)
VALUES (%(queue_name)s)
ON CONFLICT (name) DO NOTHING;

-- Statements.make_ready
UPDATE "dbtaskqueue_task"
SET parked_by = NULL, ready_time = greatest(statement_timestamp(), next_process_time)
WHERE id IN (
    SELECT unnest(%(ids)s::bigint[])
)
AND parked_by = 'group'
RETURNING id;

-- Statements.mark_reported
UPDATE "dbtaskqueue_task"
SET watched = CASE WHEN id IN (
    SELECT unnest(%(open)s::bigint[])
) THEN false END
WHERE id IN (
    SELECT unnest(%(ids)s::bigint[])
);

-- Statements.moved
SELECT h.task_id
FROM "dbtaskqueue_taskhistory" AS h
JOIN (
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(task_id bigint, token bigint)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
) AS u
ON h.task_id = u.task_id
AND h.total_attempt = u.token
WHERE h.location = %(location)s;

-- Statements.moved_statuses
SELECT task_id, status
FROM "dbtaskqueue_taskhistory"
WHERE location = %(location)s
AND task_id IN (
    SELECT unnest(%(ids)s::bigint[])
);

-- Statements.needed
SELECT DISTINCT d.parent_id
FROM "dbtaskqueue_dependency" AS d
JOIN "dbtaskqueue_hold" AS h
ON h.location = d.child_location
AND h.task_id = d.child_id
WHERE d.parent_location = %(location)s
AND d.parent_id IN (
    SELECT unnest(%(ids)s::bigint[])
)
AND d.outcome IS NULL;

-- Statements.next_due
SELECT x.queue_name, extract(epoch FROM min(x.ready_time) - statement_timestamp())::float8
FROM unnest(%(queues)s::text[], %(priorities)s::smallint[]) AS l(q, p)
CROSS JOIN LATERAL (
    SELECT queue_name, ready_time
    FROM "dbtaskqueue_task"
    WHERE queue_name = l.q
    AND priority = l.p
    AND ready_time > statement_timestamp()
    ORDER BY ready_time
    LIMIT 1
) AS x
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
    SELECT unnest(%(ids)s::bigint[])
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
        SELECT *
        FROM (
            SELECT *
            FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(task_id bigint, token bigint)
            LIMIT (
                SELECT 1000000
            )
        ) AS u
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('PROCESSING')
    FOR NO KEY UPDATE OF t
) AS x
WHERE true
AND batch IS NOT NULL
AND status <> 'COMPLETED'
GROUP BY batch, queue_name, status;

-- Statements.old_history
SELECT id
FROM {table} AS t
WHERE moved_time <= statement_timestamp() + %(age)s * interval '1 second'
ORDER BY id
LIMIT %(limit)s
FOR NO KEY UPDATE OF t SKIP LOCKED;

-- Statements.open_edges
SELECT t.id, t.parent_id, t.child_location, t.child_id
FROM "dbtaskqueue_dependency" AS t
WHERE t.parent_location = %(location)s
AND t.parent_id IN (
    SELECT unnest(%(ids)s::bigint[])
)
AND t.outcome IS NULL
ORDER BY t.id
FOR NO KEY UPDATE OF t;

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
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(task_id bigint, token bigint)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.start_time IS NOT NULL
AND (t.status NOT IN ('ERROR', 'POISON') OR t.poller_instance IS NOT NULL AND t.lost_leases <= 0);

-- Statements.park
UPDATE "dbtaskqueue_task"
SET parked_by = 'group', ready_time = NULL
WHERE id IN (
    SELECT unnest(%(ids)s::bigint[])
)
AND status = 'CREATED'
RETURNING id;

-- Statements.park_unleased
UPDATE "dbtaskqueue_task"
SET status = 'CREATED', parked_by = %(reason)s, ready_time = NULL, poller_instance = NULL, last_update_time =
    statement_timestamp()
WHERE id = %(task_id)s
AND total_attempt = %(token)s
AND ready_time IS NOT NULL
AND status IN ('CREATED', 'PROCESSING')
AND next_process_time <= statement_timestamp()
RETURNING id;

-- Statements.parked
SELECT 1
FROM "dbtaskqueue_task"
WHERE queue_name = %(queue_name)s
AND parked_by::text LIKE 'no handler%%'
ORDER BY payload_type
LIMIT 1;

-- Statements.place_heads
WITH g AS MATERIALIZED (
    SELECT g.g
    FROM unnest(%(groups)s::text[]) AS g(g)
    WHERE %(every)s OR EXISTS (
        SELECT 1
        FROM "dbtaskqueue_task" AS t
        WHERE t.queue_name = %(queue_name)s
        AND coalesce(t.parked_by, '') = 'group'
    )
    AND (
        SELECT 1
        FROM "dbtaskqueue_task" AS t
        WHERE t.queue_name = %(queue_name)s
        AND t.group_key = g.g
        AND coalesce(t.parked_by, '') = 'group'
        LIMIT 1
    ) = 1
), heads AS MATERIALIZED (
    SELECT g.g, t.id AS id, t.priority AS priority, CASE WHEN t.status = 'PROCESSING' THEN 0 WHEN %(hold)s AND
        t.attempt > 0 AND t.process_result IS NOT NULL AND t.result IS NULL THEN 1 ELSE 2 END AS kind,
        greatest(extract(epoch FROM t.next_process_time - statement_timestamp())::float8, 0) AS wait
    FROM g
    CROSS JOIN LATERAL (
        SELECT t.id, t.priority, t.status, t.attempt, t.result, t.process_result, t.next_process_time
        FROM "dbtaskqueue_task" AS t
        WHERE t.queue_name = %(queue_name)s
        AND t.group_key = g.g
        AND coalesce(t.parked_by, t.final_status) IS NULL OFFSET 0
    ) AS t
), room AS MATERIALIZED (
    SELECT g.g, %(number)s::int - count(*) FILTER (WHERE h.kind < 2) AS places, %(number)s::int - count(*)
        FILTER (WHERE h.kind < 2 OR h.wait = 0) AS free
    FROM g LEFT
    JOIN heads AS h
    ON h.g = g.g
    GROUP BY g.g
), due AS MATERIALIZED (
    SELECT g.g, g.free, f.*
    FROM room AS g
    CROSS JOIN LATERAL (
        SELECT t.id AS id, t.priority AS priority, greatest(extract(epoch FROM t.next_process_time -
            statement_timestamp())::float8, 0) AS wait
        FROM "dbtaskqueue_task" AS t
        WHERE t.queue_name = %(queue_name)s
        AND t.group_key = g.g
        AND coalesce(t.parked_by, '') = 'group'
        AND t.next_process_time <= statement_timestamp()
        ORDER BY t.priority, t.id
        LIMIT greatest(g.places, 0)
    ) AS f
), later AS (
    SELECT g.g, f.*
    FROM (
        SELECT r.g, r.free - count(d.g) AS free
        FROM room AS r LEFT
        JOIN due AS d
        ON d.g = r.g
        GROUP BY r.g, r.free
    ) AS g
    CROSS JOIN LATERAL (
        SELECT t.id AS id, t.priority AS priority, greatest(extract(epoch FROM t.next_process_time -
            statement_timestamp())::float8, 0) AS wait
        FROM "dbtaskqueue_task" AS t
        WHERE t.queue_name = %(queue_name)s
        AND t.group_key = g.g
        AND coalesce(t.parked_by, '') = 'group'
        AND t.next_process_time > statement_timestamp()
        ORDER BY t.next_process_time, t.priority, t.id
        LIMIT greatest(g.free, 0)
    ) AS f
), members AS (
    SELECT g, id, kind, true AS ready, wait, priority
    FROM heads
    UNION ALL
    SELECT g, id, 2, false, wait, priority
    FROM due
    UNION ALL
    SELECT g, id, 2, false, wait, priority
    FROM later
), placed AS (
    SELECT m.*, row_number() OVER (PARTITION BY m.g ORDER BY m.kind, m.wait, m.priority, m.id) <=
        %(number)s::int AS chosen
    FROM members AS m
), locked AS MATERIALIZED (
    SELECT t.id, t.status
    FROM "dbtaskqueue_task" AS t
    WHERE t.id = ANY(ARRAY(
        SELECT p.id
        FROM placed AS p
        WHERE p.ready
        AND p.kind > 0
        AND p.g = ANY(ARRAY(
            SELECT p.g
            FROM placed AS p
            WHERE p.ready
            AND NOT p.chosen
            AND p.kind > 0
        ))
    ))
    FOR NO KEY UPDATE
), ranked AS (
    SELECT m.*, row_number() OVER (PARTITION BY m.g ORDER BY m.id <> ALL(ARRAY(
        SELECT l.id
        FROM locked AS l
        WHERE l.status = 'PROCESSING'
    )), m.kind, m.wait, m.priority, m.id) <= %(number)s::int AS stays
    FROM placed AS m
) UPDATE "dbtaskqueue_task"
SET parked_by = CASE WHEN parked_by IS NULL THEN 'group' END, ready_time = CASE WHEN parked_by IS NOT NULL
    THEN greatest(statement_timestamp(), next_process_time) END
WHERE (parked_by = 'group' OR parked_by IS NULL AND status = 'CREATED')
AND id = ANY(ARRAY(
    SELECT r.id
    FROM ranked AS r
    WHERE r.stays <> r.ready
    AND r.kind > 0
))
RETURNING ready_time IS NOT NULL;

-- Statements.present
SELECT id
FROM "dbtaskqueue_task"
WHERE id IN (
    SELECT unnest(%(ids)s::bigint[])
);

-- Statements.priorities
WITH RECURSIVE s(v) AS ((
    SELECT priority
    FROM "dbtaskqueue_task"
    WHERE queue_name = %(queue_name)s
    AND ready_time IS NOT NULL
    ORDER BY priority
    LIMIT 1
) UNION ALL SELECT (
    SELECT priority
    FROM "dbtaskqueue_task"
    WHERE queue_name = %(queue_name)s
    AND ready_time IS NOT NULL
    AND priority > s.v
    ORDER BY priority
    LIMIT 1
) FROM s WHERE s.v IS NOT NULL)
SELECT v
FROM s
WHERE v IS NOT NULL;

-- Statements.priorities_of_many
SELECT l.q, x.*
FROM unnest(%(queues)s::text[]) AS l(q)
CROSS JOIN LATERAL (
    WITH RECURSIVE s(v) AS ((
        SELECT priority
        FROM "dbtaskqueue_task"
        WHERE queue_name = l.q
        AND ready_time IS NOT NULL
        ORDER BY priority
        LIMIT 1
    ) UNION ALL SELECT (
        SELECT priority
        FROM "dbtaskqueue_task"
        WHERE queue_name = l.q
        AND ready_time IS NOT NULL
        AND priority > s.v
        ORDER BY priority
        LIMIT 1
    ) FROM s WHERE s.v IS NOT NULL)
    SELECT v
    FROM s
    WHERE v IS NOT NULL
) AS x;

-- Statements.progress
UPDATE "dbtaskqueue_task"
SET process_result = %(note)s, last_update_time = statement_timestamp()
WHERE id = %(id)s
AND total_attempt = %(total_attempt)s
AND status IN ('PROCESSING')
RETURNING id;

-- Statements.put_off
UPDATE "dbtaskqueue_task" AS t
SET last_update_time = statement_timestamp(), next_process_time = statement_timestamp(), ready_time =
    statement_timestamp() + u.delay * interval '1 second', attempt = t.attempt - 1, status = CASE WHEN
    t.lost_leases > 0 THEN t.status ELSE 'CREATED' END, poller_instance = CASE WHEN t.lost_leases > 0 THEN
    t.poller_instance END, lost_leases = CASE WHEN t.lost_leases > 0 THEN t.lost_leases - 1 ELSE t.lost_leases
    END
FROM (
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(task_id bigint, token bigint, delay float8)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
) AS u
WHERE t.id = u.task_id
AND t.total_attempt = u.token
AND t.status IN ('PROCESSING')
RETURNING id;

-- Statements.receive_signal
DELETE
FROM "dbtaskqueue_step"
WHERE id = %(signal)s
RETURNING result::text, actor;

-- Statements.renew
UPDATE "dbtaskqueue_task"
SET next_process_time = statement_timestamp() + greatest(coalesce(lease_seconds, %(lease)s), %(min_lease)s) *
    interval '1 second'
WHERE id = ANY(ARRAY(
    SELECT t.id
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT *
        FROM (
            SELECT *
            FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(task_id bigint, token bigint)
            LIMIT (
                SELECT 1000000
            )
        ) AS u
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('PROCESSING')
    FOR NO KEY UPDATE OF t SKIP LOCKED
))
AND next_process_time > statement_timestamp() + %(since)s * interval '1 second'
RETURNING id;

-- Statements.reserve_ids
SELECT string_agg(nextval((
    SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
)::regclass)::text, ',')
FROM generate_series(1, %(number)s);

-- Statements.running_of
SELECT id, total_attempt, extract(epoch FROM next_process_time - statement_timestamp())::float8
FROM "dbtaskqueue_task"
WHERE id = ANY(%(ids)s::bigint[])
AND status IN ('PROCESSING');

-- Statements.save_metadata
UPDATE "dbtaskqueue_task"
SET payload = jsonb_set(payload, '{metadata}', %(metadata)s::jsonb)
WHERE id = %(task_id)s
AND (CAST(%(token)s AS bigint) IS NULL OR total_attempt = %(token)s AND status = 'PROCESSING')
RETURNING id;

-- Statements.seconds_until_exhausted
SELECT extract(epoch FROM min(t.next_process_time) - statement_timestamp())::float8
FROM "dbtaskqueue_task" AS t
WHERE t.queue_name = %(queue_name)s
AND t.ready_time <= statement_timestamp()
AND t.attempt >= t.max_attempts
AND t.status IN ('PROCESSING');

-- Statements.some_taken
SELECT EXISTS (
    SELECT 1
    FROM "dbtaskqueue_task"
    WHERE queue_name = %(queue_name)s
    AND reference_number = ANY(%(references)s::text[])
);

-- Statements.soon
SELECT 1
FROM "dbtaskqueue_task"
WHERE queue_name = %(queue_name)s
AND ready_time <= statement_timestamp() + %(horizon)s * interval '1 second'
AND (status = 'PROCESSING' OR next_process_time <= statement_timestamp() + %(horizon)s * interval '1 second'
    AND attempt < max_attempts)
AND (tag IS NULL OR tag = ANY(%(tags)s::text[]))
AND NOT EXISTS (
    SELECT 1
    FROM "dbtaskqueue_queue" AS q
    WHERE q.name = %(queue_name)s
    AND q.paused_time IS NOT NULL
    AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
)
ORDER BY priority, ready_time, id
LIMIT 1;

-- Statements.start_paused
INSERT INTO "dbtaskqueue_queue" (name, paused_time, paused_by, paused_reason)
VALUES (%(queue_name)s, statement_timestamp(), 'settings', 'starts paused')
ON CONFLICT (name) DO NOTHING;

-- Statements.steps
SELECT step.position, step.kind, step.name, step.result::text, extract(epoch FROM step.until_time -
    statement_timestamp())::float8, step.actor, step.task_time = t.create_time
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
SELECT %(location)s, t.id, t.create_time, %(name)s, %(data)s::jsonb, %(actor)s
FROM "dbtaskqueue_task" AS t
WHERE t.id = %(task_id)s;

-- Statements.store_step
INSERT INTO "dbtaskqueue_step" AS step (location, task_id, task_time, position, name, kind, result, actor,
    until_time)
SELECT %(location)s, t.id, t.create_time, %(position)s, %(name)s, %(kind)s, %(result)s::jsonb, %(actor)s,
    statement_timestamp() + CAST(%(seconds)s AS float8) * interval '1 second'
FROM "dbtaskqueue_task" AS t
WHERE t.id = %(task_id)s
AND t.total_attempt = %(token)s
AND t.status IN ('PROCESSING')
FOR NO KEY UPDATE OF t
ON CONFLICT (location, task_id, position) DO UPDATE
SET kind = excluded.kind, result = excluded.result, actor = excluded.actor, create_time =
    statement_timestamp()
WHERE step.kind = 'wait'
RETURNING 1;

-- Statements.store_step_atomic
INSERT INTO "dbtaskqueue_step" AS step (location, task_id, task_time, position, name, kind, result, actor,
    until_time)
SELECT %(location)s, t.id, t.create_time, %(position)s, %(name)s, %(kind)s, %(result)s::jsonb, %(actor)s,
    statement_timestamp() + CAST(%(seconds)s AS float8) * interval '1 second'
FROM "dbtaskqueue_task" AS t
WHERE t.id = %(task_id)s
AND t.total_attempt = %(token)s
AND t.status IN ('PROCESSING')
ON CONFLICT (location, task_id, position) DO UPDATE
SET kind = excluded.kind, result = excluded.result, actor = excluded.actor, create_time =
    statement_timestamp()
WHERE step.kind = 'wait'
RETURNING 1;

-- Statements.task_with_attempts
SELECT queue_name, reference_number, status, attempt, reenqueue_attempt, total_attempt, max_attempts,
    priority, payload::text, payload_type, result::text, process_result, context::text, group_key, tag,
    poller_instance, create_time, next_process_time, last_update_time, lease_seconds, expire_time, start_time,
    finish_time, (
    SELECT jsonb_agg(jsonb_build_array(a.error_type, a.traceback, a.poller_instance, a.start_time,
        a.total_attempt) ORDER BY a.total_attempt)::text
    FROM "dbtaskqueue_attempt" AS a
    WHERE a.location = %(location)s
    AND a.task_id = %(task_id)s
)
FROM "dbtaskqueue_task"
WHERE id = %(task_id)s
UNION ALL
SELECT queue_name, reference_number, status, attempt, reenqueue_attempt, total_attempt, max_attempts,
    priority, payload::text, payload_type, result::text, process_result, context::text, group_key, tag,
    poller_instance, create_time, next_process_time, last_update_time, lease_seconds, expire_time, start_time,
    finish_time, (
    SELECT jsonb_agg(jsonb_build_array(a.error_type, a.traceback, a.poller_instance, a.start_time,
        a.total_attempt) ORDER BY a.total_attempt)::text
    FROM "dbtaskqueue_attempt" AS a
    WHERE a.location = %(location)s
    AND a.task_id = %(task_id)s
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
    t.total_attempt, t.max_attempts, t.priority, t.payload, t.payload_type, u.result_json::jsonb, NULL,
    t.context, t.group_key, t.tag, t.poller_instance, t.create_time, t.next_process_time,
    statement_timestamp(), t.lease_seconds, t.expire_time, t.start_time, statement_timestamp()
FROM "dbtaskqueue_task" AS t
JOIN (
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(task_id bigint, token bigint, result_json text)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.status IN ('PROCESSING')
FOR NO KEY UPDATE OF t;

-- Statements.to_prepare
SELECT q.q, (
    SELECT 1
    FROM "dbtaskqueue_task" AS t
    WHERE queue_name = q.q
    AND parked_by::text LIKE 'no handler%%'
    LIMIT 1
) IS NOT NULL, (
    SELECT 1
    FROM "dbtaskqueue_task" AS t
    WHERE queue_name = q.q
    AND group_key IS NOT NULL
    AND coalesce(t.parked_by, t.final_status) IS NULL
    LIMIT 1
) IS NOT NULL
FROM unnest(%(queues)s::text[]) AS q(q);

-- Statements.touch
UPDATE "dbtaskqueue_task"
SET next_process_time = next_process_time + %(delta)s * interval '1 second', expire_time = expire_time +
    %(delta)s * interval '1 second'
WHERE id = %(id)s
AND total_attempt = %(total_attempt)s
AND status IN ('PROCESSING')
AND next_process_time > statement_timestamp() + %(since)s * interval '1 second'
RETURNING next_process_time::text;

-- Statements.unlocked
SELECT t.id
FROM "dbtaskqueue_task" AS t
JOIN (
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(task_id bigint, token bigint)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.status IN ('PROCESSING')
FOR NO KEY UPDATE OF t SKIP LOCKED;

-- Statements.unpark
UPDATE "dbtaskqueue_task"
SET parked_by = CASE WHEN group_key IS NOT NULL THEN 'group' END, last_update_time = statement_timestamp(),
    ready_time = CASE WHEN group_key IS NULL THEN greatest(statement_timestamp(), next_process_time) END
WHERE queue_name = %(queue_name)s
AND status IN ('CREATED')
AND parked_by::text LIKE 'no handler%%'
AND (payload_type IS NULL AND %(untyped)s OR payload_type = ANY(%(types)s::text[]))
RETURNING id, group_key;

-- Statements.unwatch
UPDATE "dbtaskqueue_task"
SET watched = NULL
WHERE id IN (
    SELECT unnest(%(ids)s::bigint[])
);

-- Statements.waited_for
SELECT DISTINCT child_id
FROM "dbtaskqueue_dependency"
WHERE id > %(after)s
AND id <= %(until)s
AND child_location = %(location)s;

-- Statements.wake_signalled
UPDATE "dbtaskqueue_task" AS t
SET next_process_time = statement_timestamp(), last_update_time = statement_timestamp(), parked_by = CASE WHEN
    t.group_key IS NULL OR t.ready_time IS NOT NULL THEN NULL ELSE 'group' END, ready_time = CASE WHEN
    t.group_key IS NULL OR t.ready_time IS NOT NULL THEN statement_timestamp() END, expire_time = CASE WHEN
    t.expire_time IS NOT NULL THEN t.expire_time + extract(epoch FROM statement_timestamp() -
    least(t.next_process_time, coalesce(t.ready_time, t.next_process_time)))::float8 * interval '1 second' END
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
    SELECT unnest(%(ids)s::bigint[])
);

-- Statements.write
UPDATE "dbtaskqueue_task" AS t
SET status = u.new_status, last_update_time = statement_timestamp(), parked_by = CASE WHEN u.signals_seen <>
    coalesce(t.signals, 0) THEN NULL ELSE u.park_reason END, ready_time = CASE WHEN u.new_status <> 'CREATED'
    OR CASE WHEN u.signals_seen <> coalesce(t.signals, 0) THEN NULL ELSE u.park_reason END IS NOT NULL THEN
    NULL WHEN u.delay IS NULL THEN t.ready_time ELSE statement_timestamp() + CASE WHEN u.signals_seen <>
    coalesce(t.signals, 0) THEN 0 ELSE coalesce(u.delay, 0) END * interval '1 second' END, next_process_time =
    CASE WHEN u.new_status = 'CREATED' THEN statement_timestamp() + CASE WHEN u.signals_seen <>
    coalesce(t.signals, 0) THEN 0 ELSE coalesce(u.delay, 0) END * interval '1 second' WHEN u.new_status IN
    ('ERROR', 'POISON') THEN t.ready_time ELSE t.next_process_time END, expire_time = CASE WHEN t.expire_time
    IS NULL OR u.delay IS NULL THEN t.expire_time ELSE t.expire_time + extract(epoch FROM
    statement_timestamp() + CASE WHEN u.signals_seen <> coalesce(t.signals, 0) THEN 0 ELSE coalesce(u.delay,
    0) END * interval '1 second' - t.ready_time)::float8 * interval '1 second' END, attempt = CASE WHEN
    u.attempts_added IS NULL THEN 0 WHEN u.new_status = 'CREATED' THEN least(t.attempt + u.attempts_added,
    t.max_attempts - 1) ELSE t.attempt + u.attempts_added END, reenqueue_attempt = t.reenqueue_attempt +
    u.reenqueues_added, process_result = CASE WHEN u.new_status = 'CREATED' AND u.delay IS NULL THEN
    t.process_result ELSE u.result_text END, result = CASE WHEN u.new_status = 'CREATED' AND u.delay IS NULL
    THEN t.result ELSE u.result_json::jsonb END, poller_instance = CASE WHEN u.new_status = 'CREATED' THEN
    NULL ELSE t.poller_instance END, finish_time = CASE WHEN u.new_status = 'CREATED' THEN NULL ELSE
    statement_timestamp() END, lost_leases = CASE WHEN u.attempts_added = -1 AND u.delay IS NULL THEN
    t.lost_leases ELSE u.deaths END, final_status = nullif(u.new_status, 'CREATED'), fingerprint =
    coalesce(u.failure_key, t.fingerprint)
FROM (
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(task_id bigint, token bigint, new_status text, delay
            float8, attempts_added int, reenqueues_added int, deaths int, result_text text, result_json text,
            park_reason text, failure_key text, signals_seen int)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
) AS u
WHERE t.id = u.task_id
AND t.total_attempt = u.token
AND t.status IN ('PROCESSING')
RETURNING id, watched
AND final_status IS NOT NULL;

-- StatsStatements.counts
SELECT q.n, l.ready, l.leased, (
    SELECT count(*)
    FROM (
        SELECT 1
        FROM "dbtaskqueue_task"
        WHERE queue_name = q.n
        AND parked_by IS NOT NULL
        LIMIT {most}
    ) AS x
), (
    SELECT count(*)
    FROM (
        SELECT 1
        FROM "dbtaskqueue_task"
        WHERE queue_name = q.n
        AND final_status = 'COMPLETED'
        LIMIT {most}
    ) AS x
), (
    SELECT count(*)
    FROM (
        SELECT 1
        FROM "dbtaskqueue_task"
        WHERE queue_name = q.n
        AND final_status = 'ERROR'
        LIMIT {most}
    ) AS x
), (
    SELECT count(*)
    FROM (
        SELECT 1
        FROM "dbtaskqueue_task"
        WHERE queue_name = q.n
        AND final_status = 'POISON'
        LIMIT {most}
    ) AS x
), l.stale, l.seconds
FROM unnest(%(names)s::text[]) AS q(n)
CROSS JOIN LATERAL (
    SELECT count(*) AS ready, count(*) FILTER (WHERE h.status = 'PROCESSING') AS leased, count(*) FILTER
        (WHERE h.status = 'PROCESSING' AND h.next_process_time <= statement_timestamp()) AS stale,
        max(extract(epoch FROM statement_timestamp() - h.next_process_time)::float8) FILTER (WHERE h.status =
        'PROCESSING' AND h.next_process_time <= statement_timestamp()) AS seconds
    FROM (
        SELECT status, next_process_time
        FROM "dbtaskqueue_task"
        WHERE queue_name = q.n
        AND ready_time IS NOT NULL
        ORDER BY priority, ready_time, id
        LIMIT {most}
    ) AS h
) AS l;

-- StatsStatements.crowded
SELECT floor(extract(epoch FROM minute) / %(step)s::int)::bigint
FROM "dbtaskqueue_minutecount"
WHERE kind = %(kind)s
AND minute >= %(start)s::timestamptz
AND minute <= %(end)s::timestamptz
GROUP BY 1
HAVING count(*) > count(DISTINCT queue_name || ' ' || name)
ORDER BY 1
LIMIT %(limit)s;

-- StatsStatements.due_ages
SELECT q.n, b.p, extract(epoch FROM statement_timestamp() - x.ready_time)::float8
FROM unnest(%(names)s::text[]) AS q(n)
CROSS JOIN LATERAL (
    WITH RECURSIVE s(v) AS ((
        SELECT priority
        FROM "dbtaskqueue_task"
        WHERE queue_name = q.n
        AND ready_time IS NOT NULL
        ORDER BY priority
        LIMIT 1
    ) UNION ALL SELECT (
        SELECT priority
        FROM "dbtaskqueue_task"
        WHERE queue_name = q.n
        AND ready_time IS NOT NULL
        AND priority > s.v
        ORDER BY priority
        LIMIT 1
    ) FROM s WHERE s.v IS NOT NULL)
    SELECT v
    FROM s
    WHERE v IS NOT NULL
    LIMIT 100
) AS b(p)
CROSS JOIN LATERAL (
    SELECT ready_time
    FROM "dbtaskqueue_task"
    WHERE queue_name = q.n
    AND priority = b.p
    AND ready_time <= statement_timestamp()
    AND next_process_time <= statement_timestamp()
    AND attempt < max_attempts
    AND status = 'CREATED'
    ORDER BY ready_time, id
    LIMIT 1
) AS x;

-- StatsStatements.durations
SELECT {by}, h.key, sum(h.value::bigint)::bigint
FROM "dbtaskqueue_minutecount", jsonb_each_text(CASE WHEN jsonb_typeof({times}) = 'object' THEN {times} END)
    AS h
WHERE kind = 'outcome'
AND minute >= %(start)s::timestamptz
AND minute <= statement_timestamp()
AND (CAST(%(every)s AS boolean) OR queue_name = ANY(%(queues)s::text[]))
AND h.key ~ '^[0-9][0-9]?$'
AND h.value ~ '^[0-9]+$'
AND length(h.value) <= 15
GROUP BY 1, 2;

-- StatsStatements.ended
SELECT queue_name, name, floor(extract(epoch FROM statement_timestamp() - minute)::float8 / %(step)s)::int,
    least(sum(count), 1e18)::bigint
FROM "dbtaskqueue_minutecount"
WHERE kind = 'outcome'
AND minute >= %(start)s::timestamptz
AND minute <= statement_timestamp()
GROUP BY 1, 2, 3;

-- StatsStatements.estimate
SELECT 1
FROM "dbtaskqueue_task" AS c{at}
WHERE queue_name = %(q{at})s
AND status = %(s{at})s;

-- StatsStatements.first_tasks
SELECT count(*), array_agg(x.id) FILTER (WHERE x.status = 'PROCESSING')
FROM (
    SELECT q.n, b.p, h.*
    FROM unnest(%(names)s::text[]) AS q(n)
    CROSS JOIN LATERAL (
        WITH RECURSIVE s(v) AS ((
            SELECT priority
            FROM "dbtaskqueue_task"
            WHERE queue_name = q.n
            AND ready_time IS NOT NULL
            ORDER BY priority
            LIMIT 1
        ) UNION ALL SELECT (
            SELECT priority
            FROM "dbtaskqueue_task"
            WHERE queue_name = q.n
            AND ready_time IS NOT NULL
            AND priority > s.v
            ORDER BY priority
            LIMIT 1
        ) FROM s WHERE s.v IS NOT NULL)
        SELECT v
        FROM s
        WHERE v IS NOT NULL
        LIMIT 100
    ) AS b(p)
    CROSS JOIN LATERAL (
        SELECT id, status
        FROM "dbtaskqueue_task"
        WHERE queue_name = q.n
        AND priority = b.p
        AND ready_time IS NOT NULL
        ORDER BY ready_time, id
        LIMIT {most}
    ) AS h
    LIMIT {most_of_all}
) AS x
GROUP BY x.n, x.p;

-- StatsStatements.names
(
    WITH RECURSIVE s(v) AS ((
        SELECT queue_name
        FROM "dbtaskqueue_task"
        WHERE ready_time IS NOT NULL
        ORDER BY queue_name
        LIMIT 1
    ) UNION ALL SELECT (
        SELECT queue_name
        FROM "dbtaskqueue_task"
        WHERE ready_time IS NOT NULL
        AND queue_name > s.v
        ORDER BY queue_name
        LIMIT 1
    ) FROM s WHERE s.v IS NOT NULL)
    SELECT v
    FROM s
    WHERE v IS NOT NULL
    LIMIT 1000
)
UNION (
    WITH RECURSIVE s(v) AS ((
        SELECT queue_name
        FROM "dbtaskqueue_task"
        WHERE final_status IS NOT NULL
        ORDER BY queue_name
        LIMIT 1
    ) UNION ALL SELECT (
        SELECT queue_name
        FROM "dbtaskqueue_task"
        WHERE final_status IS NOT NULL
        AND queue_name > s.v
        ORDER BY queue_name
        LIMIT 1
    ) FROM s WHERE s.v IS NOT NULL)
    SELECT v
    FROM s
    WHERE v IS NOT NULL
    LIMIT 1000
)
UNION (
    WITH RECURSIVE s(v) AS ((
        SELECT queue_name
        FROM "dbtaskqueue_task"
        WHERE parked_by IS NOT NULL
        ORDER BY queue_name
        LIMIT 1
    ) UNION ALL SELECT (
        SELECT queue_name
        FROM "dbtaskqueue_task"
        WHERE parked_by IS NOT NULL
        AND queue_name > s.v
        ORDER BY queue_name
        LIMIT 1
    ) FROM s WHERE s.v IS NOT NULL)
    SELECT v
    FROM s
    WHERE v IS NOT NULL
    LIMIT 1000
);

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
FROM unnest(%(prints)s::text[]) AS f(f);

-- StatsStatements.outcomes
SELECT floor(extract(epoch FROM minute) / %(step)s::int)::bigint, name, least(sum(count), 1e18)::bigint
FROM "dbtaskqueue_minutecount"
WHERE kind = 'outcome'
AND minute >= %(start)s::timestamptz
AND minute <= statement_timestamp()
AND (CAST(%(every)s AS boolean) OR queue_name = ANY(%(queues)s::text[]))
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
        SELECT h.*
        FROM unnest(%(names)s::text[]) AS q(n)
        CROSS JOIN LATERAL (
            WITH RECURSIVE s(v) AS ((
                SELECT priority
                FROM "dbtaskqueue_task"
                WHERE queue_name = q.n
                AND ready_time IS NOT NULL
                ORDER BY priority
                LIMIT 1
            ) UNION ALL SELECT (
                SELECT priority
                FROM "dbtaskqueue_task"
                WHERE queue_name = q.n
                AND ready_time IS NOT NULL
                AND priority > s.v
                ORDER BY priority
                LIMIT 1
            ) FROM s WHERE s.v IS NOT NULL)
            SELECT v
            FROM s
            WHERE v IS NOT NULL
            LIMIT 100
        ) AS b(p)
        CROSS JOIN LATERAL (
            SELECT id, priority, ready_time, payload_type, CASE WHEN status = 'PROCESSING' AND
                next_process_time > statement_timestamp() THEN coalesce(poller_instance, '') END AS holder
            FROM "dbtaskqueue_task"
            WHERE ready_time <= statement_timestamp()
            AND queue_name = q.n
            AND priority = b.p
            ORDER BY ready_time, id
            LIMIT 1000
        ) AS h
        LIMIT 10000
    ) AS x
) AS y
GROUP BY 1, 2, 3;

-- StagingStatements.abandoned
SELECT relname
FROM pg_class
WHERE relkind = 'r'
AND relname ~ '^dbtaskqueue_stg_[0-9]{14}_'
AND relname < 'dbtaskqueue_stg_' || to_char((statement_timestamp() + -%(age)s * interval '1 second') AT TIME
    ZONE 'UTC', 'YYYYMMDDHH24MISS') || '~'
AND pg_table_is_visible(oid)
ORDER BY relname;

-- StagingStatements.conflicts
SELECT u.queue_name, u.reference_number, t.id, t.status
FROM "dbtaskqueue_stg_20260131000000_x" AS u
JOIN "dbtaskqueue_task" AS t
ON t.reference_number = u.reference_number
AND t.queue_name = u.queue_name
WHERE u._attempt IN (
    SELECT unnest(%(attempts)s::bigint[])
)
ORDER BY 2, 1
LIMIT 1;

-- StagingStatements.create
CREATE UNLOGGED TABLE "dbtaskqueue_stg_20260131000000_x" (_attempt bigint, queue_name text, reference_number
    text, max_attempts int, priority smallint, payload jsonb, payload_type text, context jsonb, group_key
    text, tag text, lease_seconds float8, delay float8, run_at timestamptz, ttl float8)
WITH (autovacuum_enabled = false);

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
        SELECT unnest(%(attempts)s::bigint[])
    )
    AND u.group_key > ''
) AS g;

-- StagingStatements.insert (timed)
INSERT INTO "dbtaskqueue_task" (queue_name, reference_number, max_attempts, priority, payload, payload_type,
    context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by, expire_time)
SELECT u.queue_name, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, greatest(statement_timestamp(), coalesce(u.run_at,
    statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second', greatest(statement_timestamp(),
    coalesce(u.run_at, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second', NULL,
    greatest(statement_timestamp(), coalesce(u.run_at, statement_timestamp())) + coalesce(u.delay, 0) *
    interval '1 second' + u.ttl * interval '1 second'
FROM "dbtaskqueue_stg_20260131000000_x" AS u
WHERE u._attempt IN (
    SELECT unnest(%(attempts)s::bigint[])
)
ORDER BY u.reference_number COLLATE "C", u.queue_name COLLATE "C";

-- StagingStatements.insert (timed, grouped)
INSERT INTO "dbtaskqueue_task" (queue_name, reference_number, max_attempts, priority, payload, payload_type,
    context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by, expire_time)
SELECT u.queue_name, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, greatest(statement_timestamp(), coalesce(u.run_at,
    statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second', CASE WHEN u.group_key IS NULL THEN
    greatest(statement_timestamp(), coalesce(u.run_at, statement_timestamp())) + coalesce(u.delay, 0) *
    interval '1 second' END, CASE WHEN u.group_key IS NOT NULL THEN 'group' END,
    greatest(statement_timestamp(), coalesce(u.run_at, statement_timestamp())) + coalesce(u.delay, 0) *
    interval '1 second' + u.ttl * interval '1 second'
FROM "dbtaskqueue_stg_20260131000000_x" AS u
WHERE u._attempt IN (
    SELECT unnest(%(attempts)s::bigint[])
)
ORDER BY u.reference_number COLLATE "C", u.queue_name COLLATE "C";

-- StagingStatements.insert (ignore, timed)
INSERT INTO "dbtaskqueue_task" (queue_name, reference_number, max_attempts, priority, payload, payload_type,
    context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by, expire_time)
SELECT u.queue_name, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, greatest(statement_timestamp(), coalesce(u.run_at,
    statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second', greatest(statement_timestamp(),
    coalesce(u.run_at, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second', NULL,
    greatest(statement_timestamp(), coalesce(u.run_at, statement_timestamp())) + coalesce(u.delay, 0) *
    interval '1 second' + u.ttl * interval '1 second'
FROM "dbtaskqueue_stg_20260131000000_x" AS u
WHERE u._attempt IN (
    SELECT unnest(%(attempts)s::bigint[])
)
ORDER BY u.reference_number COLLATE "C", u.queue_name COLLATE "C"
ON CONFLICT (reference_number, queue_name) DO NOTHING;

-- StagingStatements.insert (ignore, timed, grouped)
INSERT INTO "dbtaskqueue_task" (queue_name, reference_number, max_attempts, priority, payload, payload_type,
    context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by, expire_time)
SELECT u.queue_name, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type, u.context,
    u.group_key, u.tag, u.lease_seconds, greatest(statement_timestamp(), coalesce(u.run_at,
    statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second', CASE WHEN u.group_key IS NULL THEN
    greatest(statement_timestamp(), coalesce(u.run_at, statement_timestamp())) + coalesce(u.delay, 0) *
    interval '1 second' END, CASE WHEN u.group_key IS NOT NULL THEN 'group' END,
    greatest(statement_timestamp(), coalesce(u.run_at, statement_timestamp())) + coalesce(u.delay, 0) *
    interval '1 second' + u.ttl * interval '1 second'
FROM "dbtaskqueue_stg_20260131000000_x" AS u
WHERE u._attempt IN (
    SELECT unnest(%(attempts)s::bigint[])
)
ORDER BY u.reference_number COLLATE "C", u.queue_name COLLATE "C"
ON CONFLICT (reference_number, queue_name) DO NOTHING;

-- StagingStatements.lock_groups_of
SELECT pg_advisory_xact_lock(hashtextextended(x.q || ' ' || x.k, 0))
FROM (
    SELECT DISTINCT u.queue_name AS q, u.group_key AS k
    FROM "dbtaskqueue_stg_20260131000000_x" AS u
    WHERE u._attempt IN (
        SELECT unnest(%(attempts)s::bigint[])
    )
    AND u.group_key > ''
    ORDER BY q, k
) AS x;

-- StagingStatements.lock_table
LOCK TABLE "dbtaskqueue_task" IN SHARE ROW EXCLUSIVE MODE;

-- StagingStatements.misplaced
SELECT m.id, m.ready
FROM (
    SELECT t.id AS id, t.ready_time IS NOT NULL AS ready, t.status AS s, row_number() OVER (PARTITION BY
        t.queue_name, t.group_key ORDER BY CASE WHEN t.status = 'PROCESSING' THEN 0 WHEN t.ready_time IS NOT
        NULL AND t.attempt > 0 AND t.process_result IS NOT NULL AND t.result IS NULL THEN 1 ELSE 2 END,
        greatest(extract(epoch FROM t.next_process_time - statement_timestamp())::float8, 0), t.priority,
        t.id) AS place
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT DISTINCT u.queue_name AS q, u.group_key AS k
        FROM "dbtaskqueue_stg_20260131000000_x" AS u
        WHERE u._attempt IN (
            SELECT unnest(%(attempts)s::bigint[])
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
SELECT 'dbtaskqueue_stg_' || to_char((statement_timestamp() + -%(age)s * interval '1 second') AT TIME ZONE
    'UTC', 'YYYYMMDDHH24MISS');

-- StagingStatements.new
SELECT (
    SELECT count(*)
    FROM "dbtaskqueue_stg_20260131000000_x" AS u
    WHERE u._attempt IN (
        SELECT unnest(%(attempts)s::bigint[])
    )
    AND u.reference_number IS NULL
) + count(*)
FROM (
    SELECT DISTINCT u.queue_name, u.reference_number
    FROM "dbtaskqueue_stg_20260131000000_x" AS u
    WHERE u._attempt IN (
        SELECT unnest(%(attempts)s::bigint[])
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
    SELECT unnest(%(attempts)s::bigint[])
);

-- StagingStatements.twice
SELECT u.queue_name, u.reference_number
FROM "dbtaskqueue_stg_20260131000000_x" AS u
WHERE u._attempt IN (
    SELECT unnest(%(attempts)s::bigint[])
)
AND u.reference_number IS NOT NULL
GROUP BY u.queue_name, u.reference_number
HAVING count(*) > 1
ORDER BY 2, 1
LIMIT 1;

-- ArchiveStatements.batch_abandoned
UPDATE "dbtaskqueue_archivebatch"
SET state = 'abandoned', note = %(note)s, close_time = statement_timestamp()
WHERE token = %(token)s
AND state = 'open';

-- ArchiveStatements.batch_closed
UPDATE "dbtaskqueue_archivebatch"
SET state = 'closed', tasks = %(tasks)s, attempts = %(attempts)s, size = %(size)s, withdrawn = %(withdrawn)s,
    close_time = statement_timestamp()
WHERE token = %(token)s
AND state = 'open';

-- ArchiveStatements.cutoff
SELECT statement_timestamp() + -%(age)s * interval '1 second';

-- ArchiveStatements.frozen
SELECT min(x.id), max(x.id), count(*)
FROM (
    SELECT id
    FROM "dbtaskqueue_task"
    WHERE id > %(after)s
    AND status IN ('COMPLETED', 'ERROR', 'POISON')
    AND status = ANY(%(statuses)s::text[])
    AND coalesce(finish_time, last_update_time) < %(cutoff)s::timestamptz
    AND (%(every)s OR queue_name = ANY(%(queues)s::text[]))
    AND watched IS NULL
    ORDER BY id
    LIMIT %(limit)s
) AS x;

-- ArchiveStatements.lock
INSERT INTO archived_gone (location, id, row_id)
SELECT k.location, k.id, t.id
FROM "dbtaskqueue_task" AS t
JOIN archived_key AS k
ON t.id = k.id
AND t.total_attempt = k.total_attempt
AND t.status = k.status
AND t.last_update_time = k.last_update_time
AND t.status IN ('COMPLETED', 'ERROR', 'POISON')
AND t.watched IS NULL
FOR UPDATE OF t SKIP LOCKED;

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

-- ArchiveStatements.remove_old
WITH gone AS (
    DELETE
    FROM "dbtaskqueue_task"
    WHERE id BETWEEN %(first_id)s AND %(last_id)s
    AND status IN ('COMPLETED', 'ERROR', 'POISON')
    AND status = ANY(%(statuses)s::text[])
    AND coalesce(finish_time, last_update_time) < %(cutoff)s::timestamptz
    AND (%(every)s OR queue_name = ANY(%(queues)s::text[]))
    AND watched IS NULL
    AND {older}
    RETURNING id AS k, total_attempt AS n, batch, queue_name, status
), noted AS (
    INSERT INTO "dbtaskqueue_minutecount" (kind, queue_name, name, count)
    SELECT 'batch_' || batch, queue_name, status, count(*)
    FROM gone
    WHERE true
    AND batch IS NOT NULL
    AND status <> 'COMPLETED'
    GROUP BY batch, queue_name, status
)
SELECT count(*), coalesce(sum(k), 0), coalesce(bit_xor(k), 0), coalesce(sum(n), 0)
FROM gone;

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
    last_update_time timestamptz)
ON COMMIT DROP;

-- ArchiveStatements.temporary, archived_attempt
CREATE TEMPORARY TABLE archived_attempt (id bigint, location text, task_id bigint)
ON COMMIT DROP;

-- ArchiveStatements.temporary, archived_gone
CREATE TEMPORARY TABLE archived_gone (location text, id bigint, row_id bigint)
ON COMMIT DROP;

-- EraseStatements.about, attempts [1]
SELECT count(*)
FROM "dbtaskqueue_attempt" AS t
JOIN (
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(location text, task_id bigint)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
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
        SELECT *
        FROM (
            SELECT *
            FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(location text, task_id bigint)
            LIMIT (
                SELECT 1000000
            )
        ) AS u
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    ON t.location = u.location
    AND t.task_id = u.task_id
);

-- EraseStatements.about, steps and signals [1]
SELECT count(*)
FROM "dbtaskqueue_step" AS t
JOIN (
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(location text, task_id bigint)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
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
        SELECT *
        FROM (
            SELECT *
            FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(location text, task_id bigint)
            LIMIT (
                SELECT 1000000
            )
        ) AS u
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    ON t.location = u.location
    AND t.task_id = u.task_id
);

-- EraseStatements.about, changes by operators [1]
SELECT count(DISTINCT t.id)
FROM "dbtaskqueue_taskchange" AS t
JOIN (
    SELECT *
    FROM (
        SELECT *
        FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(location text, task_id bigint)
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    LIMIT (
        SELECT 1000000
    )
) AS u
ON t.location = u.location
AND u.task_id BETWEEN t.first_task_id AND t.last_task_id
AND t.task_ids @> to_jsonb(u.task_id)
WHERE t.before IS NOT NULL OR t.difference IS NOT NULL;

-- EraseStatements.about, changes by operators [2]
UPDATE "dbtaskqueue_taskchange"
SET before = NULL, difference = NULL
WHERE id IN (
    SELECT t.id
    FROM "dbtaskqueue_taskchange" AS t
    JOIN (
        SELECT *
        FROM (
            SELECT *
            FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(location text, task_id bigint)
            LIMIT (
                SELECT 1000000
            )
        ) AS u
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    ON t.location = u.location
    AND u.task_id BETWEEN t.first_task_id AND t.last_task_id
    AND t.task_ids @> to_jsonb(u.task_id)
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
WHERE reference_number = ANY(%(references)s::text[])
AND (%(every)s OR queue_name = ANY(%(queues)s::text[]))
GROUP BY queue_name;

-- EraseStatements.delete_history
DELETE
FROM "dbtaskqueue_taskhistory"
WHERE reference_number = ANY(%(references)s::text[])
AND (%(every)s OR queue_name = ANY(%(queues)s::text[]));

-- EraseStatements.delete_staged
DELETE
FROM {table}
WHERE reference_number = ANY(%(references)s::text[])
AND (%(every)s OR queue_name = ANY(%(queues)s::text[]))
RETURNING reference_number;

-- EraseStatements.delete_used_references
DELETE
FROM "dbtaskqueue_usedreference"
WHERE reference_number = ANY(%(references)s::text[])
AND (%(every)s OR queue_name = ANY(%(queues)s::text[]));

-- EraseStatements.history
SELECT reference_number, location, task_id
FROM "dbtaskqueue_taskhistory"
WHERE reference_number = ANY(%(references)s::text[])
AND (%(every)s OR queue_name = ANY(%(queues)s::text[]));

-- EraseStatements.lakes
SELECT DISTINCT lake
FROM "dbtaskqueue_archivebatch"
WHERE state = 'closed'
ORDER BY lake;

-- EraseStatements.staged
SELECT reference_number
FROM {table}
WHERE reference_number = ANY(%(references)s::text[])
AND (%(every)s OR queue_name = ANY(%(queues)s::text[]));

-- EraseStatements.tasks
SELECT t.reference_number, t.id, t.status, t.watched
FROM "dbtaskqueue_task" AS t
WHERE reference_number = ANY(%(references)s::text[])
AND (%(every)s OR queue_name = ANY(%(queues)s::text[]))
ORDER BY t.id
FOR NO KEY UPDATE OF t;

-- EraseStatements.used_references
SELECT reference_number
FROM "dbtaskqueue_usedreference"
WHERE reference_number = ANY(%(references)s::text[])
AND (%(every)s OR queue_name = ANY(%(queues)s::text[]));

-- Statements.attempts (one row)
INSERT INTO "dbtaskqueue_attempt" (location, task_id, queue_name, attempt, total_attempt, poller_instance,
    start_time, error_type, message, traceback, fingerprint)
SELECT %(location)s, t.id, t.queue_name, t.attempt, t.total_attempt, t.poller_instance, t.start_time,
    u.error_type, u.message, u.traceback, u.failure_key
FROM "dbtaskqueue_task" AS t
JOIN (
    SELECT %(task_id)s::bigint AS task_id, %(token)s::bigint AS token, %(error_type)s::text AS error_type,
        %(message)s::text AS message, %(traceback)s::text AS traceback, %(failure_key)s::text AS failure_key
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.status IN ('PROCESSING')
FOR NO KEY UPDATE OF t;

-- Statements.cancel_held (one row)
UPDATE "dbtaskqueue_task" AS t
SET status = 'POISON', final_status = 'POISON', parked_by = NULL, finish_time = statement_timestamp(),
    last_update_time = statement_timestamp(), process_result = u.reason_text
FROM (
    SELECT %(child)s::bigint AS child, %(reason_text)s::text AS reason_text
) AS u
WHERE t.id = u.child
AND t.parked_by = 'parents'
AND t.status IN ('CREATED', 'PROCESSING')
RETURNING id, queue_name, watched;

-- Statements.charge_groups (one row)
UPDATE "dbtaskqueue_limit" AS l
SET tokens = l.tokens - u.taken, full_time = statement_timestamp() + (%(burst)s - l.tokens + u.taken) /
    %(rate)s * interval '1 second'
FROM (
    SELECT %(group_name)s::text AS group_name, %(taken)s::float8 AS taken
) AS u
WHERE l.queue_name = %(queue_name)s
AND l.group_key = u.group_name;

-- Statements.checkout_optimistic (one row)
UPDATE "dbtaskqueue_task"
SET status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time =
    statement_timestamp(), last_update_time = statement_timestamp(), next_process_time = statement_timestamp()
    + greatest(coalesce(lease_seconds, %(lease)s), %(min_lease)s) * interval '1 second', poller_instance =
    %(poller_instance)s, lost_leases = CASE WHEN status = 'PROCESSING' THEN least(abs(lost_leases) + 1, 1000)
    ELSE -abs(lost_leases) END
WHERE id = ANY(ARRAY(
    SELECT t.id
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT %(task_id)s::bigint AS task_id, %(token)s::bigint AS token
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('CREATED', 'PROCESSING')
    AND (ready_time <= statement_timestamp() AND next_process_time <= statement_timestamp() AND attempt <
        max_attempts AND (tag IS NULL OR tag = ANY(%(tags)s::text[])) AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = %(queue_name)s
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
    )) IS TRUE
    FOR NO KEY UPDATE OF t SKIP LOCKED
))
RETURNING id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, payload::text, context::text, create_time::text, start_time::text, next_process_time::text,
    poller_instance, ready_time::text, group_key, expire_time::text, lease_seconds, lost_leases;

-- Statements.claim_periods (one row)
INSERT INTO "dbtaskqueue_usedreference" AS l (queue_name, reference_number, expire_time)
SELECT %(queue_name)s, u.reference_number, statement_timestamp() + %(period)s * interval '1 second'
FROM (
    SELECT %(reference_number)s::text AS reference_number
) AS u
WHERE true
ORDER BY u.reference_number COLLATE "C"
ON CONFLICT (queue_name, reference_number) DO UPDATE
SET expire_time = excluded.expire_time, create_time = statement_timestamp()
WHERE l.create_time <= statement_timestamp() + %(ago)s * interval '1 second'
RETURNING reference_number;

-- Statements.claim_references (one row)
INSERT INTO "dbtaskqueue_usedreference" (queue_name, reference_number)
SELECT %(queue_name)s, u.reference_number
FROM (
    SELECT %(reference_number)s::text AS reference_number
) AS u
WHERE true
ORDER BY u.reference_number COLLATE "C"
ON CONFLICT (queue_name, reference_number) DO NOTHING
RETURNING reference_number;

-- Statements.complete (one row)
UPDATE "dbtaskqueue_task" AS t
SET status = 'COMPLETED', final_status = 'COMPLETED', ready_time = NULL, finish_time = statement_timestamp(),
    last_update_time = statement_timestamp(), process_result = NULL, result = u.result_json::jsonb
FROM (
    SELECT %(task_id)s::bigint AS task_id, %(token)s::bigint AS token, %(result_json)s::text AS result_json
) AS u
WHERE t.id = u.task_id
AND t.total_attempt = u.token
AND t.status IN ('PROCESSING')
RETURNING id, watched;

-- Statements.complete_plain (one row)
UPDATE "dbtaskqueue_task" AS t
SET status = 'COMPLETED', final_status = 'COMPLETED', ready_time = NULL, finish_time = statement_timestamp(),
    last_update_time = statement_timestamp(), process_result = NULL, result = NULL
FROM (
    SELECT %(task_id)s::bigint AS task_id, %(token)s::bigint AS token
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
        SELECT %(task_id)s::bigint AS task_id, %(token)s::bigint AS token
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('PROCESSING')
    FOR NO KEY UPDATE OF t
) AS x
GROUP BY x.q;

-- Statements.count_down (one row)
UPDATE "dbtaskqueue_hold" AS t
SET remaining = t.remaining - u.number
FROM (
    SELECT %(child)s::bigint AS child, %(number)s::int AS number
) AS u
WHERE t.location = %(location)s
AND t.task_id = u.child
RETURNING task_id, remaining;

-- Statements.delete_counted (one row)
WITH gone AS (
    DELETE
    FROM "dbtaskqueue_task"
    WHERE id = ANY(ARRAY(
        SELECT t.id
        FROM "dbtaskqueue_task" AS t
        JOIN (
            SELECT %(task_id)s::bigint AS task_id, %(token)s::bigint AS token
        ) AS u
        ON t.id = u.task_id
        AND t.total_attempt = u.token
        WHERE t.status IN ('PROCESSING')
        FOR NO KEY UPDATE OF t
    ))
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
WHERE id = ANY(ARRAY(
    SELECT t.id
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT %(task_id)s::bigint AS task_id, %(token)s::bigint AS token
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('PROCESSING')
))
RETURNING id, watched;

-- Statements.heads_before (one row)
SELECT x.id, count(*), extract(epoch FROM max(t.ready_time) - statement_timestamp())::float8
FROM (
    SELECT %(task_id)s::bigint AS task_id, %(token)s::bigint AS token
) AS u
JOIN "dbtaskqueue_task" AS x
ON x.id = u.task_id
JOIN "dbtaskqueue_task" AS t
ON t.queue_name = x.queue_name
AND t.group_key = x.group_key
AND coalesce(t.parked_by, t.final_status) IS NULL
AND t.next_process_time <= statement_timestamp()
AND t.priority = x.priority
AND t.id < x.id
AND t.ready_time > x.ready_time
GROUP BY x.id;

-- Statements.held_leases (one row)
SELECT id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, payload::text, context::text, create_time::text, start_time::text, next_process_time::text,
    poller_instance, ready_time::text, group_key, expire_time::text, lease_seconds, lost_leases, extract(epoch
    FROM next_process_time - statement_timestamp())::float8
FROM "dbtaskqueue_task" AS t
JOIN (
    SELECT %(task_id)s::bigint AS task_id, %(token)s::bigint AS token
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.status IN ('PROCESSING');

-- Statements.insert_edges (one row)
INSERT INTO "dbtaskqueue_dependency" (parent_location, parent_id, child_location, child_id, name, outcome)
SELECT u.parent_location, u.parent_id, u.child_location, u.child_id, u.name, u.outcome
FROM (
    SELECT %(parent_location)s::text AS parent_location, %(parent_id)s::bigint AS parent_id,
        %(child_location)s::text AS child_location, %(child_id)s::bigint AS child_id, %(name)s::text AS name,
        %(outcome)s::text AS outcome
) AS u;

-- Statements.insert_holds (one row)
INSERT INTO "dbtaskqueue_hold" (location, task_id, remaining, on_parent_failure)
SELECT u.location, u.task_id, u.remaining, u.on_parent_failure
FROM (
    SELECT %(location)s::text AS location, %(task_id)s::bigint AS task_id, %(remaining)s::int AS remaining,
        %(on_parent_failure)s::text AS on_parent_failure
) AS u;

-- Statements.insert_many (error) (one row)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
        u.context, u.group_key, u.tag, u.lease_seconds, statement_timestamp(), statement_timestamp(), NULL,
        NULL
    FROM (
        SELECT nextval((
            SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
        )::regclass) AS id, u.*
        FROM (
            SELECT %(reference_number)s::text AS reference_number, %(max_attempts)s::int AS max_attempts,
                %(priority)s::smallint AS priority, %(payload)s::jsonb AS payload, %(payload_type)s::text AS
                payload_type, %(context)s::jsonb AS context, %(group_key)s::text AS group_key, %(tag)s::text
                AS tag, %(lease_seconds)s::float8 AS lease_seconds
        ) AS u
    ) AS u
    ORDER BY u.reference_number COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO NOTHING
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_many (error, grouped) (one row)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
        u.context, u.group_key, u.tag, u.lease_seconds, statement_timestamp(), CASE WHEN u.enters THEN
        statement_timestamp() END, CASE WHEN NOT u.enters THEN 'group' END, NULL
    FROM (
        SELECT u.*, u.group_key IS NULL OR row_number() OVER (PARTITION BY u.group_key ORDER BY u.priority,
            u.id) <= %(number)s::int
        AND row_number() OVER (PARTITION BY u.group_key ORDER BY u.priority, u.id) + (
            SELECT count(*)
            FROM (
                SELECT 1
                FROM "dbtaskqueue_task" AS t
                WHERE t.queue_name = %(queue_name)s
                AND t.group_key = u.group_key
                AND coalesce(t.parked_by, t.final_status) IS NULL
                LIMIT %(number)s::int
            ) AS h
        ) <= %(number)s::int AS enters
        FROM (
            SELECT nextval((
                SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
            )::regclass) AS id, u.*
            FROM (
                SELECT %(reference_number)s::text AS reference_number, %(max_attempts)s::int AS max_attempts,
                    %(priority)s::smallint AS priority, %(payload)s::jsonb AS payload, %(payload_type)s::text
                    AS payload_type, %(context)s::jsonb AS context, %(group_key)s::text AS group_key,
                    %(tag)s::text AS tag, %(lease_seconds)s::float8 AS lease_seconds
            ) AS u
        ) AS u
    ) AS u
    ORDER BY u.reference_number COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO NOTHING
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_many (error, timed) (one row)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
        u.context, u.group_key, u.tag, u.lease_seconds, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second',
        greatest(statement_timestamp(), coalesce(u.run_at::timestamptz, statement_timestamp())) +
        coalesce(u.delay, 0) * interval '1 second', NULL, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second' +
        u.ttl * interval '1 second'
    FROM (
        SELECT nextval((
            SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
        )::regclass) AS id, u.*
        FROM (
            SELECT %(reference_number)s::text AS reference_number, %(max_attempts)s::int AS max_attempts,
                %(priority)s::smallint AS priority, %(payload)s::jsonb AS payload, %(payload_type)s::text AS
                payload_type, %(context)s::jsonb AS context, %(group_key)s::text AS group_key, %(tag)s::text
                AS tag, %(lease_seconds)s::float8 AS lease_seconds, %(delay)s::float8 AS delay,
                %(run_at)s::text AS run_at, %(ttl)s::float8 AS ttl
        ) AS u
    ) AS u
    ORDER BY u.reference_number COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO NOTHING
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_many (error, timed, grouped) (one row)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
        u.context, u.group_key, u.tag, u.lease_seconds, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second',
        CASE WHEN u.group_key IS NULL THEN greatest(statement_timestamp(), coalesce(u.run_at::timestamptz,
        statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second' END, CASE WHEN NOT u.group_key IS
        NULL THEN 'group' END, greatest(statement_timestamp(), coalesce(u.run_at::timestamptz,
        statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second' + u.ttl * interval '1 second'
    FROM (
        SELECT nextval((
            SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
        )::regclass) AS id, u.*
        FROM (
            SELECT %(reference_number)s::text AS reference_number, %(max_attempts)s::int AS max_attempts,
                %(priority)s::smallint AS priority, %(payload)s::jsonb AS payload, %(payload_type)s::text AS
                payload_type, %(context)s::jsonb AS context, %(group_key)s::text AS group_key, %(tag)s::text
                AS tag, %(lease_seconds)s::float8 AS lease_seconds, %(delay)s::float8 AS delay,
                %(run_at)s::text AS run_at, %(ttl)s::float8 AS ttl
        ) AS u
    ) AS u
    ORDER BY u.reference_number COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO NOTHING
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_many (replace, timed) (one row)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
        u.context, u.group_key, u.tag, u.lease_seconds, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second',
        greatest(statement_timestamp(), coalesce(u.run_at::timestamptz, statement_timestamp())) +
        coalesce(u.delay, 0) * interval '1 second', NULL, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second' +
        u.ttl * interval '1 second'
    FROM (
        SELECT nextval((
            SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
        )::regclass) AS id, u.*
        FROM (
            SELECT %(reference_number)s::text AS reference_number, %(max_attempts)s::int AS max_attempts,
                %(priority)s::smallint AS priority, %(payload)s::jsonb AS payload, %(payload_type)s::text AS
                payload_type, %(context)s::jsonb AS context, %(group_key)s::text AS group_key, %(tag)s::text
                AS tag, %(lease_seconds)s::float8 AS lease_seconds, %(delay)s::float8 AS delay,
                %(run_at)s::text AS run_at, %(ttl)s::float8 AS ttl
        ) AS u
    ) AS u
    ORDER BY u.reference_number COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO UPDATE
    SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type,
        context = excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds,
        next_process_time = excluded.next_process_time, expire_time = excluded.expire_time, max_attempts =
        greatest(excluded.max_attempts, t.attempt + 1), ready_time = CASE WHEN t.parked_by = 'signal' THEN
        excluded.next_process_time ELSE CASE WHEN t.parked_by IS NULL THEN excluded.next_process_time END END,
        parked_by = nullif(t.parked_by, 'signal'), last_update_time = greatest(statement_timestamp(),
        t.create_time + 0.001 * interval '1 second')
    WHERE t.status IN ('CREATED')
    AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')
    AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_many (replace, timed, keep_due) (one row)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
        u.context, u.group_key, u.tag, u.lease_seconds, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second',
        greatest(statement_timestamp(), coalesce(u.run_at::timestamptz, statement_timestamp())) +
        coalesce(u.delay, 0) * interval '1 second', NULL, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second' +
        u.ttl * interval '1 second'
    FROM (
        SELECT nextval((
            SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
        )::regclass) AS id, u.*
        FROM (
            SELECT %(reference_number)s::text AS reference_number, %(max_attempts)s::int AS max_attempts,
                %(priority)s::smallint AS priority, %(payload)s::jsonb AS payload, %(payload_type)s::text AS
                payload_type, %(context)s::jsonb AS context, %(group_key)s::text AS group_key, %(tag)s::text
                AS tag, %(lease_seconds)s::float8 AS lease_seconds, %(delay)s::float8 AS delay,
                %(run_at)s::text AS run_at, %(ttl)s::float8 AS ttl
        ) AS u
    ) AS u
    ORDER BY u.reference_number COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO UPDATE
    SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type,
        context = excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds, max_attempts =
        greatest(excluded.max_attempts, t.attempt + 1), ready_time = CASE WHEN t.parked_by = 'signal' THEN
        excluded.next_process_time ELSE t.ready_time END, parked_by = nullif(t.parked_by, 'signal'),
        last_update_time = greatest(statement_timestamp(), t.create_time + 0.001 * interval '1 second')
    WHERE t.status IN ('CREATED')
    AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')
    AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_many (replace_running, timed) (one row)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
        u.context, u.group_key, u.tag, u.lease_seconds, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second',
        greatest(statement_timestamp(), coalesce(u.run_at::timestamptz, statement_timestamp())) +
        coalesce(u.delay, 0) * interval '1 second', NULL, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second' +
        u.ttl * interval '1 second'
    FROM (
        SELECT nextval((
            SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
        )::regclass) AS id, u.*
        FROM (
            SELECT %(reference_number)s::text AS reference_number, %(max_attempts)s::int AS max_attempts,
                %(priority)s::smallint AS priority, %(payload)s::jsonb AS payload, %(payload_type)s::text AS
                payload_type, %(context)s::jsonb AS context, %(group_key)s::text AS group_key, %(tag)s::text
                AS tag, %(lease_seconds)s::float8 AS lease_seconds, %(delay)s::float8 AS delay,
                %(run_at)s::text AS run_at, %(ttl)s::float8 AS ttl
        ) AS u
    ) AS u
    ORDER BY u.reference_number COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO UPDATE
    SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type,
        context = excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds,
        next_process_time = excluded.next_process_time, expire_time = excluded.expire_time, poller_instance =
        CASE WHEN t.status = 'PROCESSING' THEN NULL ELSE t.poller_instance END, start_time = CASE WHEN
        t.status = 'PROCESSING' THEN NULL ELSE t.start_time END, process_result = CASE WHEN t.status =
        'PROCESSING' THEN NULL ELSE t.process_result END, lost_leases = CASE WHEN t.status = 'PROCESSING' THEN
        0 ELSE t.lost_leases END, status = 'CREATED', attempt = CASE WHEN t.status = 'PROCESSING' THEN 0 ELSE
        t.attempt END, max_attempts = greatest(excluded.max_attempts, CASE WHEN t.status = 'PROCESSING' THEN 0
        ELSE t.attempt END + 1), ready_time = CASE WHEN t.parked_by = 'signal' THEN excluded.next_process_time
        ELSE CASE WHEN t.parked_by IS NULL THEN excluded.next_process_time END END, parked_by =
        nullif(t.parked_by, 'signal'), last_update_time = greatest(statement_timestamp(), t.create_time +
        0.001 * interval '1 second')
    WHERE t.status IN ('CREATED', 'PROCESSING')
    AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')
    AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_many (replace_running, timed, keep_due) (one row)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
        u.context, u.group_key, u.tag, u.lease_seconds, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second',
        greatest(statement_timestamp(), coalesce(u.run_at::timestamptz, statement_timestamp())) +
        coalesce(u.delay, 0) * interval '1 second', NULL, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second' +
        u.ttl * interval '1 second'
    FROM (
        SELECT nextval((
            SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
        )::regclass) AS id, u.*
        FROM (
            SELECT %(reference_number)s::text AS reference_number, %(max_attempts)s::int AS max_attempts,
                %(priority)s::smallint AS priority, %(payload)s::jsonb AS payload, %(payload_type)s::text AS
                payload_type, %(context)s::jsonb AS context, %(group_key)s::text AS group_key, %(tag)s::text
                AS tag, %(lease_seconds)s::float8 AS lease_seconds, %(delay)s::float8 AS delay,
                %(run_at)s::text AS run_at, %(ttl)s::float8 AS ttl
        ) AS u
    ) AS u
    ORDER BY u.reference_number COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO UPDATE
    SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type,
        context = excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds,
        poller_instance = CASE WHEN t.status = 'PROCESSING' THEN NULL ELSE t.poller_instance END, start_time =
        CASE WHEN t.status = 'PROCESSING' THEN NULL ELSE t.start_time END, process_result = CASE WHEN t.status
        = 'PROCESSING' THEN NULL ELSE t.process_result END, lost_leases = CASE WHEN t.status = 'PROCESSING'
        THEN 0 ELSE t.lost_leases END, status = 'CREATED', attempt = CASE WHEN t.status = 'PROCESSING' THEN 0
        ELSE t.attempt END, next_process_time = CASE WHEN t.status = 'PROCESSING' THEN t.ready_time ELSE
        t.next_process_time END, max_attempts = greatest(excluded.max_attempts, CASE WHEN t.status =
        'PROCESSING' THEN 0 ELSE t.attempt END + 1), ready_time = CASE WHEN t.parked_by = 'signal' THEN
        excluded.next_process_time ELSE t.ready_time END, parked_by = nullif(t.parked_by, 'signal'),
        last_update_time = greatest(statement_timestamp(), t.create_time + 0.001 * interval '1 second')
    WHERE t.status IN ('CREATED', 'PROCESSING')
    AND coalesce(t.group_key, '') = coalesce(excluded.group_key, '')
    AND (t.parked_by IS NULL OR substr(t.parked_by, 1, 10) <> 'moving to ')
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_many (replace, timed, bounded) (one row)
WITH w AS (
    INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
        payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
        expire_time)
    SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
        u.context, u.group_key, u.tag, u.lease_seconds, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second',
        greatest(statement_timestamp(), coalesce(u.run_at::timestamptz, statement_timestamp())) +
        coalesce(u.delay, 0) * interval '1 second', NULL, greatest(statement_timestamp(),
        coalesce(u.run_at::timestamptz, statement_timestamp())) + coalesce(u.delay, 0) * interval '1 second' +
        u.ttl * interval '1 second'
    FROM (
        SELECT nextval((
            SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
        )::regclass) AS id, u.*
        FROM (
            SELECT %(reference_number)s::text AS reference_number, %(max_attempts)s::int AS max_attempts,
                %(priority)s::smallint AS priority, %(payload)s::jsonb AS payload, %(payload_type)s::text AS
                payload_type, %(context)s::jsonb AS context, %(group_key)s::text AS group_key, %(tag)s::text
                AS tag, %(lease_seconds)s::float8 AS lease_seconds, %(delay)s::float8 AS delay,
                %(run_at)s::text AS run_at, %(ttl)s::float8 AS ttl
        ) AS u
    ) AS u
    ORDER BY u.reference_number COLLATE "C"
    ON CONFLICT (reference_number, queue_name) DO UPDATE
    SET priority = excluded.priority, payload = excluded.payload, payload_type = excluded.payload_type,
        context = excluded.context, tag = excluded.tag, lease_seconds = excluded.lease_seconds,
        next_process_time = least(excluded.next_process_time, t.create_time + %(max_wait)s * interval '1
        second'), expire_time = least(excluded.next_process_time, t.create_time + %(max_wait)s * interval '1
        second') + extract(epoch FROM excluded.expire_time - excluded.next_process_time)::float8 * interval '1
        second', max_attempts = greatest(excluded.max_attempts, t.attempt + 1), ready_time = CASE WHEN
        t.parked_by = 'signal' THEN least(excluded.next_process_time, t.create_time + %(max_wait)s * interval
        '1 second') ELSE CASE WHEN t.parked_by IS NULL THEN least(excluded.next_process_time, t.create_time +
        %(max_wait)s * interval '1 second') END END, parked_by = nullif(t.parked_by, 'signal'),
        last_update_time = greatest(statement_timestamp(), t.create_time + 0.001 * interval '1 second')
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
    RETURNING id, last_update_time = create_time AS is_new, total_attempt > 0 OR signals > 0 AS has_run
)
SELECT count(*), count(*) FILTER (WHERE is_new), array_agg(id) FILTER (WHERE %(ids)s), array_agg(id) FILTER
    (WHERE has_run)
FROM w;

-- Statements.insert_many (error, whole) (one row)
INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
    u.context, u.group_key, u.tag, u.lease_seconds, statement_timestamp(), statement_timestamp(), NULL, NULL
FROM (
    SELECT nextval((
        SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
    )::regclass) AS id, u.*
    FROM (
        SELECT %(reference_number)s::text AS reference_number, %(max_attempts)s::int AS max_attempts,
            %(priority)s::smallint AS priority, %(payload)s::jsonb AS payload, %(payload_type)s::text AS
            payload_type, %(context)s::jsonb AS context, %(group_key)s::text AS group_key, %(tag)s::text AS
            tag, %(lease_seconds)s::float8 AS lease_seconds
    ) AS u
) AS u
ORDER BY u.reference_number COLLATE "C"
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, create_time, next_process_time, ready_time, attempt, reenqueue_attempt, total_attempt,
    last_update_time, reference_number, last_update_time = create_time AS is_new, total_attempt > 0 OR signals
    > 0 AS has_run;

-- Statements.insert_many (error, waits, whole) (one row)
INSERT INTO "dbtaskqueue_task" AS t (id, queue_name, reference_number, max_attempts, priority, payload,
    payload_type, context, group_key, tag, lease_seconds, next_process_time, ready_time, parked_by,
    expire_time)
SELECT u.id, %(queue_name)s, u.reference_number, u.max_attempts, u.priority, u.payload, u.payload_type,
    u.context, u.group_key, u.tag, u.lease_seconds, statement_timestamp(), NULL, 'parents', NULL
FROM (
    SELECT nextval((
        SELECT pg_get_serial_sequence('"dbtaskqueue_task"', 'id')
    )::regclass) AS id, u.*
    FROM (
        SELECT %(reference_number)s::text AS reference_number, %(max_attempts)s::int AS max_attempts,
            %(priority)s::smallint AS priority, %(payload)s::jsonb AS payload, %(payload_type)s::text AS
            payload_type, %(context)s::jsonb AS context, %(group_key)s::text AS group_key, %(tag)s::text AS
            tag, %(lease_seconds)s::float8 AS lease_seconds
    ) AS u
) AS u
ORDER BY u.reference_number COLLATE "C"
ON CONFLICT (reference_number, queue_name) DO NOTHING
RETURNING id, create_time, next_process_time, ready_time, attempt, reenqueue_attempt, total_attempt,
    last_update_time, reference_number, last_update_time = create_time AS is_new, total_attempt > 0 OR signals
    > 0 AS has_run;

-- Statements.moved (one row)
SELECT h.task_id
FROM "dbtaskqueue_taskhistory" AS h
JOIN (
    SELECT %(task_id)s::bigint AS task_id, %(token)s::bigint AS token
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
        SELECT %(task_id)s::bigint AS task_id, %(token)s::bigint AS token
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('PROCESSING')
    FOR NO KEY UPDATE OF t
) AS x
WHERE true
AND batch IS NOT NULL
AND status <> 'COMPLETED'
GROUP BY batch, queue_name, status;

-- Statements.outcome_of (one row)
SELECT t.id, t.status
FROM "dbtaskqueue_task" AS t
JOIN (
    SELECT %(task_id)s::bigint AS task_id, %(token)s::bigint AS token
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.start_time IS NOT NULL
AND (t.status NOT IN ('ERROR', 'POISON') OR t.poller_instance IS NOT NULL AND t.lost_leases <= 0);

-- Statements.put_off (one row)
UPDATE "dbtaskqueue_task" AS t
SET last_update_time = statement_timestamp(), next_process_time = statement_timestamp(), ready_time =
    statement_timestamp() + u.delay * interval '1 second', attempt = t.attempt - 1, status = CASE WHEN
    t.lost_leases > 0 THEN t.status ELSE 'CREATED' END, poller_instance = CASE WHEN t.lost_leases > 0 THEN
    t.poller_instance END, lost_leases = CASE WHEN t.lost_leases > 0 THEN t.lost_leases - 1 ELSE t.lost_leases
    END
FROM (
    SELECT %(task_id)s::bigint AS task_id, %(token)s::bigint AS token, %(delay)s::float8 AS delay
) AS u
WHERE t.id = u.task_id
AND t.total_attempt = u.token
AND t.status IN ('PROCESSING')
RETURNING id;

-- Statements.renew (one row)
UPDATE "dbtaskqueue_task"
SET next_process_time = statement_timestamp() + greatest(coalesce(lease_seconds, %(lease)s), %(min_lease)s) *
    interval '1 second'
WHERE id = ANY(ARRAY(
    SELECT t.id
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT %(task_id)s::bigint AS task_id, %(token)s::bigint AS token
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('PROCESSING')
    FOR NO KEY UPDATE OF t SKIP LOCKED
))
AND next_process_time > statement_timestamp() + %(since)s * interval '1 second'
RETURNING id;

-- Statements.to_history (one row)
INSERT INTO "dbtaskqueue_taskhistory" (location, task_id, queue_name, reference_number, status, attempt,
    reenqueue_attempt, total_attempt, max_attempts, priority, payload, payload_type, result, process_result,
    context, group_key, tag, poller_instance, create_time, next_process_time, last_update_time, lease_seconds,
    expire_time, start_time, finish_time)
SELECT %(location)s, t.id, t.queue_name, t.reference_number, 'COMPLETED', t.attempt, t.reenqueue_attempt,
    t.total_attempt, t.max_attempts, t.priority, t.payload, t.payload_type, u.result_json::jsonb, NULL,
    t.context, t.group_key, t.tag, t.poller_instance, t.create_time, t.next_process_time,
    statement_timestamp(), t.lease_seconds, t.expire_time, t.start_time, statement_timestamp()
FROM "dbtaskqueue_task" AS t
JOIN (
    SELECT %(task_id)s::bigint AS task_id, %(token)s::bigint AS token, %(result_json)s::text AS result_json
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.status IN ('PROCESSING')
FOR NO KEY UPDATE OF t;

-- Statements.unlocked (one row)
SELECT t.id
FROM "dbtaskqueue_task" AS t
JOIN (
    SELECT %(task_id)s::bigint AS task_id, %(token)s::bigint AS token
) AS u
ON t.id = u.task_id
AND t.total_attempt = u.token
WHERE t.status IN ('PROCESSING')
FOR NO KEY UPDATE OF t SKIP LOCKED;

-- Statements.write (one row)
UPDATE "dbtaskqueue_task" AS t
SET status = u.new_status, last_update_time = statement_timestamp(), parked_by = CASE WHEN u.signals_seen <>
    coalesce(t.signals, 0) THEN NULL ELSE u.park_reason END, ready_time = CASE WHEN u.new_status <> 'CREATED'
    OR CASE WHEN u.signals_seen <> coalesce(t.signals, 0) THEN NULL ELSE u.park_reason END IS NOT NULL THEN
    NULL WHEN u.delay IS NULL THEN t.ready_time ELSE statement_timestamp() + CASE WHEN u.signals_seen <>
    coalesce(t.signals, 0) THEN 0 ELSE coalesce(u.delay, 0) END * interval '1 second' END, next_process_time =
    CASE WHEN u.new_status = 'CREATED' THEN statement_timestamp() + CASE WHEN u.signals_seen <>
    coalesce(t.signals, 0) THEN 0 ELSE coalesce(u.delay, 0) END * interval '1 second' WHEN u.new_status IN
    ('ERROR', 'POISON') THEN t.ready_time ELSE t.next_process_time END, expire_time = CASE WHEN t.expire_time
    IS NULL OR u.delay IS NULL THEN t.expire_time ELSE t.expire_time + extract(epoch FROM
    statement_timestamp() + CASE WHEN u.signals_seen <> coalesce(t.signals, 0) THEN 0 ELSE coalesce(u.delay,
    0) END * interval '1 second' - t.ready_time)::float8 * interval '1 second' END, attempt = CASE WHEN
    u.attempts_added IS NULL THEN 0 WHEN u.new_status = 'CREATED' THEN least(t.attempt + u.attempts_added,
    t.max_attempts - 1) ELSE t.attempt + u.attempts_added END, reenqueue_attempt = t.reenqueue_attempt +
    u.reenqueues_added, process_result = CASE WHEN u.new_status = 'CREATED' AND u.delay IS NULL THEN
    t.process_result ELSE u.result_text END, result = CASE WHEN u.new_status = 'CREATED' AND u.delay IS NULL
    THEN t.result ELSE u.result_json::jsonb END, poller_instance = CASE WHEN u.new_status = 'CREATED' THEN
    NULL ELSE t.poller_instance END, finish_time = CASE WHEN u.new_status = 'CREATED' THEN NULL ELSE
    statement_timestamp() END, lost_leases = CASE WHEN u.attempts_added = -1 AND u.delay IS NULL THEN
    t.lost_leases ELSE u.deaths END, final_status = nullif(u.new_status, 'CREATED'), fingerprint =
    coalesce(u.failure_key, t.fingerprint)
FROM (
    SELECT %(task_id)s::bigint AS task_id, %(token)s::bigint AS token, %(new_status)s::text AS new_status,
        %(delay)s::float8 AS delay, %(attempts_added)s::int AS attempts_added, %(reenqueues_added)s::int AS
        reenqueues_added, %(deaths)s::int AS deaths, %(result_text)s::text AS result_text,
        %(result_json)s::text AS result_json, %(park_reason)s::text AS park_reason, %(failure_key)s::text AS
        failure_key, %(signals_seen)s::int AS signals_seen
) AS u
WHERE t.id = u.task_id
AND t.total_attempt = u.token
AND t.status IN ('PROCESSING')
RETURNING id, watched
AND final_status IS NOT NULL;

-- Statements.ages (without some payload types)
SELECT b.p, extract(epoch FROM statement_timestamp() - x.ready_time)::float8
FROM unnest(%(priorities)s::smallint[], %(times)s::timestamptz[], %(ids)s::bigint[]) AS b(p, bound_time,
    bound_id)
CROSS JOIN LATERAL (
    SELECT ready_time
    FROM "dbtaskqueue_task"
    WHERE queue_name = %(queue_name)s
    AND priority = b.p
    AND (ready_time, id) > (b.bound_time, b.bound_id)
    AND ready_time <= statement_timestamp()
    AND next_process_time <= statement_timestamp()
    AND attempt < max_attempts
    AND (tag IS NULL OR tag = ANY(%(tags)s::text[]))
    AND NOT coalesce(payload_type, '') = ANY(%(without)s::text[])
    AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = %(queue_name)s
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
    )
    ORDER BY ready_time, id
    LIMIT 1
) AS x;

-- Statements.candidates (without some payload types)
SELECT x.*
FROM unnest(%(priorities)s::smallint[], %(times)s::timestamptz[], %(ids)s::bigint[]) AS b(p, bound_time,
    bound_id)
CROSS JOIN LATERAL (
    SELECT id, total_attempt, priority, ready_time
    FROM "dbtaskqueue_task"
    WHERE queue_name = %(queue_name)s
    AND priority = b.p
    AND (ready_time, id) > (b.bound_time, b.bound_id)
    AND ready_time <= statement_timestamp()
    AND next_process_time <= statement_timestamp()
    AND attempt < max_attempts
    AND (tag IS NULL OR tag = ANY(%(tags)s::text[]))
    AND NOT coalesce(payload_type, '') = ANY(%(without)s::text[])
    AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = %(queue_name)s
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
    )
    ORDER BY ready_time, id
    LIMIT %(limit)s
) AS x
LIMIT %(limit)s;

-- Statements.checkout_beside_others (without some payload types)
WITH b AS MATERIALIZED (
    SELECT DISTINCT
    ON (p) p, bound_time, bound_id
    FROM (
        SELECT b.*
        FROM unnest(%(priorities)s::smallint[], %(times)s::timestamptz[], %(ids)s::bigint[]) AS b(p,
            bound_time, bound_id)
        UNION ALL
        SELECT taken_priority, taken_time, taken_id
        FROM "dbtaskqueue_poller"
        WHERE taken_queue = %(queue_name)s
        AND taken_time <= statement_timestamp()
    ) AS m
    WHERE p = ANY(%(priorities)s::smallint[])
    ORDER BY p, bound_time DESC, bound_id DESC
), found AS MATERIALIZED (
    SELECT x.*
    FROM b
    CROSS JOIN LATERAL (
        SELECT ctid, priority, ready_time, id
        FROM "dbtaskqueue_task"
        WHERE queue_name = %(queue_name)s
        AND priority = b.p
        AND (ready_time, id) > (b.bound_time, b.bound_id)
        AND ready_time <= statement_timestamp()
        AND next_process_time <= statement_timestamp()
        AND attempt < max_attempts
        AND (tag IS NULL OR tag = ANY(%(tags)s::text[]))
        AND NOT coalesce(payload_type, '') = ANY(%(without)s::text[])
        AND NOT EXISTS (
            SELECT 1
            FROM "dbtaskqueue_queue" AS q
            WHERE q.name = %(queue_name)s
            AND q.paused_time IS NOT NULL
            AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
        )
        AND age(xmax) > (
            SELECT age(pg_snapshot_xmin(pg_current_snapshot())::xid)
        )
        ORDER BY ready_time, id
        LIMIT %(limit)s
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS x
    LIMIT %(limit)s
), told AS (
    UPDATE "dbtaskqueue_poller"
    SET taken_queue = %(queue_name)s, (taken_priority, taken_time, taken_id) = (
        SELECT priority, ready_time, id
        FROM found
        ORDER BY priority DESC, ready_time DESC, id DESC
        LIMIT 1
    )
    WHERE instance IN (
        SELECT p.instance
        FROM "dbtaskqueue_poller" AS p
        WHERE p.instance = %(poller_instance)s
        AND EXISTS (
            SELECT
            FROM found
        )
        FOR NO KEY UPDATE OF p SKIP LOCKED
    )
) UPDATE "dbtaskqueue_task"
SET status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time =
    statement_timestamp(), last_update_time = statement_timestamp(), next_process_time = statement_timestamp()
    + greatest(coalesce(lease_seconds, %(lease)s), %(min_lease)s) * interval '1 second', poller_instance =
    %(poller_instance)s, lost_leases = CASE WHEN status = 'PROCESSING' THEN least(abs(lost_leases) + 1, 1000)
    ELSE -abs(lost_leases) END
WHERE ctid = ANY(ARRAY(
    SELECT ctid
    FROM found
))
RETURNING id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, payload::text, context::text, create_time::text, start_time::text, next_process_time::text,
    poller_instance, ready_time::text, group_key, expire_time::text, lease_seconds, lost_leases;

-- Statements.checkout_of_many (without some payload types)
UPDATE "dbtaskqueue_task"
SET status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time =
    statement_timestamp(), last_update_time = statement_timestamp(), next_process_time = statement_timestamp()
    + greatest(coalesce(lease_seconds, %(lease)s), %(min_lease)s) * interval '1 second', poller_instance =
    %(poller_instance)s, lost_leases = CASE WHEN status = 'PROCESSING' THEN least(abs(lost_leases) + 1, 1000)
    ELSE -abs(lost_leases) END
WHERE ctid = ANY(ARRAY(
    SELECT y.*
    FROM unnest(%(queues)s::text[], %(limits)s::int[], %(firsts)s::int[], %(lasts)s::int[]) AS l(q, max_tasks,
        b1, b2)
    CROSS JOIN LATERAL (
        SELECT x.*
        FROM unnest((%(priorities)s::smallint[])[l.b1:l.b2], (%(times)s::timestamptz[])[l.b1:l.b2],
            (%(ids)s::bigint[])[l.b1:l.b2]) AS b(p, bound_time, bound_id)
        CROSS JOIN LATERAL (
            SELECT ctid
            FROM "dbtaskqueue_task"
            WHERE queue_name = l.q
            AND priority = b.p
            AND (ready_time, id) > (b.bound_time, b.bound_id)
            AND ready_time <= statement_timestamp()
            AND next_process_time <= statement_timestamp()
            AND attempt < max_attempts
            AND (tag IS NULL OR tag = ANY(%(tags)s::text[]))
            AND NOT coalesce(payload_type, '') = ANY(%(without)s::text[])
            ORDER BY ready_time, id
            LIMIT l.max_tasks
            FOR NO KEY UPDATE SKIP LOCKED
        ) AS x
        LIMIT l.max_tasks
    ) AS y
    WHERE l.q <> ALL(ARRAY(
        SELECT q.name
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = ANY(%(queues)s)
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
    ))
    LIMIT %(limit)s
))
RETURNING id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, payload::text, context::text, create_time::text, start_time::text, next_process_time::text,
    poller_instance, ready_time::text, group_key, expire_time::text, lease_seconds, lost_leases;

-- Statements.checkout_optimistic (without some payload types)
UPDATE "dbtaskqueue_task"
SET status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time =
    statement_timestamp(), last_update_time = statement_timestamp(), next_process_time = statement_timestamp()
    + greatest(coalesce(lease_seconds, %(lease)s), %(min_lease)s) * interval '1 second', poller_instance =
    %(poller_instance)s, lost_leases = CASE WHEN status = 'PROCESSING' THEN least(abs(lost_leases) + 1, 1000)
    ELSE -abs(lost_leases) END
WHERE id = ANY(ARRAY(
    SELECT t.id
    FROM "dbtaskqueue_task" AS t
    JOIN (
        SELECT *
        FROM (
            SELECT *
            FROM jsonb_to_recordset(%(rows)s::jsonb) AS u(task_id bigint, token bigint)
            LIMIT (
                SELECT 1000000
            )
        ) AS u
        LIMIT (
            SELECT 1000000
        )
    ) AS u
    ON t.id = u.task_id
    AND t.total_attempt = u.token
    WHERE t.status IN ('CREATED', 'PROCESSING')
    AND (ready_time <= statement_timestamp() AND next_process_time <= statement_timestamp() AND attempt <
        max_attempts AND (tag IS NULL OR tag = ANY(%(tags)s::text[])) AND NOT coalesce(payload_type, '') =
        ANY(%(without)s::text[]) AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = %(queue_name)s
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
    )) IS TRUE
    FOR NO KEY UPDATE OF t SKIP LOCKED
))
RETURNING id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, payload::text, context::text, create_time::text, start_time::text, next_process_time::text,
    poller_instance, ready_time::text, group_key, expire_time::text, lease_seconds, lost_leases;

-- Statements.checkout_skip_locked (without some payload types)
UPDATE "dbtaskqueue_task"
SET status = 'PROCESSING', attempt = attempt + 1, total_attempt = total_attempt + 1, start_time =
    statement_timestamp(), last_update_time = statement_timestamp(), next_process_time = statement_timestamp()
    + greatest(coalesce(lease_seconds, %(lease)s), %(min_lease)s) * interval '1 second', poller_instance =
    %(poller_instance)s, lost_leases = CASE WHEN status = 'PROCESSING' THEN least(abs(lost_leases) + 1, 1000)
    ELSE -abs(lost_leases) END
WHERE ctid = ANY(ARRAY(
    SELECT x.*
    FROM unnest(%(priorities)s::smallint[], %(times)s::timestamptz[], %(ids)s::bigint[]) AS b(p, bound_time,
        bound_id)
    CROSS JOIN LATERAL (
        SELECT ctid
        FROM "dbtaskqueue_task"
        WHERE queue_name = %(queue_name)s
        AND priority = b.p
        AND (ready_time, id) > (b.bound_time, b.bound_id)
        AND ready_time <= statement_timestamp()
        AND next_process_time <= statement_timestamp()
        AND attempt < max_attempts
        AND (tag IS NULL OR tag = ANY(%(tags)s::text[]))
        AND NOT coalesce(payload_type, '') = ANY(%(without)s::text[])
        AND NOT EXISTS (
            SELECT 1
            FROM "dbtaskqueue_queue" AS q
            WHERE q.name = %(queue_name)s
            AND q.paused_time IS NOT NULL
            AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
        )
        ORDER BY ready_time, id
        LIMIT %(limit)s
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS x
    LIMIT %(limit)s
))
RETURNING id, queue_name, reference_number, attempt, reenqueue_attempt, total_attempt, max_attempts, priority,
    payload_type, payload::text, context::text, create_time::text, start_time::text, next_process_time::text,
    poller_instance, ready_time::text, group_key, expire_time::text, lease_seconds, lost_leases;

-- Statements.first_ready (without some payload types)
SELECT id, total_attempt
FROM "dbtaskqueue_task"
WHERE queue_name = %(queue_name)s
AND ready_time IS NOT NULL
AND ready_time <= statement_timestamp()
AND next_process_time <= statement_timestamp()
AND attempt < max_attempts
AND (tag IS NULL OR tag = ANY(%(tags)s::text[]))
AND NOT coalesce(payload_type, '') = ANY(%(without)s::text[])
AND NOT EXISTS (
    SELECT 1
    FROM "dbtaskqueue_queue" AS q
    WHERE q.name = %(queue_name)s
    AND q.paused_time IS NOT NULL
    AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
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
    AND ready_time <= statement_timestamp()
    AND next_process_time <= statement_timestamp()
    AND attempt < max_attempts
    AND (tag IS NULL OR tag = ANY(%(tags)s::text[]))
    AND NOT coalesce(payload_type, '') = ANY(%(without)s::text[])
    AND NOT EXISTS (
        SELECT 1
        FROM "dbtaskqueue_queue" AS q
        WHERE q.name = %(queue_name)s
        AND q.paused_time IS NOT NULL
        AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
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
AND ready_time <= statement_timestamp() + %(horizon)s * interval '1 second'
AND (status = 'PROCESSING' OR next_process_time <= statement_timestamp() + %(horizon)s * interval '1 second'
    AND attempt < max_attempts)
AND (tag IS NULL OR tag = ANY(%(tags)s::text[]))
AND NOT coalesce(payload_type, '') = ANY(%(without)s::text[])
AND NOT EXISTS (
    SELECT 1
    FROM "dbtaskqueue_queue" AS q
    WHERE q.name = %(queue_name)s
    AND q.paused_time IS NOT NULL
    AND (q.paused_until IS NULL OR q.paused_until > statement_timestamp())
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
    AND status = ANY(%(statuses)s::text[])
    AND coalesce(finish_time, last_update_time) < %(cutoff)s::timestamptz
    AND (%(every)s OR queue_name = ANY(%(queues)s::text[]))
    ORDER BY id
    LIMIT %(limit)s
) AS x;

-- ArchiveStatements.lock (history)
INSERT INTO archived_gone (location, id, row_id)
SELECT k.location, k.id, t.id
FROM "dbtaskqueue_taskhistory" AS t
JOIN archived_key AS k
ON t.task_id = k.id
AND t.location = k.location
AND t.total_attempt = k.total_attempt
AND t.status = k.status
AND t.last_update_time = k.last_update_time
AND t.status IN ('COMPLETED', 'ERROR', 'POISON')
FOR UPDATE OF t SKIP LOCKED;

-- ArchiveStatements.note_locked (history)
SELECT 1;

-- ArchiveStatements.remove_locked (history)
DELETE
FROM "dbtaskqueue_taskhistory"
WHERE id IN (
    SELECT row_id
    FROM archived_gone
);

-- ArchiveStatements.remove_old (history)
WITH gone AS (
    DELETE
    FROM "dbtaskqueue_taskhistory"
    WHERE id BETWEEN %(first_id)s AND %(last_id)s
    AND status IN ('COMPLETED', 'ERROR', 'POISON')
    AND status = ANY(%(statuses)s::text[])
    AND coalesce(finish_time, last_update_time) < %(cutoff)s::timestamptz
    AND (%(every)s OR queue_name = ANY(%(queues)s::text[]))
    AND {older}
    RETURNING task_id AS k, total_attempt AS n
), noted AS (
    SELECT 1
)
SELECT count(*), coalesce(sum(k), 0), coalesce(bit_xor(k), 0), coalesce(sum(n), 0)
FROM gone;

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

-- pipeline.HORIZON_SQL
SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint;

-- pipeline.window
status IN ('COMPLETED', 'ERROR', 'POISON')
AND watched IS NOT TRUE
AND mod(xmin::text::bigint - 1000 + 4294967296, 4294967296) < 1000;

-- pipeline.window (from the beginning)
mod(xmin::text::bigint - 2000 + 4294967296, 4294967296) >=
    pg_snapshot_xmax(pg_current_snapshot())::text::bigint - 2000;

-- pipeline.RESET_ABSENT_SQL
UPDATE "dbtaskqueue_streamposition"
SET position = NULL
WHERE position IS NOT NULL
AND read_time < statement_timestamp() - interval '7 days';

-- pipeline.ABSENT_LOCATIONS_SQL
SELECT DISTINCT location
FROM "dbtaskqueue_streamposition"
WHERE read_time < statement_timestamp() - interval '7 days';

-- pipeline.ABSENT_STREAMS_SQL
SELECT location, name, extract(epoch FROM statement_timestamp() - read_time)::int
FROM "dbtaskqueue_streamposition"
WHERE read_time < statement_timestamp() - interval '7 days'
ORDER BY read_time
LIMIT 10;

-- pipeline.EVENT_SCHEMA_SQL
SELECT relnamespace::regnamespace::text
FROM pg_class
WHERE oid = to_regclass('"dbtaskqueue_finishevent"');

-- FinishEventStatements.advance
UPDATE "dbtaskqueue_streamposition"
SET position = greatest(position, %(position)s)
WHERE location = %(location)s
AND name = %(name)s
AND position IS NOT NULL;

-- FinishEventStatements.begin
UPDATE "dbtaskqueue_streamposition"
SET position = pg_snapshot_xmax(pg_current_snapshot())::text::bigint
WHERE location = %(location)s
AND position IS NULL
AND NOT read_time < statement_timestamp() - interval '7 days';

-- FinishEventStatements.clear
DELETE
FROM "dbtaskqueue_finishevent"
WHERE location = %(location)s;

-- FinishEventStatements.drop_trigger (public)
DROP FUNCTION IF EXISTS public.dbtaskqueue_finish_31417f7f() CASCADE;

-- FinishEventStatements.has_trigger
SELECT EXISTS (
    SELECT 1
    FROM pg_trigger
    WHERE tgrelid = to_regclass('"dbtaskqueue_task"')
    AND tgname = 'dbtaskqueue_finish'
    AND tgenabled = 'A'
);

-- FinishEventStatements.lock_positions
SELECT name
FROM "dbtaskqueue_streamposition"
WHERE location = %(location)s
ORDER BY id
FOR UPDATE;

-- FinishEventStatements.read_position
UPDATE "dbtaskqueue_streamposition"
SET read_time = statement_timestamp()
WHERE location = %(location)s
AND name = %(name)s
RETURNING CASE WHEN EXISTS (
    SELECT 1
    FROM pg_trigger
    WHERE tgrelid = to_regclass('"dbtaskqueue_task"')
    AND tgname = 'dbtaskqueue_finish'
    AND tgenabled = 'A'
) THEN position END;

-- FinishEventStatements.register
INSERT INTO "dbtaskqueue_streamposition" (location, name)
VALUES (%(location)s, %(name)s)
ON CONFLICT (location, name) DO UPDATE
SET read_time = statement_timestamp();

-- FinishEventStatements.trim
DELETE
FROM "dbtaskqueue_finishevent"
WHERE ctid = ANY(ARRAY(
    SELECT ctid
    FROM "dbtaskqueue_finishevent"
    WHERE location = %(location)s
    AND transaction_id < coalesce((
        SELECT min(position)
        FROM "dbtaskqueue_streamposition"
        WHERE location = %(location)s
    ), pg_snapshot_xmin(pg_current_snapshot())::text::bigint)
    ORDER BY transaction_id
    LIMIT %(limit)s::bigint
));

-- FinishEventStatements.unknown_positions
UPDATE "dbtaskqueue_streamposition"
SET position = NULL
WHERE location = %(location)s;

-- FinishEventStatements.unregister
DELETE
FROM "dbtaskqueue_streamposition"
WHERE location = %(location)s
AND name = %(name)s;

-- FinishEventStatements.finished_in (by events)
status IN ('COMPLETED', 'ERROR', 'POISON')
AND id = ANY(ARRAY(
    SELECT e.task_id
    FROM "dbtaskqueue_finishevent" AS e
    WHERE e.location = 'dbtaskqueue.task'
    AND e.transaction_id >= 1000
    AND e.transaction_id < 2000 EXCEPT
    SELECT e.task_id
    FROM "dbtaskqueue_finishevent" AS e
    WHERE e.location = 'dbtaskqueue.task'
    AND e.transaction_id >= 2000
));

-- FinishEventStatements.finished_in (a scan)
status IN ('COMPLETED', 'ERROR', 'POISON')
AND (mod(xmin::text::bigint - 1000 + 4294967296, 4294967296) <
    pg_snapshot_xmax(pg_current_snapshot())::text::bigint - 1000 OR watched)
AND NOT EXISTS (
    SELECT 1
    FROM "dbtaskqueue_finishevent" AS e
    WHERE e.location = 'dbtaskqueue.task'
    AND e.task_id = "dbtaskqueue_task".id
    AND e.transaction_id >= 2000
);

-- FinishEventStatements.finished_in (the first scan)
status IN ('COMPLETED', 'ERROR', 'POISON')
AND NOT EXISTS (
    SELECT 1
    FROM "dbtaskqueue_finishevent" AS e
    WHERE e.location = 'dbtaskqueue.task'
    AND e.task_id = "dbtaskqueue_task".id
    AND e.transaction_id >= 2000
);

-- pipeline.older
pg_snapshot_xmax(pg_current_snapshot())::text::bigint - 1000 < 2147483648
AND mod(xmin::text::bigint - 1000 + 4294967296, 4294967296) >= 2147483648;
