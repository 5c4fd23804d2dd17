#!lua flags=allow-oom
-- A replica's heartbeat. ARGV: replica id, milliseconds between two measurements of the backlog, number of measurements
-- kept, then (field, value) pairs. Answers 1 if a trainer holds the run.
redis.call('ZADD', REPLICAS, now_ms(), ARGV[1])
redis.call('HSET', REPLICA .. ARGV[1], unpack(ARGV, 4))
redis.call('HSETNX', REPLICA .. ARGV[1], 'since', now_ms())

-- Repairs the clients' accounts: of a few random rows, removes those whose job or letter is gone.
end_overdue()
for _, id in ipairs(redis.call('HRANDFIELD', CLIENT_RESERVED, 3)) do
  if id ~= ':total' and (redis.call('EXISTS', JOB .. id) == 0 or ended(id)) then reserve(id, 0) end
end
for _, name in ipairs(redis.call('HRANDFIELD', CLIENT_HELD, 3)) do
  local letter = string.match(name, '^:dead:(.+)')
  local there = letter and read(DEAD, letter) or redis.call('ZSCORE', CLIENT_EXPIRY, name)
  if name ~= ':total' and not there then hold(name, 0) end
end

local last = redis.call('XREVRANGE', BACKLOGS, '+', '-', 'COUNT', 1)[1]
if not last or now_ms() - string.match(last[1], '^%d+') >= tonumber(ARGV[2]) then
  redis.call('XADD', BACKLOGS, 'MAXLEN', ARGV[3], '*', 'length', unread(JOBS) + unread(CLIENT_JOBS))
end
return redis.call('EXISTS', LEASE)
