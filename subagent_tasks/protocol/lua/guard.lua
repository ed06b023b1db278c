-- guard: lets one process at a time sweep, and nobody right after the server was away.
-- KEYS
--   sweeper    string  the guard
--   clock      hash    the last beat of anybody
--   processes  zset    heartbeats
--   expiring   zset    settled jobs by expiry
-- ARGV
--   process   the process id
--   hold_ms   how long the guard is held
-- RETURNS
--   sweep <now in ms> <dead processes> <expired jobs>
--   wait
-- PUBLISHES
--   nothing
local now = now_ms()
local until_ms = redis.call('HGET', K.clock, 'wait_until')
if until_ms and tonumber(until_ms) > now then return { 'wait' } end
local holder = redis.call('GET', K.sweeper)
if holder and holder ~= A.process then return { 'wait' } end
redis.call('SET', K.sweeper, A.process, 'PX', A.hold_ms)
return { 'sweep', now, redis.call('ZRANGEBYSCORE', K.processes, '-inf', now),
  redis.call('ZRANGEBYSCORE', K.expiring, '-inf', now, 'LIMIT', 0, 1000) }
