#!lua flags=allow-oom
-- Resets the in-flight and uncheckpointed sets on resume. ARGV: fence, then the ids of outstanding jobs.
local refused = fenced_off(ARGV[1])
if refused then return refused end
redis.call('DEL', IN_FLIGHT, UNCHECKPOINTED)
for i = 2, #ARGV do
  if redis.call('HGET', JOB .. ARGV[i], 'state') ~= 'dead' then redis.call('SADD', IN_FLIGHT, ARGV[i]) end
end
