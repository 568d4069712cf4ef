--[[
renew: extend the lease of the attempt that owns the row.

KEYS
  1  row           hash
ARGV
  1  generation    integer   from the reply of claim or takeover
  2  owner         text      the attempt's token
  3  lease         ms        new length, from now
  4  retention     ms        from now: the row's TTL

REPLY
  renewed   token            the lease has its full length again
  fenced    token            another attempt owns the row, or the row is gone or finished; nothing was changed

WRITES  the TTL, and lease and retention if they change, on "renewed" only
]]
-- include lib/clock.lua
-- include lib/fence.lua
-- include lib/extend.lua
local row = KEYS[1]
local generation, owner, lease, retention = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local current_lease, current_retention = held_by(row, generation, owner)
if not current_lease then return {'fenced', owner} end

extend_lease(row, current_lease, current_retention, lease, retention)
return {'renewed', owner}
