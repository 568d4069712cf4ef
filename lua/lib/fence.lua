-- The fence is (generation, owner), since a row that expired or was lost starts again at generation 1.
-- Returns the row's lease and retention if this attempt owns the row and it is pending, else nothing.
local function held_by(row, generation, owner)
  local current = redis.call('HMGET', row, 'status', 'generation', 'owner', 'lease', 'retention')
  if current[1] == 'pending' and current[2] == generation and current[3] == owner then
    return current[4], current[5]
  end
end
