--[[
takeover: reserve a stale row for a new attempt, behind the fence of a higher generation.

KEYS
  1  row           hash
ARGV
  1  generation    integer   what claim called stale
  2  owner         text      the new attempt's token
  3  fingerprint   text      digest of what is asked
  4  lease         ms        from now
  5  retention     ms        from now

REPLY
  claimed   generation [checkpoint checkpoint_data checkpoint_seq]   this attempt owns the row, also when it asks again
  lost                       the row is not, or no longer, stale at that generation and fingerprint; nothing changed

WRITES  generation, owner, lease_until, updated_at and the TTL, and only on "claimed"
]]
-- include lib/clock.lua
-- include lib/numbers.lua
-- include lib/row.lua
local row = KEYS[1]
local generation, owner, fingerprint, lease, retention = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local now = now_ms()
local following = text(generation + 1)
local current = redis.call('HMGET', row, 'status', 'generation', 'owner', 'fingerprint', 'lease_until')
if current[1] ~= 'pending' or fault(current[1], current[2], current[3], current[4], current[5]) then return {'lost'} end
if current[4] ~= fingerprint then return {'lost'} end

local own = current[2] == following and current[3] == owner
local stale = current[2] == generation and integer(current[5]) <= now
if not own and not stale then return {'lost'} end

redis.call('HSET', row, 'generation', following, 'owner', owner, 'lease_until', text(now + lease), 'updated_at', text(now))
redis.call('PEXPIRE', row, retention)
return claimed(row, following)
