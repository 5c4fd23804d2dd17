#!lua flags=allow-oom
-- Train jobs that leave the in-flight count and await their checkpoint. ARGV: fence, 'trained' or 'dropped', job ids.
local refused = fenced_off(ARGV[1])
if refused then return refused end
for i = 3, #ARGV do
  redis.call('SREM', IN_FLIGHT, ARGV[i])
  if redis.call('SADD', UNCHECKPOINTED, ARGV[i]) == 1 then count(ARGV[2]) end
end
