-- Returns the response and the checkpoint of the row.
local function progress_of(row)
  return redis.call('HMGET', row, 'response_status', 'response_headers', 'response_body', 'response_omitted',
    'checkpoint', 'checkpoint_data', 'checkpoint_seq')
end

-- Returns the integer, or nil or false if the value is not one of at most 15 digits, which Lua represents exactly.
local function integer(value)
  return value and #value <= 15 and string.match(value, '^%d+$') and tonumber(value)
end

-- Returns why these fields and this TTL are not a valid row's, or nil. This is the only definition of a corrupt row.
local function fault(attempt, progress, ttl)
  local status, generation, owner = attempt[1], attempt[2], attempt[3]
  local fingerprint, lease, retention = attempt[4], attempt[5], attempt[6]
  local response_status, response_headers, response_body = progress[1], progress[2], progress[3]
  local checkpoint, checkpoint_data, checkpoint_seq = progress[5], progress[6], progress[7]

  if not status then return 'status is missing' end
  if status ~= 'pending' and status ~= 'completed' and status ~= 'failed' then return 'status is unknown' end
  if (integer(generation) or 0) < 1 then return 'generation is not a positive integer' end
  if not owner then return 'owner is missing' end
  if not fingerprint then return 'fingerprint is missing' end
  if not integer(lease) then return 'lease is not an integer' end
  if (integer(retention) or 0) < 1 then return 'retention is not a positive integer' end
  if status == 'pending' then
    if ttl < 0 then return 'it is pending and has no TTL' end
    if response_status then return 'it is pending and has a response' end
  else
    if not integer(response_status) then return 'response_status is not an integer' end
    if not response_headers then return 'response_headers is missing' end
    if not response_body then return 'response_body is missing' end
  end
  if checkpoint or checkpoint_data or checkpoint_seq then
    if not (checkpoint and checkpoint_data) then return 'the checkpoint is incomplete' end
    if not integer(checkpoint_seq) then return 'checkpoint_seq is not an integer' end
  end
end

-- Returns the reply with the row's checkpoint appended, if there is one.
local function with_checkpoint(reply, progress)
  for i = 5, 7 do
    if progress[i] then reply[#reply + 1] = progress[i] end
  end
  return reply
end
