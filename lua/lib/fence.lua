-- The fence is (generation, owner): a row that expired or was lost begins again at generation 1.
local function holds(row, generation, owner)
  local current = redis.call('HMGET', row, 'status', 'generation', 'owner')
  return current[1] == 'pending' and current[2] == generation and current[3] == owner
end
