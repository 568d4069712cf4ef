-- Milliseconds left on the lease; 0 or less once it has run out. A server clock that steps back makes the TTL longer
-- than the retention. The elapsed time is never negative, or a released row would stay blocked.
local function lease_left(lease, retention, ttl)
  return lease - math.max(retention - ttl, 0)
end

-- Start the lease again; where neither it nor the retention changes, only the TTL is written.
local function extend_lease(row, current_lease, kept, lease, retention)
  if current_lease == lease then
    set_clock(row, kept, retention)
  else
    set_clock(row, kept, retention, 'lease', lease)
  end
end
