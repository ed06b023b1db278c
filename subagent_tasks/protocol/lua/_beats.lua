-- is_alive(process): whether its heartbeat has not lapsed, by Redis time.
local function is_alive(process)
  local lapses = process and redis.call('ZSCORE', K.processes, process)
  return lapses ~= false and lapses ~= nil and tonumber(lapses) > now_ms()
end
-- silent_ms(process): for how long its heartbeat has lapsed; for ever, when nothing is known of it.
local function silent_ms(process)
  local lapses = redis.call('ZSCORE', K.processes, process)
  return lapses and now_ms() - tonumber(lapses) or math.huge
end
