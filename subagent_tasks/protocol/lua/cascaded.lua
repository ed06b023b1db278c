-- cascaded: takes a run off the list of those whose descendants must end, once none of its own runs is unsettled.
-- KEYS
--   cascade        set  runs whose descendants must end
--   own_unsettled  set  the run's own unsettled runs
-- ARGV
--   id  the run id
-- RETURNS
--   done
--   not_yet: something it had started is unsettled still
-- PUBLISHES
--   nothing
if redis.call('EXISTS', K.own_unsettled) == 1 then return { 'not_yet' } end
redis.call('SREM', K.cascade, A.id)
return { 'done' }
