-- complete and fail differ only in the status that they set.
local function finish(outcome)
  local row = KEYS[1]
  local generation, owner, retention = ARGV[1], ARGV[2], ARGV[3]
  local response_status, response_headers, response_body, response_omitted = ARGV[4], ARGV[5], ARGV[6], ARGV[7]

  local current = redis.call('HMGET', row, 'status', 'generation', 'owner', 'retention')
  if current[2] ~= generation or current[3] ~= owner then return {'fenced', owner} end
  if current[1] == outcome then
    set_clock(row, current[4], retention)
    return {outcome, owner}
  end
  if current[1] ~= 'pending' then return {'fenced', owner} end

  set_clock(row, current[4], retention, 'status', outcome, 'response_status', response_status,
    'response_headers', response_headers, 'response_body', response_body)
  if response_omitted ~= '' then
    redis.call('HSET', row, 'response_omitted', response_omitted)
  end
  return {outcome, owner}
end
