--[[
survey: count the finished rows among many, and return the state of each other row; for people, not for attempts.

KEYS
  1..  rows            hashes    of one server; on a cluster, one row
ARGV
  1  token             integer   number of the call
  2  now               ms        since the epoch, by the caller's clock; compared with created_at only
  3  period            ms        rows that were claimed within this time count as recent
  4  with_finished     1 or 0    with 1, finished rows are returned too
  5  max_bytes         integer   the survey ends after the row with which the bodies exceed this

REPLY
  surveyed  token surveyed_rows completed failed lasting recent oldest
            [position state ttl_ms age_ms left_ms claimed_ms]*
            `lasting` is the number of finished rows without a TTL, `recent` that of recent rows, `oldest` the time
            since the earliest claim (-1: no rows). Then the rows: `state` is running, stale, released, completed,
            failed, corrupt, or unread if only `read` and its caller can judge the row

WRITES  nothing; the TTLs stay
]]
-- include lib/row.lua
-- include lib/corrupt.lua
-- include lib/lease.lua
local rows = KEYS
local token, now, period, with_finished, max_bytes = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local omissions = {['too_large'] = 1, ['not_wanted'] = 1, ['not_encodable'] = 1, ['broken_off'] = 1}

-- Returns true only for headers that every reader accepts: pairs of plain ASCII strings without escapes.
local function plain(headers)
  if headers == '[]' then return true end
  if string.sub(headers, 1, 1) ~= '[' then return false end
  local start = 2
  while true do
    local _, stop = string.find(headers, '^%["[%w!#$%%&\39*+%-.^_`|~]+","[^"\\%c\127-\255]*"%]', start)
    local following = stop and string.sub(headers, stop + 1)
    if following == ']' then return true end
    if not following or string.sub(following, 1, 1) ~= ',' then return false end
    start = stop + 2
  end
end

-- Returns the position after a JSON value that every reader accepts: strings without escapes, integers, and not deep.
local function after_json(text, first, depth)
  local _, stop = string.find(text, '^"[^"\\%c\127-\255]*"', first)
  if stop then return stop + 1 end
  for _, word in ipairs({'^-?[1-9]%d*', '^-?0', '^null', '^true', '^false'}) do
    _, stop = string.find(text, word, first)
    if stop then return stop - first < 100 and stop + 1 or nil end
  end
  local opened, at = string.sub(text, first, first), first + 1
  local closed = opened == '[' and ']' or opened == '{' and '}'
  if not closed or depth > 9 then return nil end
  if string.sub(text, at, at) == closed then return at + 1 end
  while true do
    if opened == '{' then
      _, stop = string.find(text, '^"[^"\\%c\127-\255]*": ?', at)
      if not stop then return nil end
      at = stop + 1
    end
    at = after_json(text, at, depth + 1)
    if not at then return nil end
    if string.sub(text, at, at) == closed then return at + 1 end
    _, stop = string.find(text, '^, ?', at)
    if not stop then return nil end
    at = stop + 1
  end
end

-- Returns true if this response and checkpoint can be judged without a reader that knows all of JSON.
local function readable(progress)
  local checkpoint, checkpoint_data = progress[5], progress[6]
  if checkpoint then
    if string.find(checkpoint, '[\128-\255]') then return false end
    if after_json(checkpoint_data, 1, 0) ~= #checkpoint_data + 1 then return false end
  end
  if not progress[1] then return true end
  return #progress[1] == 3 and tonumber(progress[1]) >= 100 and plain(progress[2])
    and (not progress[4] or omissions[progress[4]] ~= nil)
end

local counts, lasting, recent, oldest, bytes, surveyed_rows = {['completed'] = 0, ['failed'] = 0}, 0, 0, -1, 0, 0
local others = {}
for i, row in ipairs(rows) do
  if bytes > tonumber(max_bytes) then break end
  surveyed_rows = i
  local ttl = redis.call('PTTL', row)
  if ttl ~= -2 then
    local state, age, left, claimed = 'corrupt', 0, 0, 0
    local for_people = redis.pcall('HMGET', row, 'created_at', 'route')
    if not for_people.err then
      local attempt, progress = attempt_of(row), progress_of(row)
      bytes = bytes + #(progress[3] or '')
      if not fault(attempt, progress, ttl) then
        if ttl >= 0 then age = math.max(attempt[6] - ttl, 0) end
        local created_at = integer(for_people[1])
        claimed = created_at and math.max(now - created_at, 0) or age
        state = attempt[1]
        if state == 'pending' then
          left = lease_left(attempt[5], attempt[6], ttl)
          state = left > 0 and 'running' or attempt[3] == '' and 'released' or 'stale'
        end
        if not readable(progress) then
          state = 'unread'
        else
          if ttl < 0 then lasting = lasting + 1 end
          if claimed <= tonumber(period) then recent = recent + 1 end
          oldest = math.max(oldest, claimed)
        end
      end
    elseif not string.find(tostring(for_people.err), 'WRONGTYPE') then
      return for_people
    end
    if counts[state] then counts[state] = counts[state] + 1 end
    if not counts[state] or with_finished == '1' then
      for _, value in ipairs({i, state, ttl, age, left, claimed}) do others[#others + 1] = value end
    end
  end
end

local reply = {'surveyed', token, surveyed_rows, counts['completed'], counts['failed'], lasting, recent, oldest}
for _, value in ipairs(others) do reply[#reply + 1] = value end
return reply
