-- Time is the server's, in whole milliseconds, and read once a script: up to Redis 7.0 it moves while a script runs.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
