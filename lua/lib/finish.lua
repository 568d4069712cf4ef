-- complete and fail are one transition to two statuses. PEXPIRE goes first: a full server refuses HSET as a
-- script's first write, but not after it, so what already ran is still stored.
local function finish(outcome)
  local row = KEYS[1]
  local generation, owner, retention = ARGV[1], ARGV[2], ARGV[3]
  local response_status, response_headers, response_body, response_omitted = ARGV[4], ARGV[5], ARGV[6], ARGV[7]

  local current = redis.call('HMGET', row, 'status', 'generation', 'owner')
  if current[2] ~= generation or current[3] ~= owner then return {'fenced'} end
  if current[1] == outcome then
    redis.call('PEXPIRE', row, retention)
    return {outcome}
  end
  if current[1] ~= 'pending' then return {'fenced'} end

  redis.call('PEXPIRE', row, retention)
  redis.call('HSET', row, 'status', outcome, 'response_status', response_status,
    'response_headers', response_headers, 'response_body', response_body, 'updated_at', text(now_ms()))
  if response_omitted ~= '' then
    redis.call('HSET', row, 'response_omitted', response_omitted)
  end
  return {outcome}
end
