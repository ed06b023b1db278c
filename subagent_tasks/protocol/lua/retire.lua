-- retire: forgets a process that is gone, drives nothing and is waited for by nothing.
-- KEYS
--   processes  zset  heartbeats
--   driven     set   what the process drove
--   held       set   foreground runs that it waited for
-- ARGV
--   process    the process id
--   on_behalf  self: it leaves; sweeper: it must be dead
-- RETURNS
--   retired | still_needed
-- PUBLISHES
--   nothing
if redis.call('EXISTS', K.driven, K.held) > 0 or (A.on_behalf == 'sweeper' and is_alive(A.process)) then
  return { 'still_needed' }
end
redis.call('ZREM', K.processes, A.process)
return { 'retired' }
