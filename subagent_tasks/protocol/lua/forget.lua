-- forget: drops an expired job from its owner's index.
-- KEYS
--   record    hash  the run's record: gone, unless the id was used again
--   expiring  zset  settled jobs by expiry
--   jobs      zset  the owner's jobs
-- ARGV
--   id      the run id
--   expiry  its entry in `expiring`
-- RETURNS
--   forgotten
--   kept: the id was used again; its next ending renews the entry
-- PUBLISHES
--   nothing
if redis.call('EXISTS', K.record) == 1 then return { 'kept' } end
redis.call('ZREM', K.jobs, A.id)
redis.call('ZREM', K.expiring, A.expiry)
return { 'forgotten' }
