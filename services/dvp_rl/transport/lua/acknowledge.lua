#!lua flags=allow-oom
-- Deletes entries that a checkpoint covers. ARGV: fence, stream, then (entry id, job id) pairs.
local refused = fenced_off(ARGV[1])
if refused then return refused end
for i = 3, #ARGV, 2 do
  local entry, id = ARGV[i], ARGV[i + 1]
  count('acked', redis.call('XACK', ARGV[2], TRAINER_GROUP, entry))
  redis.call('XDEL', ARGV[2], entry)
  -- A broker that was wiped or lost its last writes may have reported the job in another entry.
  if (redis.call('HGET', JOB .. id, 'told') or entry) == entry then
    redis.call('UNLINK', RESULT .. id, PLAYED .. id)
    redis.call('SREM', IN_FLIGHT, id)
    redis.call('SREM', UNCHECKPOINTED, id)
    redis.call('EXPIRE', JOB .. id, RESULT_TTL_S)
  end
end
