#!lua flags=allow-oom
-- Restarts the lease time of the caller's entries. XCLAIM alone would steal an entry back from its new owner.
-- ARGV: consumer, then entry ids. Answers those that are lost.
local lost = {}
for i = 2, #ARGV do
  if owner(JOBS, REPLICA_GROUP, ARGV[i]) == ARGV[1] then
    redis.call('XCLAIM', JOBS, REPLICA_GROUP, ARGV[1], 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
