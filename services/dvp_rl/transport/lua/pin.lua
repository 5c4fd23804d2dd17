#!lua flags=allow-oom
-- Replaces the pinned seqs. ARGV: fence, then the seqs that checkpoints need.
local refused = fenced_off(ARGV[1])
if refused then return refused end
redis.call('DEL', PINNED)
for i = 2, #ARGV do redis.call('SADD', PINNED, ARGV[i]) end
