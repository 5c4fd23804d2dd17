#!lua flags=allow-oom
-- Gives back everything a consumer still owns, and removes it. ARGV: consumer.
local pending
repeat
  pending = redis.pcall('XPENDING', JOBS, REPLICA_GROUP, '-', '+', 100, ARGV[1])
  if pending.err then return 0 end
  for _, item in ipairs(pending) do requeue(item[1]) end
until #pending == 0
return redis.call('XGROUP', 'DELCONSUMER', JOBS, REPLICA_GROUP, ARGV[1])
