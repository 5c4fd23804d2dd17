#!lua flags=no-writes
-- Answers {holder, host, pid, since, ms left} of the trainer's lease; nothing if nobody holds it.
if redis.call('EXISTS', LEASE) == 0 then return {} end
local holder = redis.call('HMGET', LEASE, 'holder', 'host', 'pid', 'since')
table.insert(holder, redis.call('PTTL', LEASE))
return holder
