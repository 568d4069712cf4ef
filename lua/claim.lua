--[[
claim: reserve the row for this attempt, or say what is there.

KEYS
  1  row           hash
ARGV
  1  owner         text      the attempt's token
  2  fingerprint   text      digest of what is asked
  3  lease         ms        from now
  4  retention     ms        from now

REPLY
  claimed      generation [checkpoint checkpoint_data checkpoint_seq]   this attempt owns the row, also when it asks again
  replay       status generation response_status response_headers response_body response_omitted   the row is finished
  in_progress  lease_ms      another attempt's lease ends that far from now
  stale        generation    another attempt's lease ran out: a takeover of this generation may win
  reused                     the row was claimed for another fingerprint
  corrupt      why           the row is not one that this ledger wrote

WRITES  only on "claimed": a new row whole and its TTL; for the attempt's own row lease_until, updated_at and its TTL
]]
-- include lib/clock.lua
-- include lib/numbers.lua
-- include lib/row.lua
local row = KEYS[1]
local owner, fingerprint, lease, retention = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local current = redis.call('HMGET', row, 'status', 'generation', 'owner', 'fingerprint', 'lease_until')
local status, generation, lease_until = current[1], current[2], current[5]

if not status and redis.call('EXISTS', row) == 0 then
  local now = now_ms()
  redis.call('HSET', row, 'status', 'pending', 'generation', '1', 'owner', owner, 'fingerprint', fingerprint,
    'lease_until', text(now + lease), 'created_at', text(now), 'updated_at', text(now))
  local expiry = redis.pcall('PEXPIRE', row, retention)
  if type(expiry) == 'table' and expiry.err then
    redis.call('DEL', row)
    return expiry
  end
  return {'claimed', '1'}
end

local why = fault(status, generation, current[3], current[4], lease_until)
if why then return {'corrupt', why} end
if current[4] ~= fingerprint then return {'reused'} end

if status ~= 'pending' then
  local response = redis.call('HMGET', row, 'response_status', 'response_headers', 'response_body', 'response_omitted')
  if not integer(response[1]) then return {'corrupt', 'response_status is not an integer'} end
  if not response[2] then return {'corrupt', 'response_headers is missing'} end
  if not response[3] then return {'corrupt', 'response_body is missing'} end
  return {'replay', status, generation, response[1], response[2], response[3], response[4] or ''}
end

local now = now_ms()
if current[3] == owner then
  redis.call('HSET', row, 'lease_until', text(now + lease), 'updated_at', text(now))
  redis.call('PEXPIRE', row, retention)
  return claimed(row, generation)
end

local left = integer(lease_until) - now
if left > 0 then return {'in_progress', text(left)} end
return {'stale', generation}
