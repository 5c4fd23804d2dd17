#!lua flags=allow-oom
-- ARGV: fence, a seq that was used before (a checkpoint's: the broker may have been wiped).
local refused = fenced_off(ARGV[1])
if refused then return refused end
local seq = math.max(redis.call('GET', SEQ) or 0, ARGV[2]) + 1
redis.call('SET', SEQ, seq)
return seq
