#!lua flags=allow-oom
-- ARGV: token, ttl in ms, nonce, holder, host, pid. Takes the lease anew if it ran out with nobody in its place.
local refused = fenced_off(ARGV[1])
if refused then return refused end
redis.call('HSET', LEASE, 'token', ARGV[1], 'nonce', ARGV[3], 'holder', ARGV[4], 'host', ARGV[5], 'pid', ARGV[6])
redis.call('HSETNX', LEASE, 'since', now_ms())
redis.call('PEXPIRE', LEASE, ARGV[2])
