#!lua flags=allow-oom
-- Renews the trainer's lease, or acquires it again if it expired and nobody took over.
-- ARGV: token, TTL in ms, nonce, holder, host, pid.
local refused = fenced_off(ARGV[1])
if refused then return refused end
redis.call('HSET', LEASE, 'token', ARGV[1], 'nonce', ARGV[3], 'holder', ARGV[4], 'host', ARGV[5], 'pid', ARGV[6])
redis.call('HSETNX', LEASE, 'since', now_ms())
redis.call('PEXPIRE', LEASE, ARGV[2])
