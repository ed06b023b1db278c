-- append: writes transcript events, and, before an effect, asks whether it may start.
-- KEYS
--   record      hash    the run's record
--   transcript  stream  the run's transcript
--   cascade     set     runs whose descendants must end
-- ARGV
--   token   the driver's fencing token
--   seq     the transcript length the driver knows
--   purpose announce: an effect follows, so a kill refuses it; record: something happened, and is written down
--   ...     the events, kind and JSON data in turn
-- RETURNS
--   ok <new length>
--   stop kill: it was killed, or what started it was killed or has ended; nothing was written
--   stale: nothing was written
-- PUBLISHES
--   nothing
local run = record('state', 'token', 'seq', 'kill', 'path')
if run.state ~= 'driven' or run.token ~= A.token then return { 'stale' } end
local seq, known, count = tonumber(A.seq), tonumber(run.seq), (#ARGV - REST + 1) / 2
if count > 0 and known == seq + count then return { 'ok', known } end
if A.purpose == 'announce' and (run.kill or is_ended_above(run.path)) then return { 'stop', 'kill' } end
if known ~= seq then return { 'stale' } end
if count == 0 then return { 'ok', known } end

local now = now_ms()
for i = REST, #ARGV, 2 do
  seq = seq + 1
  redis.call('XADD', K.transcript, seq .. '-0', 'k', ARGV[i], 'd', ARGV[i + 1], 't', now)
end
redis.call('HSET', K.record, 'seq', seq)
-- What happened is progress: it clears the count of workers lost. What is only announced is not.
if A.purpose == 'record' then redis.call('HSET', K.record, 'attempt', 0) end
return { 'ok', seq }
