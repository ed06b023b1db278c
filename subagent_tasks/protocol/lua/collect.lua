-- collect: reads a job for its owner; a terminal reading is its report, so the notice is withdrawn in the same step.
-- KEYS
--   record   hash    the run's record
--   notices  stream  the owner's notices; of a child, its inbox
-- ARGV
--   authority  the session that asks and must own the run
-- RETURNS
--   job <record, name and value in turn>
--   unauthorized | unknown
-- PUBLISHES
--   nothing
local run = record('state', 'owner', 'reported', 'notice_id', 'mode')
if not run.state then return { 'unknown' } end
if run.owner ~= A.authority then return { 'unauthorized' } end
if run.state == 'settled' and run.reported ~= 'read' then
  redis.call('HSET', K.record, 'reported', 'read')
  if run.notice_id then redis.call('XDEL', K.notices, run.notice_id) end
end
return { 'job', redis.call('HGETALL', K.record) }
