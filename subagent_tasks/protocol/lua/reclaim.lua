-- reclaim: takes a run from a dead worker and queues it again.
-- KEYS
--   record      hash    the run's record
--   processes   zset    heartbeats
--   driven      set     what the dead worker drove
--   queued      zset    runs waiting in the queue
--   queue       list    the Celery queue
-- ARGV
--   id        the run id
--   worker    the dead worker's process id
--   token     the fencing token found in the record
--   message   the Celery message, or empty when the broker is another server
-- RETURNS
--   requeued
--   stop kill: it was killed, so it is to be settled
--   not_driven: it is no longer that worker's, or the worker lives
-- PUBLISHES
--   nothing; pushes the message
local run = record('state', 'worker', 'token', 'attempt', 'reclaimed', 'kill')
if run.reclaimed == A.token then return { 'requeued' } end
if run.worker ~= A.worker or not departs[run.state] then
  redis.call('SREM', K.driven, A.id)
  return { 'not_driven' }
end
if run.token ~= A.token or is_alive(run.worker) then return { 'not_driven' } end
if run.kill then return { 'stop', 'kill' } end
redis.call('HSET', K.record, 'state', 'queued', 'worker', '', 'token', run.token + 1, 'attempt', run.attempt + 1,
  'reclaimed', A.token)
redis.call('SREM', K.driven, A.id)
enqueue(A.id, K.queued, K.queue, A.message, now_ms())
return { 'requeued' }
