-- settle: ends a driven run: outcome, Celery result, notice, capacity and lifetimes in one step. The first outcome wins.
-- KEYS
--   record         hash    the run's record
--   inbox          stream  the run's inbox
--   transcript     stream  the run's transcript
--   result         string  the run's Celery result
--   processes      zset    heartbeats
--   driven         set     what the driver drives
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
--   token         the fencing token the settler holds, or found
--   worker        the driver's process id
--   on_behalf     driver: the caller is the driver; sweeper: the driver must be dead
--   settle_id     made for this settlement: a repeat is recognised by it
--   status        completed | failed | killed
--   detail        the outcome's short account, or empty: what a listing shows without reading the outcome
--   outcome       the outcome, JSON
--   event         the transcript's last event, JSON
--   result        the Celery result, JSON
--   notice        the notice, JSON, or empty; a foreground ending is told as its call's result, unless the caller was lost
--   caller        the process whose `held` this is: the run's caller, as the settler read it
--   owner_id      the owner's session id
--   owner_channel the channel of the owner's session
--   announcement  what waiting hosts are told, JSON
--   expiry        the entry for `expiring`
--   wake_message  the owner's Celery message, should this ending queue it; or empty
--   retention_ms  how long everything is kept from now on
--   max_notices   how many notices the owner keeps
-- RETURNS
--   settled <what follows: wake, cascade, unhold, or nothing>
--   already <status>: another settlement came first
--   stale: the caller is not the driver (any more), or the driver lives
--   unknown
-- PUBLISHES
--   the result on the result key; the notice and the announcement on the owner's channel; pushes the owner's message
local run = record('state', 'token', 'worker', 'seq', 'status', 'settle_id', 'mode', 'reported', 'caller', 'follows',
  'untold')
if not run.state then return { 'unknown' } end
if run.state == 'settled' then
  if run.settle_id == A.settle_id then return { 'settled', run.follows or '' } end
  return { 'already', run.status }
end
if not departs[run.state] or run.token ~= A.token or run.worker ~= A.worker then return { 'stale' } end
if A.on_behalf == 'sweeper' and is_alive(run.worker) then return { 'stale' } end
redis.call('SREM', K.driven, A.id)
return { 'settled', finish(run) }
