--[[
release: give the row up, so that the next claim takes it over at once.

KEYS
  1  row           hash
ARGV
  1  generation    integer   from the reply of claim or takeover
  2  owner         text      the attempt's token
  3  retention     ms        from now: the row's TTL

REPLY
  released   token           the row is given up, now or by an earlier call of this attempt
  fenced     token           another attempt owns the row, or the row is gone or finished; nothing was changed

WRITES  owner, lease, retention and the TTL, on "released" only (if sent again: the TTL, and retention if it changes)
]]
-- include lib/clock.lua
-- include lib/fence.lua
local row = KEYS[1]
local generation, owner, retention = ARGV[1], ARGV[2], ARGV[3]

local _, kept = held_by(row, generation, '')
if kept then
  set_clock(row, kept, retention)
  return {'released', owner}
end

local _, current_retention = held_by(row, generation, owner)
if not current_retention then return {'fenced', owner} end

set_clock(row, current_retention, retention, 'owner', '', 'lease', '0')
return {'released', owner}
