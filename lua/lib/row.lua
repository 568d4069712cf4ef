--[[
The states of a row:

  state      fields                         reply to a claim with the same fingerprint
  none       no row, or its TTL has ended   claimed, at generation 1
  running    pending, lease left            in_progress; for the row's own owner: claimed
  stale      pending, no lease left         stale; a takeover may succeed
  released   pending, no owner, lease 0     stale
  completed  completed, response_*          replay
  failed     failed, response_*             replay
  corrupt    anything else                  corrupt; never run, never overwritten

  transition           from               to          who
  claim                none               running     any attempt
  renew, checkpoint    running or stale   running     the attempt that owns it
  takeover             stale, released    running     any attempt with the same fingerprint; generation + 1
  release              running or stale   released    the attempt that owns it
  complete             running or stale   completed   the attempt that owns it
  fail                 running or stale   failed      the attempt that owns it
  (time)               running            stale       when the lease ends
  (time)               any                none        when the TTL ends
]]

-- Returns the fields of the row's attempt.
local function attempt_of(row)
  return redis.call('HMGET', row, 'status', 'generation', 'owner', 'fingerprint', 'lease', 'retention')
end
