--[[
renew: extend the lease of the attempt that owns the row.

KEYS
  1  row           hash
ARGV
  1  generation    integer   what claim or takeover answered
  2  owner         text      the attempt's token
  3  lease         ms        new length, from now
  4  retention     ms        from now

REPLY
  renewed   lease_ms         the lease now ends that far from now
  fenced                     another attempt owns the row, or it is gone or finished; nothing changed

WRITES  lease_until, updated_at and the TTL, and only on "renewed"
]]
-- include lib/clock.lua
-- include lib/numbers.lua
-- include lib/fence.lua
local row = KEYS[1]
local generation, owner, lease, retention = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local now = now_ms()
if not holds(row, generation, owner) then return {'fenced'} end

redis.call('PEXPIRE', row, retention)
redis.call('HSET', row, 'lease_until', text(now + lease), 'updated_at', text(now))
return {'renewed', lease}
