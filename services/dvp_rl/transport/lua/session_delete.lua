#!lua flags=allow-oom
-- Deletes a session and its turns. An episode that is not finished may be taken again at once; after too many errors its
-- job is dead. ARGV: session id, caller or '', error of the episode or '', most deliveries, author ('': the client), ms
-- without a turn or heartbeat below which it is left alone, as is a finished one ('': it is deleted in any case).
-- Answers the state that the session had, 'unknown', or 'other' (it is left alone).
local id, caller, message, most, author, silent_ms = unpack(ARGV)
local state, whose, job, index, idle_ms =
  unpack(redis.call('HMGET', SESSION .. id, 'state', 'caller', 'job', 'index', 'idle_ms'))
if not state or not may_see(caller, 'client', whose) then return 'unknown' end
if silent_ms ~= '' and (state ~= 'open' or idle_ms - redis.call('PTTL', SESSION .. id) < tonumber(silent_ms)) then
  return 'other'
end
redis.call('UNLINK', SESSION .. id, TURNS .. id)
if author ~= '' then
  audit(author, 'deleted session', id)
elseif job then
  redis.call('HSET', COUNTERS, 'harness_at', now_ms())
end
if not job then
  hold(':session:' .. id, 0)
  redis.call('ZREM', CLIENT_SESSIONS, id)
elseif state == 'finished' or not is_played(id, job, index) then
  return state
elseif message ~= '' then
  fail_episode(job, index, message, most, caller)
else
  redis.call('HDEL', JOB .. job, 'session:' .. index)
  redis.call('ZADD', EPISODES, 'XX', now_ms(), episode_name(job, index))
end
return state
