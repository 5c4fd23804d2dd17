#!lua flags=no-writes
-- Open sessions of each kind, clients' and episodes, that will be forgotten first. ARGV: most of each kind. Answers for
-- each (session id, caller, job id, sink, index, turns, branches, drifted, tokens, bytes, ms without a turn, ms until it
-- is forgotten); a client's has '' as job id and sink.
local rows, now = {}, now_ms()

local function add(id, ends)
  local state, caller, job, index, idle_ms = unpack(redis.call('HMGET', SESSION .. id, 'state', 'caller', 'job', 'index', 'idle_ms'))
  if state ~= 'open' then return end
  local row = {id, caller or '', job or '', job and redis.call('HGET', JOB .. job, 'sink') or '', tonumber(index) or 0}
  for _, count in ipairs(redis.call('HMGET', SESSION .. id, 'turns', 'branches', 'drifted', 'tokens', 'bytes')) do
    row[#row + 1] = tonumber(count) or 0
  end
  row[#row + 1] = idle_ms - (ends - now)
  row[#row + 1] = ends - now
  rows[#rows + 1] = row
end

local function kept(set)
  return redis.call('ZRANGEBYSCORE', set, '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[1])
end

local clients, played = kept(CLIENT_SESSIONS), kept(EPISODES)
for i = 1, #clients, 2 do add(clients[i], clients[i + 1]) end
for i = 1, #played, 2 do
  local job, index = episode_of(played[i])
  local session = redis.call('HGET', JOB .. job, 'session:' .. index)
  if session then add(session, played[i + 1]) end
end
return rows
