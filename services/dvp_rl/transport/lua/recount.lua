#!lua flags=allow-oom
-- Removes from the in-flight set jobs that the trainer does not wait for: a broker that lost its last writes counts
-- them again. ARGV: fence, then the ids of outstanding jobs. Answers the number removed.
local refused = fenced_off(ARGV[1])
if refused then return refused end
local outstanding, gone = {}, 0
for i = 2, #ARGV do outstanding[ARGV[i]] = true end
for _, id in ipairs(redis.call('SMEMBERS', IN_FLIGHT)) do
  if not outstanding[id] then gone = gone + redis.call('SREM', IN_FLIGHT, id) end
end
return gone
