#!lua flags=allow-oom
-- ARGV: token. Nobody is heard under it again, so that what its holder had read is open to others.
if fenced_off(ARGV[1]) then return 0 end
redis.call('INCR', FENCE)
return redis.call('DEL', LEASE)
