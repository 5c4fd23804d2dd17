#!lua flags=allow-oom
-- A checkpoint covers these: forget them. ARGV: fence, stream, then (entry id, job id) each.
local refused = fenced_off(ARGV[1])
if refused then return refused end
for i = 3, #ARGV, 2 do
  local entry, id = ARGV[i], ARGV[i + 1]
  count('acked', redis.call('XACK', ARGV[2], TRAINER_GROUP, entry))
  redis.call('XDEL', ARGV[2], entry)
  -- After a wipe the job may live again, and its group is told by another entry.
  local told = redis.call('HGET', JOB .. id, 'told') == entry
  if told then redis.call('UNLINK', RESULT .. id) end
  redis.call('SREM', IN_FLIGHT, id)
  redis.call('SREM', UNCHECKPOINTED, id)
  if told then redis.call('EXPIRE', JOB .. id, RESULT_TTL_S) end
end
