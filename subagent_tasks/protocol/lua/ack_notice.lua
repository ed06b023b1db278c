-- ack_notice: moves a reader's cursor forward, never back.
-- KEYS
--   cursors    hash  the session's cursors
--   record     hash  the session's record
-- ARGV
--   reader        the reader's name
--   cursor        the stream id of the newest notice it is done with
--   retention_ms  how long the cursor is kept when the session's record has no lifetime of its own
-- RETURNS
--   ok <cursor>
-- PUBLISHES
--   nothing
local function parts(id)
  local ms, seq = string.match(id, '^(%d+)%-(%d+)$')
  return tonumber(ms), tonumber(seq)
end
local held = redis.call('HGET', K.cursors, A.reader)
if held then
  local held_ms, held_seq = parts(held)
  local ms, seq = parts(A.cursor)
  if ms < held_ms or (ms == held_ms and seq <= held_seq) then return { 'ok', held } end
end
redis.call('HSET', K.cursors, A.reader, A.cursor)
local lifetime = redis.call('PTTL', K.record)
if lifetime == -2 then lifetime = tonumber(A.retention_ms) end
if lifetime > 0 then redis.call('PEXPIRE', K.cursors, lifetime) end
return { 'ok', A.cursor }
