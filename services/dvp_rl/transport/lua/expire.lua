#!lua flags=allow-oom
-- Takes over entries whose lease expired. ARGV: stream, consumer, lease in ms, count, most deliveries, then the
-- caller's own live entries. Answers (entry id, job id, data, previous consumer) for each.
local held = {}
for i = 6, #ARGV do held[ARGV[i]] = true end
local stream, consumer = ARGV[1], ARGV[2]
local lease, wanted, most = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
-- Nobody could renew while the broker was down: everyone gets one lease time to come back.
local uptime_s = string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)')
if uptime_s * 1000 < lease then return {} end
local pending = if_there('XPENDING', stream, REPLICA_GROUP, 'IDLE', lease, '-', '+', wanted + #ARGV - 5)
local taken = {}
for _, item in ipairs(pending or {}) do
  local entry, before = item[1], item[2]
  if #taken < wanted and not held[entry] then
    local fields = read(stream, entry) or {}
    local deliveries = 0
    -- The caller's own entry that it does not hold had its reply lost on the network; it did not kill a replica.
    if before ~= consumer and fields.id then
      deliveries = redis.call('HINCRBY', JOB .. fields.id, 'deliveries', 1)
      count_redelivered(stream)
    end
    if not fields.data then
      drop(stream, entry)
    elseif fields.id and ended(fields.id) then
      drop(stream, entry)
      count('duplicates')
    elseif deliveries >= most then
      bury(stream, entry, fields, 'its replica died or hung ' .. deliveries .. ' times, last ' .. before, before)
    else
      redis.call('XCLAIM', stream, REPLICA_GROUP, consumer, 0, entry, 'JUSTID')
      taken[#taken + 1] = {entry, fields.id or '', fields.data, before}
    end
  end
end
return taken
