#!lua flags=allow-oom
-- Takes over entries whose lease ran out. ARGV: consumer, lease in ms, count, most deliveries, then the caller's own live
-- entries. Answers (entry id, job id, data, consumer that let it go) each.
local held = {}
for i = 5, #ARGV do held[ARGV[i]] = true end
local lease, most, wanted = tonumber(ARGV[2]), tonumber(ARGV[4]), tonumber(ARGV[3])
-- Nobody could renew while the broker was away: all get one lease time to come back.
local uptime_s = string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)')
if uptime_s * 1000 < lease then return {} end
local pending = redis.pcall('XPENDING', JOBS, REPLICA_GROUP, 'IDLE', lease, '-', '+', wanted + #ARGV - 4)
local taken = {}
for _, item in ipairs(pending.err and {} or pending) do
  local entry, before = item[1], item[2]
  if #taken < wanted and not held[entry] then
    local fields = read(JOBS, entry) or {}
    local deliveries = 0
    -- The caller's own forgotten entry is one whose reply was lost on the network, and did not kill anyone.
    if before ~= ARGV[1] and fields.id then
      deliveries = redis.call('HINCRBY', JOB .. fields.id, 'deliveries', 1)
      count('redelivered')
    end
    if not fields.data then
      drop(JOBS, REPLICA_GROUP, entry)
    elseif fields.id and ended(fields.id) then
      drop(JOBS, REPLICA_GROUP, entry)
      count('duplicates')
    elseif deliveries >= most then
      bury(JOBS, REPLICA_GROUP, entry, fields, 'its replica died or hung ' .. deliveries .. ' times, last ' .. before, before)
    else
      redis.call('XCLAIM', JOBS, REPLICA_GROUP, ARGV[1], 0, entry, 'JUSTID')
      taken[#taken + 1] = {entry, fields.id or '', fields.data, before}
    end
  end
end
return taken
