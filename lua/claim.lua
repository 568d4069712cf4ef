--[[
claim: reserve the row for this attempt, or return the row's state.

KEYS
  1  row           hash
ARGV
  1  owner         text      the attempt's token
  2  fingerprint   text      digest of the request
  3  lease         ms        from now
  4  retention     ms        from now: the row's TTL
  5  created_at    ms        since the epoch, by the caller's clock; informational
  6  route         text      the endpoint or function, or empty; informational

REPLY
  claimed      token generation [checkpoint checkpoint_data checkpoint_seq]
               this attempt owns the row; also if the call is sent again
  replay       token generation response_status response_headers response_body [response_omitted status]
               an attempt completed or failed the row; without the last two it completed it, with its body
  in_progress  token lease_ms      another attempt owns the row, and its lease has this time left
  stale        token generation released [checkpoint checkpoint_data checkpoint_seq]
               the lease has ended; a takeover of this generation may succeed. `released` is 1 if its attempt gave the
               row up, 0 if it died
  reused       token               the row was claimed with another fingerprint
  corrupt      token why           the row was not written by this ledger, or was edited

WRITES  on "claimed": the TTL and all fields of a new row; for this attempt's own row the TTL, and lease and retention
        if they change.
        On "stale": the generation as it is, so that WAIT says whether replicas keep up before a takeover fences the
        owner.
]]
-- include lib/row.lua
-- include lib/clock.lua
local row = KEYS[1]
local owner, fingerprint, lease, retention, created_at, route = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]

local attempt = attempt_of(row)
local ttl = redis.call('PTTL', row)
if ttl == -2 then
  local refused
  if route == '' then
    refused = set_clock(row, nil, retention, 'status', 'pending', 'generation', '1', 'owner', owner,
      'fingerprint', fingerprint, 'lease', lease, 'created_at', created_at)
  else
    refused = set_clock(row, nil, retention, 'status', 'pending', 'generation', '1', 'owner', owner,
      'fingerprint', fingerprint, 'lease', lease, 'created_at', created_at, 'route', route)
  end
  if refused then
    redis.call('DEL', row)
    return refused
  end
  return {'claimed', owner, '1'}
end

-- Included here, since only an existing row needs these functions; defining them takes a tenth of a new claim's time.
-- include lib/corrupt.lua
-- include lib/lease.lua
-- include lib/extend.lua

local progress = progress_of(row)
local why = fault(attempt, progress, ttl)
if why then return {'corrupt', owner, why} end
local status, generation, current_owner = attempt[1], attempt[2], attempt[3]
local current_fingerprint, current_lease, current_retention = attempt[4], attempt[5], attempt[6]
if current_fingerprint ~= fingerprint then return {'reused', owner} end

if status ~= 'pending' then
  local reply = {'replay', owner, generation, progress[1], progress[2], progress[3]}
  if status ~= 'completed' or progress[4] then
    reply[7], reply[8] = progress[4] or '', status
  end
  return reply
end

if current_owner == owner then
  extend_lease(row, current_lease, current_retention, lease, retention)
  return with_checkpoint({'claimed', owner, generation}, progress)
end

local left = lease_left(current_lease, current_retention, ttl)
if left > 0 then return {'in_progress', owner, left} end
if current_owner ~= '' then redis.pcall('HSET', row, 'generation', generation) end
return with_checkpoint({'stale', owner, generation, current_owner == '' and 1 or 0}, progress)
