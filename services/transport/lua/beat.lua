#!lua flags=allow-oom
-- ARGV: replica id, then field, value pairs.
redis.call('ZADD', REPLICAS, now_ms(), ARGV[1])
redis.call('HSET', REPLICA .. ARGV[1], unpack(ARGV, 2))
