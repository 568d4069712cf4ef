-- Starts the lease again. If neither lease nor retention changes, only the TTL is written.
local function extend_lease(row, current_lease, kept, lease, retention)
  if current_lease == lease then
    set_clock(row, kept, retention)
  else
    set_clock(row, kept, retention, 'lease', lease)
  end
end
