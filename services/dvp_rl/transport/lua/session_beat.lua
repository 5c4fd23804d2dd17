#!lua flags=allow-oom
-- A session's heartbeat: keeps it open for another idle_ms, as a turn does. ARGV: session id, caller or '', nonce of the
-- session that is meant or '' for any. Answers its state, or 'unknown'.
local id, caller, nonce = unpack(ARGV)
local state, whose, opened, job, index =
  unpack(redis.call('HMGET', SESSION .. id, 'state', 'caller', 'nonce', 'job', 'index'))
if not state or not may_see(caller, 'client', whose) or (nonce ~= '' and nonce ~= opened) then return 'unknown' end
if state == 'open' then
  if not is_played(id, job, index) then return 'unknown' end
  keep_session(id)
end
return state
