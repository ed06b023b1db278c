-- kill: sets the durable flag of a run. What nobody drives is settled here; a driver is rung.
-- KEYS
--   record         hash    the run's record
--   inbox          stream  the run's inbox
--   transcript     stream  the run's transcript
--   result         string  the run's Celery result
--   processes      zset    heartbeats
--   queued         zset    runs waiting in the queue
--   flagged        set     driven runs with an unanswered kill
--   own_jobs       zset    the run's own jobs
--   own_unsettled  set     the run's own unsettled runs
--   own_awaited    set     those of them it waits for
--   alarms         zset    suspended runs, by when they go on at the latest
--   cascade        set     runs whose descendants must end
--   held           set     foreground runs whose caller the host process is
--   owner          hash    the owner's record
--   jobs           zset    the owner's jobs
--   active         set     the owner's unsettled jobs
--   unsettled      set     the owner's unsettled runs
--   awaited        set     those of them the owner waits for, when it is a suspended child
--   notices        stream  the owner's notices; of a child, its inbox
--   cursors        hash    the owner's cursors
--   owner_queued   zset    runs waiting in the owner's queue, when the owner is a child
--   owner_queue    list    the Celery queue of an owner that is a child
--   expiring       zset    settled jobs by expiry
-- ARGV
--   id            the run id
--   kill_id       made for this kill: a repeat is recognised by it
--   reason        why, for the run and its record
--   authority     the session that asks and must own the run, or empty for an operator
--   told          kill: the owner's model asked and needs no notice; empty: somebody else did
--   lost_caller   the host process that waited for the run and must have been silent for two leases; or empty
--   lease_ms      how long a beat counts
--   ring_prefix   the process channel's name without the process id
--   settle_id, status, detail, outcome, event, result, notice, caller, owner_id, owner_channel, announcement, expiry,
--   wake_message, retention_ms, max_notices
--                 as in settle: the ending, should nobody drive it
-- RETURNS
--   killed <what follows, as in settle>: settled here
--   requested <cascade or nothing>: flagged; the driver ends it
--   already_finished
--   not_lost: the caller came back, elsewhere or in time
--   unauthorized | unknown
-- PUBLISHES
--   the run id on its driver's channel; as settle when settled here
local run = record('state', 'worker', 'seq', 'mode', 'reported', 'kill', 'owner', 'settle_id', 'notice_id', 'caller',
  'follows', 'untold')
if not run.state then return { 'unknown' } end
if A.authority ~= '' and run.owner ~= A.authority then return { 'unauthorized' } end
if run.state == 'settled' then
  if run.settle_id == A.settle_id then return { 'killed', run.follows or '' } end
  if run.kill == A.kill_id then return { 'requested', '' } end
  if A.told ~= '' then
    redis.call('HSET', K.record, 'reported', 'read')
    if run.notice_id then redis.call('XDEL', K.notices, run.notice_id) end
  end
  return { 'already_finished' }
end
if A.lost_caller ~= '' and (run.caller ~= A.lost_caller or silent_ms(A.lost_caller) < tonumber(A.lease_ms)) then
  return { 'not_lost' }
end

if not run.kill then
  redis.call('HSET', K.record, 'kill', A.kill_id, 'kill_reason', A.reason)
end
if A.lost_caller ~= '' then
  -- Whatever its ending says, nobody waits for it.
  run.untold = 'yes'
  redis.call('HSET', K.record, 'untold', run.untold)
end
if A.told ~= '' and not run.reported then
  run.reported = A.told
  redis.call('HSET', K.record, 'reported', A.told)
end
if departs[run.state] then return { 'killed', finish(run) } end
redis.call('SADD', K.flagged, A.id)
if not run.kill then redis.call('PUBLISH', A.ring_prefix .. run.worker, A.id) end
-- What it has started need not wait for its driver to notice.
return { 'requested', cascade() and 'cascade' or '' }
