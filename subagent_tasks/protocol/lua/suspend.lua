-- suspend: the driver lets go of a run that can only wait for runs of its own; their endings queue it again.
-- KEYS
--   record         hash    the run's record
--   transcript     stream  the run's transcript
--   driven         set     what the worker drives
--   own_unsettled  set     the run's own unsettled runs
--   own_awaited    set     those of them it waits for
--   alarms         zset    suspended runs, by when they go on at the latest
-- ARGV
--   id       the run id
--   token    the driver's fencing token
--   seq      the transcript length the driver knows
--   wake_at  it goes on when no more than this many of the awaited runs are unsettled
--   alarm    when it goes on at the latest, as Redis time in milliseconds
--   ...      the awaited runs' ids
-- RETURNS
--   suspended
--   go_on: so many have settled meanwhile; nothing was changed
--   stop kill: it was killed, so the driver settles it
--   stale
-- PUBLISHES
--   nothing
local run = record('state', 'token', 'seq', 'kill', 'suspended')
if run.suspended == A.token then return { 'suspended' } end
if not departs[run.state] or run.token ~= A.token or run.seq ~= A.seq then return { 'stale' } end
if run.kill then return { 'stop', 'kill' } end
local awaited = {}
for i = REST, #ARGV do
  if redis.call('SISMEMBER', K.own_unsettled, ARGV[i]) == 1 then table.insert(awaited, ARGV[i]) end
end
if #awaited <= tonumber(A.wake_at) then return { 'go_on' } end
for _, id in ipairs(awaited) do redis.call('SADD', K.own_awaited, id) end
redis.call('ZADD', K.alarms, A.alarm, A.id)
redis.call('XADD', K.transcript, (run.seq + 1) .. '-0', 'k', 'suspended', 'd',
  '{"awaited":["' .. table.concat(awaited, '","') .. '"]}', 't', now_ms())
-- Waiting is progress: it clears the count of workers lost.
redis.call('HSET', K.record, 'state', 'suspended', 'worker', '', 'token', run.token + 1, 'seq', run.seq + 1,
  'suspended', A.token, 'wake_at', A.wake_at, 'resting', 'yes', 'attempt', 0)
-- The alarm may be one that it was woken by before: its limit stays where it is, and a clock may be set back.
redis.call('HDEL', K.record, 'woken')
redis.call('SREM', K.driven, A.id)
return { 'suspended' }
