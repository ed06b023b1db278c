-- admit: accepts a run: record, prompt, owner's index and Celery message in one step, or none of them.
-- KEYS
--   record      hash    the run's record
--   inbox       stream  the run's inbox
--   owner       hash    the owner's record
--   jobs        zset    the owner's jobs
--   active      set     the owner's unsettled jobs
--   unsettled   set     the owner's unsettled runs
--   notices     stream  the owner's notices
--   cursors     hash    the owner's cursors
--   queued      zset    runs waiting in the queue
--   queue       list    the Celery queue
-- ARGV
--   id              the run id
--   owner_id        the owner's session id
--   version         the record version this process writes
--   digest          what was asked for, as a digest: a repeated id must ask for the same
--   mode            foreground | background
--   max_active_jobs how many unsettled jobs the owner may have
--   max_depth       the deepest allowed depth, or empty
--   entry           the prompt, as an inbox entry
--   message         the Celery message, or empty when the broker is another server
--   ...             further fields of the record, name and value in turn
-- RETURNS
--   accepted <the run's state: queued, unless it was accepted before and has moved on>
--   conflict: the id is taken by another request, or another owner's
--   refused active_jobs <limit> | refused depth <attempted> <max>
--   unknown_owner: the owner's session does not exist (any more)
-- PUBLISHES
--   nothing; pushes the message
local known = record('kind', 'digest', 'state', 'owner')
if known.kind then
  if known.digest == A.digest and known.owner == A.owner_id then return { 'accepted', known.state } end
  return { 'conflict' }
end

local owner = redis.call('HMGET', K.owner, 'depth', 'root')
if not owner[1] then return { 'unknown_owner' } end
local depth = tonumber(owner[1]) + 1
if A.max_depth ~= '' and depth > tonumber(A.max_depth) then
  return { 'refused', 'depth', depth, A.max_depth }
end
if A.mode == 'background' and redis.call('SCARD', K.active) >= tonumber(A.max_active_jobs) then
  return { 'refused', 'active_jobs', A.max_active_jobs }
end

local now = now_us()
redis.call('HSET', K.record, 'version', A.version, 'kind', 'one-shot', 'id', A.id, 'owner', A.owner_id, 'root', owner[2],
  'depth', depth, 'digest', A.digest, 'mode', A.mode, 'state', 'queued', 'token', 0, 'seq', 0, 'attempt', 0,
  'created_at', math.floor(now / 1000), unpack(ARGV, REST))
redis.call('XADD', K.inbox, '*', 'lane', 'next-turn', 'd', A.entry)
if redis.call('SADD', K.unsettled, A.id) == 1 and redis.call('SCARD', K.unsettled) == 1 then
  for _, key in ipairs({ K.jobs, K.notices, K.cursors, K.owner }) do redis.call('PERSIST', key) end
end
if A.mode == 'background' then
  redis.call('ZADD', K.jobs, now, A.id)
  redis.call('SADD', K.active, A.id)
end
enqueue(math.floor(now / 1000))
return { 'accepted', 'queued' }
