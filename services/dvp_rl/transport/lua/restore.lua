#!lua flags=allow-oom
-- The books of a resumed trainer. ARGV: fence, then the job ids that are outstanding.
local refused = fenced_off(ARGV[1])
if refused then return refused end
redis.call('DEL', IN_FLIGHT, UNCHECKPOINTED)
for i = 2, #ARGV do
  if redis.call('HGET', JOB .. ARGV[i], 'state') ~= 'dead' then redis.call('SADD', IN_FLIGHT, ARGV[i]) end
end
