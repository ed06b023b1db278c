-- take: moves what a step may take from the inbox into the transcript. From then on the transcript alone says what was taken.
-- KEYS
--   record      hash    the run's record
--   inbox       stream  the run's inbox
--   transcript  stream  the run's transcript
--   cascade     set     runs whose descendants must end
-- ARGV
--   token   the driver's fencing token
--   seq     the transcript length the driver knows
--   step    first: the whole next-step batch, then one next-turn message; later: the next-step batch only
-- RETURNS
--   entries <the taken entries, in order>
--   stop kill: as in append
--   stale
-- PUBLISHES
--   nothing
local run = record('state', 'token', 'seq', 'kill', 'path')
if run.state ~= 'driven' or run.token ~= A.token then return { 'stale' } end
local seq, known = tonumber(A.seq), tonumber(run.seq)
if known > seq then
  local taken = {}
  for _, event in ipairs(redis.call('XRANGE', K.transcript, (seq + 1) .. '-0', known .. '-0')) do
    table.insert(taken, event[2][4])
  end
  return { 'entries', taken }
end
if known < seq then return { 'stale' } end
if run.kill or is_ended_above(run.path) then return { 'stop', 'kill' } end

local turn, batch = nil, {}
for _, entry in ipairs(redis.call('XRANGE', K.inbox, '-', '+')) do
  if entry[2][2] == 'next-step' then
    table.insert(batch, entry)
  elseif A.step == 'first' and not turn then
    turn = entry
  end
end
if turn then table.insert(batch, turn) end
if #batch == 0 then return { 'entries', {} } end

local now, taken = now_ms(), {}
for _, entry in ipairs(batch) do
  seq = seq + 1
  redis.call('XADD', K.transcript, seq .. '-0', 'k', 'input', 'd', entry[2][4], 't', now)
  redis.call('XDEL', K.inbox, entry[1])
  table.insert(taken, entry[2][4])
end
if redis.call('XLEN', K.inbox) == 0 then redis.call('DEL', K.inbox) end
redis.call('HSET', K.record, 'seq', seq, 'attempt', 0)
return { 'entries', taken }
