-- beat: proves that a process lives, and tells it what it should know. One command, however much it drives.
-- KEYS
--   processes  zset  heartbeats
--   driven     set   what the process drives
--   flagged    set   driven runs with an unanswered kill
--   clock      hash  the last beat of anybody
-- ARGV
--   process       the process id
--   lease_ms      how long this beat counts
-- RETURNS
--   ok <ids it drives that are flagged> <all ids it drives>
-- PUBLISHES
--   nothing
local now, lease = now_ms(), tonumber(A.lease_ms)
-- Nobody beat for a whole lease: the server was away, not all processes dead. Sweepers wait one lease.
local last = redis.call('HGET', K.clock, 'last')
if not last or now - tonumber(last) > lease then
  redis.call('HSET', K.clock, 'wait_until', now + lease)
end
redis.call('HSET', K.clock, 'last', now)
redis.call('ZADD', K.processes, now + lease, A.process)
redis.call('PEXPIRE', K.clock, 86400000)
return { 'ok', redis.call('SINTER', K.flagged, K.driven), redis.call('SMEMBERS', K.driven) }
