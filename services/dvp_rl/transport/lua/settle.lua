#!lua flags=allow-oom
-- Moves train jobs from in flight to awaiting their checkpoint. ARGV: fence, 'trained' or 'dropped', job ids.
local refused = fenced_off(ARGV[1])
if refused then return refused end
for i = 3, #ARGV do
  redis.call('SREM', IN_FLIGHT, ARGV[i])
  if redis.call('SADD', UNCHECKPOINTED, ARGV[i]) == 1 then count(ARGV[2]) end
end
