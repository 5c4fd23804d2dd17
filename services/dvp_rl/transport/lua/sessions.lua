#!lua flags=no-writes
-- Open sessions of each kind that will be forgotten first. ARGV: most of clients', most of episodes'. Answers for each
-- (session id, caller, job id, sink, index, turns, branches, drifted, tokens, bytes, ms without a turn, ms until it
-- is forgotten); a client's has '' as job id and sink.
local rows, now = {}, now_ms()

local function add(id, ends)
  local state, caller, job, index, idle_ms =
    unpack(redis.call('HMGET', SESSION .. id, 'state', 'caller', 'job', 'index', 'idle_ms'))
  if state ~= 'open' then return end
  local row = {id, caller or '', job or '', job and redis.call('HGET', JOB .. job, 'sink') or '', tonumber(index) or 0}
  for _, count in ipairs(redis.call('HMGET', SESSION .. id, 'turns', 'branches', 'drifted', 'tokens', 'bytes')) do
    row[#row + 1] = tonumber(count) or 0
  end
  row[#row + 1] = (tonumber(idle_ms) or 0) - (ends - now)
  row[#row + 1] = ends - now
  rows[#rows + 1] = row
end

local function kept(set, most)
  return redis.call('ZRANGEBYSCORE', set, '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
end

local clients, played = kept(CLIENT_SESSIONS, ARGV[1]), kept(EPISODES, ARGV[2])
for i = 1, #clients, 2 do add(clients[i], clients[i + 1]) end
for i = 1, #played, 2 do
  local job, index = episode_of(played[i])
  local session = job and redis.call('HGET', JOB .. job, 'session:' .. index)
  if session then add(session, played[i + 1]) end
end
return rows
