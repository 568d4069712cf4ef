-- Returns the milliseconds left on the lease, 0 or less once it has ended. If the server's clock steps back, the TTL is
-- longer than the retention; without the max, the elapsed time would be negative and a released row would stay blocked.
local function lease_left(lease, retention, ttl)
  return lease - math.max(retention - ttl, 0)
end
