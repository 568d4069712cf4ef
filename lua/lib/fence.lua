-- The fence is (generation, owner): a row that expired or was lost begins again at generation 1.
-- Returns the row's lease and retention where this attempt holds it.
local function held_by(row, generation, owner)
  local current = redis.call('HMGET', row, 'status', 'generation', 'owner', 'lease', 'retention')
  if current[1] == 'pending' and current[2] == generation and current[3] == owner then
    return current[4], current[5]
  end
end
