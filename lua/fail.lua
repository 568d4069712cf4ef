--[[
fail: store the final failure of the attempt that owns the row; it is replayed until the retention ends.

KEYS
  1  row                hash
ARGV
  1  generation         integer   from the reply of claim or takeover
  2  owner              text      the attempt's token
  3  retention          ms        from now: the row's TTL
  4  response_status    integer
  5  response_headers   JSON      list of [name, value] pairs
  6  response_body      bytes
  7  response_omitted   text      why there is no body, or empty

REPLY
  failed    token            the response is stored, now or by an earlier call of this attempt
  fenced    token            another attempt owns the row, or the row is gone or finished otherwise; nothing was changed

WRITES  status, response_*, retention and the TTL, on "failed" only (if sent again: the TTL, and retention if it changes)
]]
-- include lib/clock.lua
-- include lib/finish.lua
return finish('failed')
