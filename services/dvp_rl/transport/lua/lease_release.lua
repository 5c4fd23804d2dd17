#!lua flags=allow-oom
-- Releases the trainer's lease. ARGV: token. The token becomes invalid, so that dead letters its holder had read can be
-- replayed.
if fenced_off(ARGV[1]) then return 0 end
redis.call('INCR', FENCE)
return redis.call('DEL', LEASE)
