#!lua flags=allow-oom
-- A session's heartbeat: keeps it open for another idle_ms, as a turn does. ARGV: session id, caller or ''. Answers its
-- state, or 'unknown'.
local id, caller = unpack(ARGV)
local state, whose, job, index = unpack(redis.call('HMGET', SESSION .. id, 'state', 'caller', 'job', 'index'))
if not state or not may_see(caller, 'client', whose) then return 'unknown' end
if state == 'open' then
  if not is_played(id, job, index) then return 'unknown' end
  keep_session(id)
end
return state
