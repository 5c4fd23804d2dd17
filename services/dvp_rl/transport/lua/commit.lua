#!lua flags=allow-oom
-- Stores result and dedupe key, acknowledges the entry. ARGV: stream, consumer, entry id, job id, sink, data.
local stream, consumer, entry, id, sink, data = unpack(ARGV)
local hash = JOB .. id
if owner(stream, entry) ~= consumer then
  -- A retry of a commit whose reply was lost.
  if redis.call('HGET', hash, 'committed') == consumer .. '/' .. entry then return 'committed' end
  return not_owner(entry)
end
-- Clients' results stay until they expire, and must leave room for the trainer's groups. The job can be replayed.
if sink == 'client' and not ended(id) and memory_above(RESULT_SHARE) then
  local message = 'the broker has no memory left for a result of ' .. #data .. ' bytes'
  bury(stream, entry, read(stream, entry) or {id = id, sink = sink}, message, consumer)
  return 'no_room'
end
drop(stream, entry)
if ended(id) then
  count('duplicates')
  return 'duplicate'
end
redis.call('HSET', hash, 'state', 'done', 'sink', sink, 'committed', consumer .. '/' .. entry)
redis.call('SET', RESULT .. id, data)
if sink == 'client' then
  redis.call('EXPIRE', RESULT .. id, RESULT_TTL_S)
  redis.call('EXPIRE', hash, RESULT_TTL_S)
  hold(id, KEY_BYTES + #data, now_ms() + 1000 * RESULT_TTL_S)
  reserve(id, 0)
else
  report(id, sink, 'group', #data)
end
count_committed()
return 'committed'
