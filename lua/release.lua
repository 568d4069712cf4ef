--[[
release: give the row up, so that the next retry takes it over at once.

KEYS
  1  row           hash
ARGV
  1  generation    integer   what claim or takeover answered
  2  owner         text      the attempt's token
  3  retention     ms        from now

REPLY
  released                   given up now, or before
  fenced                     another attempt owns the row, or it is gone or finished; nothing changed

WRITES  owner, lease_until, updated_at and the TTL, and only on "released" (asked again: the TTL alone)
]]
-- include lib/clock.lua
-- include lib/numbers.lua
-- include lib/fence.lua
local row = KEYS[1]
local generation, owner, retention = ARGV[1], ARGV[2], ARGV[3]

local now = now_ms()
local before = holds(row, generation, '')
if not before and not holds(row, generation, owner) then return {'fenced'} end

redis.call('PEXPIRE', row, retention)
if not before then
  redis.call('HSET', row, 'owner', '', 'lease_until', text(now), 'updated_at', text(now))
end
return {'released'}
