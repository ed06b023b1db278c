-- requeue: gives the work of a run that failed or was killed to a new run, a job of the tree's root. The old one stays
-- settled (P3); the new one goes on from what the old one had recorded, or starts again from its prompt.
-- KEYS
--   record             hash    the new run's record
--   transcript         stream  the new run's transcript
--   source             hash    the old run's record
--   source_transcript  stream  the old run's transcript
--   owner              hash    the root session's record
--   jobs               zset    its jobs
--   active             set     its unsettled jobs
--   unsettled          set     its unsettled runs
--   notices            stream  its notices
--   cursors            hash    its cursors
--   queued             zset    runs waiting in the queue
--   queue              list    the Celery queue
-- ARGV
--   id              the new run's id
--   source_id       the old run's id
--   owner_id        the root session's id
--   version         the record version this process writes
--   digest          what was asked for, as a digest
--   mode            background
--   caller          empty: nobody waits for it
--   max_active_jobs how many unsettled jobs the root may have
--   keep            all: the new run goes on from every recorded step; prompt: from its prompt alone
--   message         the Celery message, or empty when the broker is another server
--   ...             further fields of the record, name and value in turn
-- RETURNS
--   requeued <the run that has the work now: the new one, unless an earlier move gave it away>
--   unfinished: it has not settled
--   completed: it reached its end, there is nothing to repeat
--   no_prompt: its prompt is not in its transcript (any more)
--   refused active_jobs <limit>
--   unknown: there is no such run (any more)
--   unknown_owner: the root session does not exist (any more)
-- PUBLISHES
--   nothing; pushes the message
local source = redis.call('HMGET', K.source, 'state', 'status', 'depth', 'root', 'requeued_as')
if not source[1] then return { 'unknown' } end
if source[5] then return { 'requeued', source[5] } end
if source[1] ~= 'settled' then return { 'unfinished' } end
if source[2] == 'completed' then return { 'completed' } end
if redis.call('EXISTS', K.owner) == 0 then return { 'unknown_owner' } end
if not has_room() then return { 'refused', 'active_jobs', A.max_active_jobs } end

local kept = {}
for _, event in ipairs(redis.call('XRANGE', K.source_transcript, '-', '+')) do
  if event[2][2] ~= 'settled' and (A.keep == 'all' or #kept == 0) then table.insert(kept, event) end
end
if #kept == 0 or kept[1][2][2] ~= 'input' then return { 'no_prompt' } end

local now = now_us()
for seq, event in ipairs(kept) do
  redis.call('XADD', K.transcript, seq .. '-0', unpack(event[2]))
end
redis.call('XADD', K.transcript, (#kept + 1) .. '-0', 'k', 'requeued', 'd', '{"from":"' .. A.source_id .. '"}', 't',
  math.floor(now / 1000))
-- As deep as it was: what it delegates stays under the same cap.
accept({ root = source[4], depth = source[3], path = '', seq = #kept + 1 }, now)
redis.call('HSET', K.source, 'requeued_as', A.id)
return { 'requeued', A.id }
