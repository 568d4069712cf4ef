--[[
read: return the row's fields and its TTL, read in one step.

KEYS
  1  row           hash
ARGV
  1  token         integer   number of the call
  2  with_body     1 or 0    with 0, the reply has the body's length in place of the body

REPLY
  row      token ttl_ms status generation owner fingerprint lease retention created_at route response_status
           response_headers response_body response_omitted checkpoint checkpoint_data checkpoint_seq
           an absent field is empty; ttl_ms is -1 if there is no TTL
  none     token               there is no such row
  corrupt  token ttl_ms why    the row was not written by this ledger, or was edited

WRITES  nothing; the TTL stays
]]
-- include lib/row.lua
-- include lib/corrupt.lua
local row = KEYS[1]
local token, with_body = ARGV[1], ARGV[2]

local ttl = redis.call('PTTL', row)
if ttl == -2 then return {'none', token} end
local for_people = redis.pcall('HMGET', row, 'created_at', 'route')
if for_people.err then
  if string.find(tostring(for_people.err), 'WRONGTYPE') then return {'corrupt', token, ttl, 'it is not a hash'} end
  return for_people
end

local attempt, progress = attempt_of(row), progress_of(row)
local why = fault(attempt, progress, ttl)
if why then return {'corrupt', token, ttl, why} end
if with_body == '0' and progress[3] then progress[3] = #progress[3] end
local reply = {'row', token, ttl}
for _, fields in ipairs({attempt, for_people, progress}) do
  for i = 1, #fields do reply[#reply + 1] = fields[i] or '' end
end
return reply
