#!lua flags=allow-oom
-- Renews the leases of the caller's entries. XCLAIM alone would steal an entry back from its new owner.
-- ARGV: stream, consumer, then entry ids. Answers the ids whose lease is lost.
local stream, consumer, lost = ARGV[1], ARGV[2], {}
for i = 3, #ARGV do
  if owner(stream, ARGV[i]) == consumer then
    redis.call('XCLAIM', stream, REPLICA_GROUP, consumer, 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
