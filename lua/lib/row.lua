--[[
The states of a row:

  state      fields                         what a claim of the same fingerprint answers
  none       no row, or its TTL is over     claimed, at generation 1
  running    pending, lease left            in_progress; to the row's own owner: claimed
  stale      pending, no lease left         stale: a takeover may win it
  released   pending, no owner, lease 0     stale, at once
  completed  completed, response_*          replay
  failed     failed, response_*             replay
  corrupt    anything else                  corrupt: never run, never overwritten

  transition           from               to          who
  claim                none               running     anybody
  renew, checkpoint    running or stale   running     the attempt that owns it
  takeover             stale, released    running     anybody with the same fingerprint; generation + 1
  release              running or stale   released    the attempt that owns it
  complete             running or stale   completed   the attempt that owns it
  fail                 running or stale   failed      the attempt that owns it
  (time)               running            stale       when the lease is over
  (time)               any                none        when the TTL is over
]]

-- Who runs it, and for how long.
local function attempt_of(row)
  return redis.call('HMGET', row, 'status', 'generation', 'owner', 'fingerprint', 'lease', 'retention')
end
