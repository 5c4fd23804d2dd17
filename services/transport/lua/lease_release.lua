#!lua flags=allow-oom
-- ARGV: token.
if redis.call('HGET', LEASE, 'token') == ARGV[1] then return redis.call('DEL', LEASE) end
return 0
