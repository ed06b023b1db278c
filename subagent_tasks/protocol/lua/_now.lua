-- now_us(): Redis time in microseconds; now_ms(): in milliseconds. The only clock any move reads.
local function now_us()
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end
local function now_ms()
  return math.floor(now_us() / 1000)
end
