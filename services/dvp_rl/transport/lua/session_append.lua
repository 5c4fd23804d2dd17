#!lua
-- Records a turn. ARGV: session id, caller or '', nonce of the session that was read, index and id of the turn's parent
-- or '', turn id, record, number of tokens, 1 if it drifted, most bytes of all records, the Session if it is not
-- stored or ''. Answers {'new' or 'recorded', the index of the turn; or 'unknown', 'finished', 'full', 'crowded' or what
-- client_refusal returns, and two numbers with details}.
local id, caller, nonce, parent, parent_id, turn, data, tokens, drifted, most, session = unpack(ARGV)
local hash = SESSION .. id
local state, whose, opened, bytes, at, job, index =
  unpack(redis.call('HMGET', hash, 'state', 'caller', 'nonce', 'bytes', 'turn:' .. turn, 'job', 'index'))
-- Since it was read, the session may have been deleted and opened again, or the broker may have lost its last writes.
local known = parent == '' or redis.call('HGET', hash, 'turn:' .. parent_id) == parent
if not state or not may_see(caller, 'client', whose) or opened ~= nonce or not known then return {'unknown', 0, 0} end
if at then return {'recorded', tonumber(at), 0} end
if state ~= 'open' then return {state, 0, 0} end
if not is_played(id, job, index) then return {'unknown', 0, 0} end
local more = KEY_BYTES + #data
if bytes + more > tonumber(most) then return {'full', tonumber(bytes), tonumber(most)} end
local refusal, taken, allowed
if job then
  -- Episodes of the trainer's must leave room for those that are finished.
  refusal, taken, allowed = memory_above(RESULT_SHARE) and 'crowded', 0, 0
else
  refusal, taken, allowed = client_refusal(more, caller)
end
if refusal then return {refusal, taken, allowed} end
local before = redis.call('RPUSH', TURNS .. id, data) - 1
redis.call('HSET', hash, 'turn:' .. turn, before, 'bytes', bytes + more)
if session ~= '' then redis.call('HSETNX', hash, 'data', session) end
redis.call('HINCRBY', hash, 'turns', 1)
redis.call('HINCRBY', hash, 'drifted', drifted)
redis.call('HINCRBY', hash, 'tokens', tokens)
-- A turn continues its parent's branch, unless another turn did so before, and opens one otherwise.
if parent == '' or redis.call('HSETNX', hash, 'after:' .. parent, before) == 0 then
  redis.call('HINCRBY', hash, 'branches', 1)
end
keep_session(id)
return {'new', before, 0}
