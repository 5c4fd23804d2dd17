#!lua flags=allow-oom
-- ARGV: replica id, milliseconds between two measurements of the backlog, how many are kept, then field, value pairs.
redis.call('ZADD', REPLICAS, now_ms(), ARGV[1])
redis.call('HSET', REPLICA .. ARGV[1], unpack(ARGV, 4))
let_go()
local last = redis.call('XREVRANGE', BACKLOGS, '+', '-', 'COUNT', 1)[1]
if not last or now_ms() - string.match(last[1], '^%d+') >= tonumber(ARGV[2]) then
  redis.call('XADD', BACKLOGS, 'MAXLEN', ARGV[3], '*', 'length', unread(JOBS, REPLICA_GROUP))
end
