#!lua
-- Opens a session. ARGV: session id, record, caller or '', ms until it is forgotten, nonce. Answers {'new', 'open' or
-- 'finished' (it exists), or what client_refusal returns; two numbers with details}.
local id, data, caller, idle_ms, nonce = unpack(ARGV)
local hash, bytes = SESSION .. id, 2 * KEY_BYTES + #data
local state, whose = unpack(redis.call('HMGET', hash, 'state', 'caller'))
if state then
  if not may_see(caller, 'client', whose) then
    return redis.error_reply('CONFLICT session ' .. id .. ' is another caller\'s')
  elseif redis.call('HGET', hash, 'data') ~= data then
    return redis.error_reply('CONFLICT session ' .. id .. ' exists with other settings')
  end
  return {state, 0, 0}
end
local refusal, taken, allowed = client_refusal(bytes, caller)
if closed() then refusal = 'closed' end
if refusal then return {refusal, taken, allowed} end
redis.call('HSET', hash, 'state', 'open', 'caller', caller, 'data', data, 'idle_ms', idle_ms, 'bytes', bytes, 'nonce', nonce)
own(':session:' .. id, caller)
keep_session(id)
return {'new', taken, allowed}
