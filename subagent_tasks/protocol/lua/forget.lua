-- forget: drops an expired job from its owner's index.
-- KEYS
--   expiring  zset  settled jobs by expiry
--   jobs      zset  the owner's jobs
-- ARGV
--   id      the run id
--   expiry  its entry in `expiring`
-- RETURNS
--   forgotten
-- PUBLISHES
--   nothing
redis.call('ZREM', K.jobs, A.id)
redis.call('ZREM', K.expiring, A.expiry)
return { 'forgotten' }
