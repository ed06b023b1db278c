-- republish: sends the Celery message of queued work again that lost it; what has no record is queued no more.
-- KEYS
--   record  hash  the run's record
--   queued  zset  runs waiting in the queue
--   queue   list  the Celery queue
-- ARGV
--   id        the run id
--   since_ms  the queue time the sweeper saw: a repeat is recognised by it
--   message   the Celery message, or empty when the broker is another server
-- RETURNS
--   republished
--   moved_on: it was claimed, settled or queued anew meanwhile, or its record is gone
-- PUBLISHES
--   nothing; pushes the message
local run = record('state', 'republished')
if not run.state then
  -- Its record was removed from outside. Left in the queue, every sweep would find it.
  redis.call('ZREM', K.queued, A.id)
  return { 'moved_on' }
end
if run.republished == A.since_ms then return { 'republished' } end
local since = redis.call('ZSCORE', K.queued, A.id)
if run.state ~= 'queued' or not since or tonumber(since) ~= tonumber(A.since_ms) then return { 'moved_on' } end
redis.call('HSET', K.record, 'republished', A.since_ms)
enqueue(A.id, K.queued, K.queue, A.message, now_ms())
return { 'republished' }
