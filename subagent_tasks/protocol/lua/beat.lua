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
-- Nobody beat for so long: the server was away, not all processes dead. Sweepers wait one lease. A living process may have
-- beaten a third of a lease before an outage and beats again a twelfth after it: 7/12 are what an outage may take.
local last = redis.call('HGET', K.clock, 'last')
if not last or now - tonumber(last) > lease * 7 / 12 then
  redis.call('HSET', K.clock, 'wait_until', now + lease)
end
redis.call('HSET', K.clock, 'last', now)
redis.call('ZADD', K.processes, now + lease, A.process)
redis.call('PEXPIRE', K.clock, 86400000)
return { 'ok', redis.call('SINTER', K.flagged, K.driven), redis.call('SMEMBERS', K.driven) }
