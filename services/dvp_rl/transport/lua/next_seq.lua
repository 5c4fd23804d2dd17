#!lua flags=allow-oom
-- Allocates a weight seq. ARGV: fence, a seq used before (from a checkpoint, in case the broker was wiped).
local refused = fenced_off(ARGV[1])
if refused then return refused end
local seq = math.max(redis.call('GET', SEQ) or 0, ARGV[2]) + 1
redis.call('SET', SEQ, seq)
return seq
