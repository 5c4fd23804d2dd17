#!lua flags=allow-oom
-- Deletes a client's job with its result or dead letter; a queued or running job is cancelled.
-- ARGV: job id, the only state in which to do so ('': any), author ('': the client), caller
-- ('': one who may delete all). Answers the state that the job had, 'unknown', or 'other' (not the given state).
local id = ARGV[1]
local state, sink, letter, whose = unpack(redis.call('HMGET', JOB .. id, 'state', 'sink', 'letter', 'caller'))
if not state or not may_see(ARGV[4], sink, whose) then return 'unknown' end
if ARGV[2] ~= '' and state ~= ARGV[2] then return 'other' end
if sink ~= 'client' then
  return redis.error_reply('CONFLICT job ' .. id .. ' is the trainer\'s; only what was submitted over HTTP can be deleted')
end
if state == 'queued' or state == 'running' then
  -- An older version put it into the trainer's queue, or did not record its entry.
  local stream, entry = CLIENT_JOBS, redis.call('HGET', JOB .. id, 'client_entry')
  if not entry then stream, entry = JOBS, redis.call('HGET', JOB .. id, 'entry') end
  if not entry or not read(stream, entry) then
    return redis.error_reply('CONFLICT job ' .. id .. ' cannot be found in the queue; delete it when it has ended')
  end
  drop(stream, entry)
  count('cancelled')
elseif letter then
  redis.call('XDEL', DEAD, letter)
  hold(':dead:' .. letter, 0)
end
redis.call('UNLINK', RESULT .. id)
redis.call('DEL', JOB .. id)
reserve(id, 0)
hold(id, 0)
if ARGV[3] ~= '' then audit(ARGV[3], 'deleted', id) end
return state
