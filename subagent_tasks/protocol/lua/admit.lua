-- admit: accepts a run: record, prompt, owner's index and Celery message in one step, or none of them.
-- KEYS
--   record      hash    the run's record
--   inbox       stream  the run's inbox
--   owner       hash    the owner's record
--   jobs        zset    the owner's jobs
--   active      set     the owner's unsettled jobs
--   unsettled   set     the owner's unsettled runs
--   notices     stream  the owner's notices; of a child, its inbox
--   cursors     hash    the owner's cursors
--   held        set     foreground runs whose caller the host process is
--   cascade     set     runs whose descendants must end
--   queued      zset    runs waiting in the queue
--   queue       list    the Celery queue
-- ARGV
--   id              the run id
--   owner_id        the owner's session id
--   token           the owner's fencing token when the owner is a child, which its driver acts for; else empty
--   caller          the process that waits for a foreground run
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
--   stop kill: the owner is a child and was killed, or is to end with what started it, so it starts nothing
--   stale: the owner is a child and somebody else drives it, or nobody
-- PUBLISHES
--   nothing; pushes the message
local known = record('kind', 'digest', 'state', 'owner')
if known.kind then
  -- A child repeats only what stands in its transcript: if the digests differ, the configuration has changed since.
  if known.owner ~= A.owner_id or (known.digest ~= A.digest and A.token == '') then return { 'conflict' } end
  if A.token == '' and A.mode == 'foreground' and known.state ~= 'settled' then
    redis.call('HSET', K.record, 'caller', A.caller)
    redis.call('SADD', K.held, A.id)
  end
  return { 'accepted', known.state }
end

local owner = redis.call('HMGET', K.owner, 'depth', 'root', 'kind', 'state', 'token', 'kill', 'path')
if not owner[1] then return { 'unknown_owner' } end
if owner[3] ~= 'parent' then
  if owner[4] ~= 'driven' or owner[5] ~= A.token then return { 'stale' } end
  if owner[6] or is_ended_above(owner[7]) then return { 'stop', 'kill' } end
end
-- The runs above it, the nearest last.
local path = owner[3] == 'parent' and '' or (owner[7] or '') .. ' ' .. A.owner_id
local depth = tonumber(owner[1]) + 1
if A.max_depth ~= '' and depth > tonumber(A.max_depth) then
  return { 'refused', 'depth', depth, A.max_depth }
end
if A.mode == 'background' and not has_room() then
  return { 'refused', 'active_jobs', A.max_active_jobs }
end

redis.call('XADD', K.inbox, '*', 'lane', 'next-turn', 'd', A.entry)
accept({ root = owner[2], depth = depth, path = path, seq = 0 }, now_us())
if A.mode == 'foreground' and owner[3] == 'parent' then redis.call('SADD', K.held, A.id) end
return { 'accepted', 'queued' }
