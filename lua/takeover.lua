--[[
takeover: reserve a stale row for a new attempt at the next generation, which fences the attempt before.

KEYS
  1  row           hash
ARGV
  1  generation    integer   from claim's reply "stale"
  2  owner         text      the new attempt's token
  3  fingerprint   text      digest of the request
  4  lease         ms        from now
  5  retention     ms        from now: the row's TTL

REPLY
  claimed   token generation [checkpoint checkpoint_data checkpoint_seq]
            this attempt owns the row; also if the call is sent again
  lost      token            the row is not stale at that generation and fingerprint; nothing was changed

WRITES  generation, owner, lease, retention and the TTL, on "claimed" only
]]
-- include lib/row.lua
-- include lib/clock.lua
-- include lib/corrupt.lua
-- include lib/lease.lua
local row = KEYS[1]
local generation, owner, fingerprint, lease, retention = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local attempt = attempt_of(row)
local progress = progress_of(row)
local ttl = redis.call('PTTL', row)
if attempt[1] ~= 'pending' or fault(attempt, progress, ttl) then return {'lost', owner} end
if attempt[4] ~= fingerprint then return {'lost', owner} end

local following = string.format('%.0f', generation + 1)
local own = attempt[2] == following and attempt[3] == owner
local stale = attempt[2] == generation and lease_left(attempt[5], attempt[6], ttl) <= 0
if not own and not stale then return {'lost', owner} end

local refused = set_clock(row, nil, retention, 'generation', following, 'owner', owner, 'lease', lease)
if refused then  -- the TTL is as it was; so are the fields after this, whose PEXPIRE is denied again
  set_clock(row, nil, attempt[6], 'generation', attempt[2], 'owner', attempt[3], 'lease', attempt[5])
  return refused
end
return with_checkpoint({'claimed', owner, following}, progress)
