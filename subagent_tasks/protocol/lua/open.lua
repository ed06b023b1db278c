-- open: creates a parent session or reopens it.
-- KEYS
--   record      hash  the session's record
--   unsettled   set   the session's unsettled runs
-- ARGV
--   id            the session id
--   version       the record version this process writes
--   retention_ms  how long an idle session is kept
-- RETURNS
--   open: it is there, created now or before
--   not_a_parent: the id belongs to a child
--   unsupported <version>: the record was written by a newer version
-- PUBLISHES
--   nothing
local run = record('version', 'kind')
if run.version then
  if tonumber(run.version) > tonumber(A.version) then return { 'unsupported', run.version } end
  if run.kind ~= 'parent' then return { 'not_a_parent' } end
else
  redis.call('HSET', K.record, 'version', A.version, 'kind', 'parent', 'id', A.id, 'root', A.id, 'depth', 0,
    'created_at', now_ms())
end
if redis.call('EXISTS', K.unsettled) == 0 then
  redis.call('PEXPIRE', K.record, A.retention_ms)
end
return { 'open' }
