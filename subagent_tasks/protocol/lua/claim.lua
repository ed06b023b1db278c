-- claim: makes a living worker the driver of a run that nobody drives.
-- KEYS
--   record      hash    the run's record
--   result      string  the run's Celery result
--   processes   zset    heartbeats
--   driven      set     what the worker drives
--   queued      zset    runs waiting in the queue
--   overtaken   hash    the queue's high-water marks
--   cascade     set     runs whose descendants must end
-- ARGV
--   id          the run id
--   worker      the worker's process id
--   claim_id    made for this claim: a repeat is recognised by it
--   version     the newest record version this worker reads
--   started     the Celery result while the run goes on
--   slack_ms    how old a high-water mark must be to count
-- RETURNS
--   claimed <token> <record, name and value in turn>
--   nothing_to_do <gone | settled | suspended | driven | no_heartbeat | unsupported | ended_above>
-- PUBLISHES
--   nothing
local run = record('state', 'worker', 'token', 'claim_id', 'version', 'attempt', 'started_at', 'resting', 'episode',
  'path')
if not run.state then return { 'nothing_to_do', 'gone' } end
if run.state == 'driven' and run.worker == A.worker and run.claim_id == A.claim_id then
  return { 'claimed', tonumber(run.token), redis.call('HGETALL', K.record) }
end
if tonumber(run.version) > tonumber(A.version) then return { 'nothing_to_do', 'unsupported' } end
if not is_alive(A.worker) then return { 'nothing_to_do', 'no_heartbeat' } end
if not departs[run.state] then return { 'nothing_to_do', run.state } end
if run.state == 'driven' and is_alive(run.worker) then return { 'nothing_to_do', 'driven' } end
if is_ended_above(run.path) then return { 'nothing_to_do', 'ended_above' } end

local now = now_ms()
if run.state == 'driven' then
  redis.call('HSET', K.record, 'attempt', run.attempt + 1)
end
local since = redis.call('ZSCORE', K.queued, A.id)
if since then
  redis.call('ZREM', K.queued, A.id)
  -- Two marks behind the newest one, so that a mark that counts is always at least the slack old.
  local mark = redis.call('HMGET', K.overtaken, 'at', 'pending', 'high')
  local high = math.max(tonumber(mark[3] or 0), tonumber(since))
  if not mark[1] or now - tonumber(mark[1]) >= tonumber(A.slack_ms) then
    redis.call('HSET', K.overtaken, 'at', now, 'confirmed', mark[2] or 0, 'pending', mark[3] or 0, 'high', high)
  else
    redis.call('HSET', K.overtaken, 'high', high)
  end
  redis.call('PEXPIRE', K.overtaken, 86400000)
end

local token = run.token + 1
redis.call('HSET', K.record, 'state', 'driven', 'worker', A.worker, 'claim_id', A.claim_id, 'token', token,
  'claimed_at', now, 'driver', A.worker, 'episode', run.resting and run.episode or A.claim_id)
redis.call('HDEL', K.record, 'resting')
if not run.started_at then redis.call('HSET', K.record, 'started_at', now) end
redis.call('SADD', K.driven, A.id)
-- STARTED keeps a stray plain `revoke` from storing REVOKED over a run that goes on.
redis.call('SET', K.result, A.started)
return { 'claimed', token, redis.call('HGETALL', K.record) }
