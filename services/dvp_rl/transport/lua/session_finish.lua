#!lua flags=allow-oom
-- Ends a session; its record is kept like a client's result. ARGV: session id, caller or '', reward or ''. Answers the
-- state that it had, 'unknown' or 'empty' (it has no turn).
local id, caller, reward = unpack(ARGV)
local hash = SESSION .. id
local state, whose, given = unpack(redis.call('HMGET', hash, 'state', 'caller', 'reward'))
if not state or not may_see(caller, 'client', whose) then return 'unknown' end
if state == 'finished' and given ~= reward then
  return redis.error_reply('CONFLICT session ' .. id .. ' was finished with ' .. (given == '' and 'no reward' or 'reward ' .. given))
elseif state == 'open' then
  if redis.call('EXISTS', TURNS .. id) == 0 then return 'empty' end
  redis.call('HSET', hash, 'state', 'finished', 'reward', reward, 'idle_ms', 1000 * RESULT_TTL_S)
  keep_session(id)
  count('sessions_finished')
end
return state
