#!lua flags=allow-oom
-- Jobs that count as in flight, and that the trainer does not wait for: a broker that lost its last writes counts them
-- again. ARGV: fence, then the job ids that are outstanding. Answers how many went.
local refused = fenced_off(ARGV[1])
if refused then return refused end
local outstanding, gone = {}, 0
for i = 2, #ARGV do outstanding[ARGV[i]] = true end
for _, id in ipairs(redis.call('SMEMBERS', IN_FLIGHT)) do
  if not outstanding[id] then gone = gone + redis.call('SREM', IN_FLIGHT, id) end
end
return gone
