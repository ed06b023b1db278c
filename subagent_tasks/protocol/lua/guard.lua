-- guard: lets one process at a time sweep, and nobody right after the server was away.
-- KEYS
--   sweeper    string  the guard
--   clock      hash    the last beat of anybody
--   processes  zset    heartbeats
--   expiring   zset    settled jobs by expiry
--   cascade    set     runs whose descendants must end
--   alarms     zset    suspended runs, by when they go on at the latest
-- ARGV
--   process   the process id
--   hold_ms   how long the guard is held
--   lease_ms  how long a beat counts
-- RETURNS
--   sweep <now in ms> <dead processes> <expired jobs> <runs to walk down from> <due alarms, run and time in turn>
--   wait
-- PUBLISHES
--   nothing
local now = now_ms()
local clock = redis.call('HMGET', K.clock, 'wait_until', 'last')
if clock[1] and tonumber(clock[1]) > now then return { 'wait' } end
-- After an outage a sweeper may come before the first beat, which would tell it to wait.
if not clock[2] or now - tonumber(clock[2]) > tonumber(A.lease_ms) * 7 / 12 then return { 'wait' } end
local holder = redis.call('GET', K.sweeper)
if holder and holder ~= A.process then return { 'wait' } end
redis.call('SET', K.sweeper, A.process, 'PX', A.hold_ms)
return { 'sweep', now, redis.call('ZRANGEBYSCORE', K.processes, '-inf', now),
  redis.call('ZRANGEBYSCORE', K.expiring, '-inf', now, 'LIMIT', 0, 1000), redis.call('SMEMBERS', K.cascade),
  redis.call('ZRANGEBYSCORE', K.alarms, '-inf', now, 'WITHSCORES', 'LIMIT', 0, 1000) }
