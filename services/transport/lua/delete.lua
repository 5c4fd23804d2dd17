#!lua flags=allow-oom
-- Forgets a client's job: what was queued or running is cancelled, a result is gone. ARGV: job id.
-- Answers the state that it had, 'unknown', or 'foreign' if it is the trainer's.
local id = ARGV[1]
local state, sink, entry = unpack(redis.call('HMGET', JOB .. id, 'state', 'sink', 'entry'))
if not state then return 'unknown' end
if sink ~= 'client' then return 'foreign' end
if entry then drop(JOBS, REPLICA_GROUP, entry) end
redis.call('UNLINK', RESULT .. id)
redis.call('DEL', JOB .. id)
book(id, 0)
if state == 'queued' or state == 'running' then count('cancelled') end
return state
