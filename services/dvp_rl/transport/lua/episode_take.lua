#!lua
-- Gives a caller the next episode, in a session of its own. ARGV: session id, caller or '', nonce, most deliveries.
-- Answers {job id, index, the Job}; or {'taken'} if the session is anything but an open episode of this caller's, {} if
-- there is nothing to play, {'full'} if turns need the memory that is left.
local id, caller, nonce, most = unpack(ARGV)
local hash = SESSION .. id
local state, whose, job, index = unpack(redis.call('HMGET', hash, 'state', 'caller', 'job', 'index'))
-- A retry whose reply was lost.
if state == 'open' and may_see(caller, 'client', whose) and job and is_played(id, job, index) then
  return {job, tonumber(index), redis.call('HGET', JOB .. job, 'data') or ''}
elseif state then
  return {'taken'}
end
while true do
  local name = redis.call('ZRANGEBYSCORE', EPISODES, '-inf', now_ms(), 'LIMIT', 0, 1)[1]
  if not name then return {} end
  if memory_full() then return {'full'} end
  job, index = episode_of(name)
  local data, idle_ms, before = unpack(redis.call('HMGET', JOB .. job, 'data', 'idle_ms', 'session:' .. index))
  if not data then
    redis.call('ZREM', EPISODES, name)
  elseif before then
    fail_episode(job, index, 'nobody played on for its idle_s, or its harness died', most, '')
  else
    redis.call('HSET', JOB .. job, 'state', 'running', 'session:' .. index, id)
    redis.call('HSET', hash, 'state', 'open', 'caller', caller, 'job', job, 'index', index,
      'idle_ms', idle_ms, 'bytes', 0, 'nonce', nonce)
    keep_session(id)
    return {job, tonumber(index), data}
  end
end
