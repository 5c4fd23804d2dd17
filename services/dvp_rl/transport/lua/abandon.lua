#!lua flags=allow-oom
-- Requeues everything a consumer still owns, and removes the consumer. ARGV: stream, consumer.
local pending
repeat
  pending = if_there('XPENDING', ARGV[1], REPLICA_GROUP, '-', '+', 100, ARGV[2])
  if not pending then return 0 end
  for _, item in ipairs(pending) do requeue(ARGV[1], item[1]) end
until #pending == 0
return redis.call('XGROUP', 'DELCONSUMER', ARGV[1], REPLICA_GROUP, ARGV[2])
