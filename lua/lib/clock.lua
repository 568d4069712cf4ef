-- The row's TTL is its clock. Every transition sets the TTL to `retention`, so `retention - PTTL` is the time since the
-- last transition. This function alone writes either: one without the other would move the end of the lease.
--
-- `kept` is the row's present retention, or nil for claim and takeover. These write HSET first: a full server refuses
-- it, and then nothing has been written. All others write PEXPIRE first: a full server allows it, and HSET after it,
-- so what already ran is still stored. They write fields only where there is something to change.
-- Returns the error where a claim or takeover is refused its PEXPIRE.
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
