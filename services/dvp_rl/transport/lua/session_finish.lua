#!lua flags=allow-oom
-- Ends a session. A client's is kept like a result; that of an episode becomes part of its job's group. ARGV: session
-- id, caller or '', nonce of the session that was read, number of turns that were read, reward or '', whether it was cut
-- off or '', what was counted or '', the Session if it is not stored or '', for an episode the Group of it alone. Answers
-- the state that it had, 'unknown', 'empty' (it has no turn) or 'changed' (it has more turns).
local id, caller, nonce, turns, reward, cut, metrics, session, group = unpack(ARGV)
local hash = SESSION .. id
local state, whose, opened, given, was_cut, counted, recorded, job, index =
  unpack(redis.call('HMGET', hash, 'state', 'caller', 'nonce', 'reward', 'cut', 'metrics', 'turns', 'job', 'index'))
if not state or not may_see(caller, 'client', whose) or opened ~= nonce then return 'unknown' end
if state == 'finished' then
  counted = counted or ''
  if given == reward and was_cut == cut and counted == metrics then return state end
  given = given == '' and 'no reward' or 'reward ' .. given
  if was_cut ~= '' then given = given .. ', as cut off' end
  if counted ~= '' then given = given .. ', metrics ' .. counted end
  return redis.error_reply('CONFLICT session ' .. id .. ' was finished with ' .. given)
end
if not is_played(id, job, index) then return 'unknown' end
if not recorded then return 'empty' end
if recorded ~= turns then return 'changed' end
redis.call('HSET', hash, 'state', 'finished', 'reward', reward, 'cut', cut, 'metrics', metrics, 'idle_ms', 1000 * RESULT_TTL_S)
keep_session(id)
if not job then return state end

redis.call('UNLINK', TURNS .. id)
if session ~= '' then redis.call('HSETNX', hash, 'data', session) end
-- What was kept of each turn.
for _, field in ipairs(redis.call('HKEYS', hash)) do
  if string.find(field, ':') then redis.call('HDEL', hash, field) end
end
redis.call('ZREM', EPISODES, episode_name(job, index))
redis.call('HDEL', JOB .. job, 'session:' .. index)
redis.call('HSET', PLAYED .. job, index, group)
local size = redis.call('HINCRBY', JOB .. job, 'size', #group)
if redis.call('HINCRBY', JOB .. job, 'left', -1) > 0 then return state end
report(job, redis.call('HGET', JOB .. job, 'sink'), 'episodes', size)
redis.call('HSET', JOB .. job, 'state', 'done')
redis.call('HDEL', JOB .. job, 'data', 'num')
count_committed()
return state
