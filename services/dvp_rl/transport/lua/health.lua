#!lua flags=no-writes
-- A consistent snapshot of the run, as JSON. ARGV: most replicas to list.
local now = now_ms()

local function stream_of(stream)
  local oldest = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  local length, waiting = redis.call('XLEN', stream), unread(stream)
  -- A requeued job keeps its first time in `at`.
  local at = oldest and tonumber(fields_of(oldest[2]).at) or oldest and tonumber(string.match(oldest[1], '^%d+'))
  return {backlog = waiting, pending = length - waiting, oldest_ms = at and now - at or -1}
end

-- Time that the next job of a client has waited for a replica, in ms.
local function client_wait()
  local groups = if_there('XINFO', 'GROUPS', CLIENT_JOBS)
  local read = groups and groups[1] and fields_of(groups[1])['last-delivered-id']
  local first = read and redis.call('XRANGE', CLIENT_JOBS, '(' .. read, '+', 'COUNT', 1)[1]
  -- Since this entry was added: a requeued job was running before.
  return first and now - string.match(first[1], '^%d+') or 0
end

-- Episodes that wait for a harness, episodes that are played, and the one of these that will be given to another harness
-- first: of equal idle_ms, it has had no turn or heartbeat for the longest time. nil if the run never had any.
local function episodes()
  local num, waiting = redis.call('ZCARD', EPISODES), redis.call('ZCOUNT', EPISODES, '-inf', now)
  if num == 0 and not redis.call('HGET', COUNTERS, 'harness_at') then return nil end
  local found = {waiting = waiting, played = num - waiting, waited_ms = -1, silent_ms = -1}
  if waiting > 0 then found.waited_ms = now - redis.call('ZRANGE', EPISODES, 0, 0, 'WITHSCORES')[2] end
  local name, ends = unpack(redis.call('ZRANGEBYSCORE', EPISODES, '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1))
  if name then
    local job, index = episode_of(name)
    local idle_ms, session = unpack(redis.call('HMGET', JOB .. job, 'idle_ms', 'session:' .. index))
    if session then
      found.idle_ms, found.silent_ms = tonumber(idle_ms), idle_ms - (ends - now)
      found.silent = 'episode ' .. index .. ' of job ' .. job .. ' (session ' .. session .. ')'
    end
  end
  return found
end

local replicas = {}
local seen = redis.call('ZREVRANGE', REPLICAS, 0, ARGV[1] - 1, 'WITHSCORES')
for i = 1, #seen, 2 do
  local fields = fields_of(redis.call('HGETALL', REPLICA .. seen[i]))
  fields.id, fields.age_ms, fields.up_ms = seen[i], now - seen[i + 1], tonumber(fields.since) and now - fields.since
  replicas[#replicas + 1] = fields
end
local backlogs = {}
for i, entry in ipairs(redis.call('XRANGE', BACKLOGS, '-', '+')) do backlogs[i] = entry[2][2] end
local memory, disk = redis.call('INFO', 'memory'), redis.call('INFO', 'persistence')
local last = redis.call('XREVRANGE', VERSIONS, '+', '-', 'COUNT', 1)[1]
local announced = last and fields_of(last[2]) or {}
return cjson.encode({
  now_ms = now,
  jobs = stream_of(JOBS),
  client_jobs = stream_of(CLIENT_JOBS),
  client_wait_ms = client_wait(),
  groups = stream_of(GROUPS),
  episodes = episodes(),
  client_sessions = redis.call('ZCOUNT', CLIENT_SESSIONS, '(' .. now, '+inf'),
  in_flight = redis.call('SCARD', IN_FLIGHT),
  uncheckpointed = redis.call('SCARD', UNCHECKPOINTED),
  dead = redis.call('XLEN', DEAD),
  counters = fields_of(redis.call('HGETALL', COUNTERS)),
  replicas = replicas,
  trainer = fields_of(redis.call('HGETALL', TRAINER)),
  used_memory = tonumber(string.match(memory, 'used_memory:(%d+)')),
  maxmemory = tonumber(string.match(memory, 'maxmemory:(%d+)')),
  disk_refuses = string.find(disk, 'last_write_status:err') ~= nil or string.find(disk, 'last_bgsave_status:err') ~= nil,
  version = announced.version or '',
  min_seq = tonumber(announced.min_seq or 0),
  backlogs = backlogs,
  closed = redis.call('GET', CLOSED) or '',
  client_bytes = total(CLIENT_RESERVED) + total(CLIENT_HELD),
})
