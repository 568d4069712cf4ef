--[[
fail: store the final failure of the attempt that owns the row, to be replayed and never run again.

KEYS
  1  row                hash
ARGV
  1  generation         integer   what claim or takeover answered
  2  owner              text      the attempt's token
  3  retention          ms        from now: the row's TTL
  4  response_status    integer
  5  response_headers   JSON      list of [name, value] pairs
  6  response_body      bytes
  7  response_omitted   text      why there is no body, or empty

REPLY
  failed    token            stored now, or by this attempt before
  fenced    token            another attempt owns the row, or it is gone, or finished otherwise; nothing changed

WRITES  status, response_*, retention and the TTL, and only on "failed" (asked again: the TTL, and retention where it changes)
]]
-- include lib/clock.lua
-- include lib/finish.lua
return finish('failed')
