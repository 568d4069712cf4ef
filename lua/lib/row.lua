-- Why these fields cannot be a row's, or nil. A row that is not understood is never run and never overwritten.
local function fault(status, generation, owner, fingerprint, lease_until)
  if not status then return 'status is missing' end
  if status ~= 'pending' and status ~= 'completed' and status ~= 'failed' then return 'status is unknown' end
  if not integer(generation) or integer(generation) < 1 then return 'generation is not a positive integer' end
  if not owner then return 'owner is missing' end
  if not fingerprint then return 'fingerprint is missing' end
  if not integer(lease_until) then return 'lease_until is not an integer' end
end

-- What the owner of a reservation is told: the generation, and the checkpoint where there is one.
local function claimed(row, generation)
  local checkpoint = redis.call('HMGET', row, 'checkpoint', 'checkpoint_data', 'checkpoint_seq')
  if not (checkpoint[1] and checkpoint[2] and checkpoint[3]) then
    return {'claimed', generation}
  end
  return {'claimed', generation, checkpoint[1], checkpoint[2], checkpoint[3]}
end
