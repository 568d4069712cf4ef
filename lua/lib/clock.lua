-- The row's TTL is its clock. Every transition sets the TTL to `retention`, so `retention - PTTL` is the time since the
-- last transition. `retention` and the TTL change together, here and nowhere else: one without the other would move
-- the end of the lease.

-- Milliseconds left on the lease; 0 or less once it has run out. A server clock that steps back makes the TTL longer
-- than the retention. The elapsed time is never negative, or a released row would stay blocked.
local function lease_left(lease, retention, ttl)
  return lease - math.max(retention - ttl, 0)
end

-- For claim and takeover. A full server refuses HSET as a script's first write, and then nothing has been written.
-- Returns the error where the server refuses PEXPIRE.
local function start_clock(row, retention, ...)
  redis.call('HSET', row, 'retention', retention, ...)
  local expiry = redis.pcall('PEXPIRE', row, retention)
  if type(expiry) == 'table' and expiry.err then return expiry end
end

-- For every other transition. A full server allows PEXPIRE, and HSET after it, so what already ran is still stored.
-- Writes fields only where there is something to change.
local function restart_clock(row, kept, retention, ...)
  redis.call('PEXPIRE', row, retention)
  if kept ~= retention or select('#', ...) > 0 then
    redis.call('HSET', row, 'retention', retention, ...)
  end
end

-- Start the lease again; where neither it nor the retention changes, only the TTL is written.
local function extend_lease(row, current_lease, kept, lease, retention)
  if current_lease == lease then
    restart_clock(row, kept, retention)
  else
    restart_clock(row, kept, retention, 'lease', lease)
  end
end
