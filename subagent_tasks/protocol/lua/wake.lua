-- wake: queues a suspended run whose alarm is due, whatever it still awaits.
-- KEYS
--   record       hash  the run's record
--   own_awaited  set   the runs it waits for
--   alarms       zset  suspended runs, by when they go on at the latest
--   queued       zset  runs waiting in the queue
--   queue        list  the Celery queue
-- ARGV
--   id       the run id
--   alarm    the alarm that is due, as found in `alarms`
--   message  the Celery message, or empty when the broker is another server
-- RETURNS
--   woken
--   moved_on: it is not suspended (any more), or has another alarm by now
-- PUBLISHES
--   nothing; pushes the message
local run = record('state', 'woken')
if run.woken == A.alarm then return { 'woken' } end
local alarm = redis.call('ZSCORE', K.alarms, A.id)
if not alarm or tonumber(alarm) ~= tonumber(A.alarm) then return { 'moved_on' } end
redis.call('ZREM', K.alarms, A.id)
if not departs[run.state] then return { 'moved_on' } end
redis.call('HSET', K.record, 'state', 'queued', 'woken', A.alarm)
redis.call('DEL', K.own_awaited)
enqueue(A.id, K.queued, K.queue, A.message, now_ms())
return { 'woken' }
