#!lua flags=allow-oom
-- Removes a replica from the registry. ARGV: replica id.
redis.call('ZREM', REPLICAS, ARGV[1])
return redis.call('DEL', REPLICA .. ARGV[1])
