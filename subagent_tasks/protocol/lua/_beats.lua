-- is_alive(process): whether its heartbeat has not lapsed, by Redis time.
local function is_alive(process)
  local lapses = process and redis.call('ZSCORE', K.processes, process)
  return lapses ~= false and lapses ~= nil and tonumber(lapses) > now_ms()
end
