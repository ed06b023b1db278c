-- kill: sets the durable flag of a run. What nobody drives is settled here; a driver is rung.
-- KEYS
--   record      hash    the run's record
--   inbox       stream  the run's inbox
--   transcript  stream  the run's transcript
--   result      string  the run's Celery result
--   queued      zset    runs waiting in the queue
--   flagged     set     driven runs with an unanswered kill
--   owner       hash    the owner's record
--   jobs        zset    the owner's jobs
--   active      set     the owner's unsettled jobs
--   unsettled   set     the owner's unsettled runs
--   notices     stream  the owner's notices
--   cursors     hash    the owner's cursors
--   expiring    zset    settled jobs by expiry
-- ARGV
--   id            the run id
--   kill_id       made for this kill: a repeat is recognised by it
--   reason        why, for the run and its record
--   authority     the session that asks and must own the run, or empty for an operator
--   told          kill: the owner's model asked and needs no notice; empty: somebody else did
--   ring_prefix   the process channel's name without the process id
--   settle_id, status, detail, outcome, event, result, notice, owner_channel, announcement, expiry, retention_ms,
--   max_notices
--                 as in settle: the ending, should nobody drive it
-- RETURNS
--   killed: settled here
--   requested: flagged; the driver ends it
--   already_finished
--   unauthorized | unknown
-- PUBLISHES
--   the run id on its driver's channel; as settle when settled here
local run = record('state', 'worker', 'seq', 'mode', 'reported', 'kill', 'owner', 'settle_id', 'notice_id')
if not run.state then return { 'unknown' } end
if A.authority ~= '' and run.owner ~= A.authority then return { 'unauthorized' } end
if run.state == 'settled' then
  if run.settle_id == A.settle_id then return { 'killed' } end
  if run.kill == A.kill_id then return { 'requested' } end
  if A.told ~= '' then
    redis.call('HSET', K.record, 'reported', 'read')
    if run.notice_id then redis.call('XDEL', K.notices, run.notice_id) end
  end
  return { 'already_finished' }
end

if not run.kill then
  redis.call('HSET', K.record, 'kill', A.kill_id, 'kill_reason', A.reason)
end
if A.told ~= '' and not run.reported then
  run.reported = A.told
  redis.call('HSET', K.record, 'reported', A.told)
end
if departs[run.state] then
  finish(run)
  return { 'killed' }
end
redis.call('SADD', K.flagged, A.id)
if not run.kill then redis.call('PUBLISH', A.ring_prefix .. run.worker, A.id) end
return { 'requested' }
