#!lua flags=allow-oom
-- Deletes a session and its turns. ARGV: session id, caller or ''. Answers the state that it had, or 'unknown'.
local id, caller = unpack(ARGV)
local state, whose = unpack(redis.call('HMGET', SESSION .. id, 'state', 'caller'))
if not state or not may_see(caller, 'client', whose) then return 'unknown' end
redis.call('UNLINK', SESSION .. id, TURNS .. id)
hold(':session:' .. id, 0)
if state == 'open' then count('sessions_deleted') end
return state
