-- Numbers as Redis stores them: tostring would write 1.8e+12 for a time.
local function text(number)
  return string.format('%.0f', number)
end

-- nil for what is not a whole number that Lua holds exactly.
local function integer(value)
  return value and #value <= 15 and string.match(value, '^%d+$') and tonumber(value)
end
