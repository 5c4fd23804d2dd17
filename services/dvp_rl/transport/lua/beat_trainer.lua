#!lua flags=allow-oom
-- The trainer's heartbeat. ARGV: fence, then (field, value) pairs.
local refused = fenced_off(ARGV[1])
if refused then return refused end
redis.call('HSET', TRAINER, 'at', now_ms(), unpack(ARGV, 2))
