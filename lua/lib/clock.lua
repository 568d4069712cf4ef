-- The row's TTL is its clock. Every transition sets the TTL to `retention`, so `retention - PTTL` is the time since the
-- last transition. Only this function writes the two, always together: changing one alone would move the lease's end.
--
-- `kept` is the row's current retention, or nil for claim and takeover. These call HSET first: a full server denies
-- it, and nothing has been written. All other transitions call PEXPIRE first: a full server allows it and then also
-- the HSET, so the result of work that already ran is still stored. They write fields only if something changes.
--
-- Returns the error if the PEXPIRE of a claim or takeover is denied.
local function set_clock(row, kept, retention, ...)
  if not kept then
    redis.call('HSET', row, 'retention', retention, ...)
    local expiry = redis.pcall('PEXPIRE', row, retention)
    return type(expiry) == 'table' and expiry.err and expiry or nil
  end
  redis.call('PEXPIRE', row, retention)
  if kept ~= retention or select('#', ...) > 0 then
    redis.call('HSET', row, 'retention', retention, ...)
  end
end
