-- release: the driver hands a run back; any worker may go on with it.
-- KEYS
--   record      hash    the run's record
--   driven      set     what the worker drives
--   queued      zset    runs waiting in the queue
--   queue       list    the Celery queue
-- ARGV
--   id        the run id
--   token     the driver's fencing token
--   resting   yes: its beginning was told, so the next driver does not tell it again; or empty
--   message   the Celery message, or empty when the broker is another server
-- RETURNS
--   released
--   stop kill: it was killed, so the driver settles it
--   stale
-- PUBLISHES
--   nothing; pushes the message
local run = record('state', 'token', 'released', 'kill')
if run.released == A.token then return { 'released' } end
if not departs[run.state] or run.token ~= A.token then return { 'stale' } end
if run.kill then return { 'stop', 'kill' } end
redis.call('HSET', K.record, 'state', 'queued', 'worker', '', 'token', run.token + 1, 'released', A.token)
if A.resting ~= '' then redis.call('HSET', K.record, 'resting', A.resting) end
redis.call('SREM', K.driven, A.id)
enqueue(A.id, K.queued, K.queue, A.message, now_ms())
return { 'released' }
