--[[
checkpoint: save how far the attempt that owns the row got, and extend its lease.

KEYS
  1  row               hash
ARGV
  1  generation        integer   from the reply of claim or takeover
  2  owner             text      the attempt's token
  3  lease             ms        new length, from now
  4  retention         ms        from now: the row's TTL
  5  checkpoint        text      name of the step that is done
  6  checkpoint_data   JSON
  7  checkpoint_seq    integer   grows with each checkpoint of the attempt

REPLY
  saved    token             it is saved, or this attempt already saved a later one, which stays
  fenced   token             another attempt owns the row, or the row is gone or finished; nothing was changed

WRITES  checkpoint, checkpoint_data, checkpoint_seq, lease, retention and the TTL, on "saved" only
]]
-- include lib/clock.lua
-- include lib/fence.lua
local row = KEYS[1]
local generation, owner, lease, retention = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local checkpoint, checkpoint_data, checkpoint_seq = ARGV[5], ARGV[6], ARGV[7]

local current_lease, current_retention = held_by(row, generation, owner)
if not current_lease then return {'fenced', owner} end
local noted = tonumber(redis.call('HMGET', row, 'checkpoint_seq')[1] or '0') or 0

set_clock(row, current_retention, retention, 'lease', lease)
if tonumber(checkpoint_seq) > noted then
  redis.call('HSET', row, 'checkpoint', checkpoint, 'checkpoint_data', checkpoint_data, 'checkpoint_seq', checkpoint_seq)
end
return {'saved', owner}
