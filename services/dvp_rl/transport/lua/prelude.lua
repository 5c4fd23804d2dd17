-- Inserted before every script, after the key names.

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The reply of a command; nil where a stream or its group does not exist.
local function if_there(...)
  local reply = redis.pcall(...)
  if not reply.err then return reply end
  if not string.find(reply.err, 'NOGROUP') and not string.find(reply.err, 'no such key') then error(reply) end
end

-- An error reply if a newer trainer than `token` has registered. A broker that was wiped or lost its last writes has
-- forgotten tokens: it adopts the caller's, because no newer trainer has registered since.
local function fenced_off(token)
  local newest, own = tonumber(redis.call('GET', FENCE) or 0) or 0, tonumber(token)
  if newest < own then
    redis.call('SET', FENCE, token)
  elseif newest > own then
    return redis.error_reply('LEASELOST another trainer took over run ' .. RUN_ID)
  end
end

-- Each stream has one consumer group.
local GROUP_OF = {
  [JOBS] = REPLICA_GROUP, [CLIENT_JOBS] = REPLICA_GROUP, [GROUPS] = TRAINER_GROUP, [EVALS] = TRAINER_GROUP,
}

-- The consumer that a pending entry is leased to; nil if it is not pending or the broker was wiped.
local function owner(stream, id)
  local pending = if_there('XPENDING', stream, GROUP_OF[stream], id, id, 1)
  return pending and pending[1] and pending[1][2]
end

local function not_owner(id)
  return redis.error_reply('LEASELOST the lease of entry ' .. id .. ' ran out or its job has ended')
end

local function fields_of(flat)
  local fields = {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end

-- The fields of an entry as a table; nil if it does not exist.
local function read(stream, id)
  local entry = redis.call('XRANGE', stream, id, id)[1]
  if not entry then return nil end
  return fields_of(entry[2])
end

-- Acknowledges and deletes an entry, so that XLEN minus pending is the true backlog.
local function drop(stream, id)
  redis.call('XACK', stream, GROUP_OF[stream], id)
  redis.call('XDEL', stream, id)
end

local function count(counter, by)
  redis.call('HINCRBY', COUNTERS, counter, by or 1)
end

local function count_committed()
  count('committed')
  redis.call('HSET', COUNTERS, 'committed_at', now_ms())
end

local function count_redelivered(stream)
  count(stream == CLIENT_JOBS and 'redelivered_clients' or 'redelivered')
end

local function ended(job_id)
  local state = redis.call('HGET', JOB .. job_id, 'state')
  return state == 'done' or state == 'dead'
end

-- The stream that reports a job's end to the trainer.
local function inbox(sink)
  return sink == 'eval' and EVALS or GROUPS
end

-- Reports a group of `size` bytes to the trainer. The entry only refers to it, so that reading the stream copies nothing
-- large. `kind`: where it is, 'group' (RESULT) or 'episodes' (PLAYED).
local function report(job_id, sink, kind, size)
  local told = redis.call('XADD', inbox(sink), '*',
    'kind', kind, 'id', job_id, 'sink', sink, 'size', size, 'at', now_ms())
  redis.call('HSET', JOB .. job_id, 'told', told)
end

-- True if a trainer's job has ended and the entry that reported it was acknowledged, because a checkpoint covered it. A
-- trainer that submits it again has lost that checkpoint.
local function forgotten(job_id, sink)
  local told = redis.call('HGET', JOB .. job_id, 'told')
  return told and told ~= '' and ended(job_id) and not read(inbox(sink), told)
end

-- The stream in which a job waits for a replica.
local function queue(sink)
  return sink == 'client' and CLIENT_JOBS or JOBS
end

-- Removes an episode's session, if it has one.
local function end_session(job_id, index)
  local session = redis.call('HGET', JOB .. job_id, 'session:' .. index)
  if not session then return end
  redis.call('HDEL', JOB .. job_id, 'session:' .. index)
  redis.call('UNLINK', SESSION .. session, TURNS .. session)
end

local function episode_name(job_id, index)
  return string.format('%s/%04d', job_id, index)
end

-- The job and the index of an episode.
local function episode_of(name)
  return string.match(name, '^(.*)/0*(%d+)$')
end

-- Whether an open session still has its episode. `job_id` is nil if it is a client's.
local function is_played(session, job_id, index)
  return not job_id or redis.call('HGET', JOB .. job_id, 'session:' .. index) == session
end

-- Ends the episodes of a job, played or not. It has none if replicas sample it on their own.
local function end_episodes(job_id)
  for index = 0, (redis.call('HGET', JOB .. job_id, 'num') or 0) - 1 do
    redis.call('ZREM', EPISODES, episode_name(job_id, index))
    end_session(job_id, index)
  end
  redis.call('UNLINK', PLAYED .. job_id)
end

-- `num`: number of episodes that a harness has to play, each for up to `idle_ms` without a turn; 0 or nil if replicas
-- sample the job on their own.
local function enqueue(job_id, sink, data, at, num, idle_ms)
  if (tonumber(num) or 0) > 0 then
    redis.call('HSET', JOB .. job_id, 'state', 'queued', 'sink', sink, 'data', data, 'num', num, 'left', num,
      'idle_ms', idle_ms, 'size', 0)
    for index = 0, num - 1 do redis.call('ZADD', EPISODES, at, episode_name(job_id, index)) end
    return
  end
  local entry = redis.call('XADD', queue(sink), '*', 'kind', 'job', 'id', job_id, 'sink', sink, 'data', data, 'at', at)
  -- Not 'entry': an older version takes that for an entry of JOBS, where the same id may be another job's.
  local where = sink == 'client' and 'client_entry' or 'entry'
  redis.call('HSET', JOB .. job_id, 'state', 'queued', 'sink', sink, where, entry)
end

-- The broker's memory in use, and its limit (0: none), in bytes.
local function memory()
  local info = redis.call('INFO', 'memory')
  return tonumber(string.match(info, 'used_memory:(%d+)')), tonumber(string.match(info, 'maxmemory:(%d+)'))
end

-- True if at least this share of the broker's maxmemory is used.
local function memory_above(share)
  local used, limit = memory()
  return limit > 0 and used >= share * limit
end

local function memory_full()
  return memory_above(MEMORY_SHARE)
end

-- Memory accounting of clients: the most that unfinished jobs may take (CLIENT_RESERVED), and what results and dead
-- letters take (CLIENT_HELD; letters as ':dead:' plus entry id). ':total' is the sum of each hash; a row of 0 bytes is
-- deleted. CLIENT_CALLERS has the owner of each existing row, and per caller the bytes of both and the unfinished jobs.
local function set_bytes(hash, name, bytes)
  local before = tonumber(redis.call('HGET', hash, name) or 0)
  if bytes == before then return end
  if bytes == 0 then redis.call('HDEL', hash, name) else redis.call('HSET', hash, name, bytes) end
  local more, caller = string.format('%.0f', bytes - before), redis.call('HGET', CLIENT_CALLERS, name)
  redis.call('HINCRBY', hash, ':total', more)
  if not caller then return end
  redis.call('HINCRBY', CLIENT_CALLERS, ':bytes:' .. caller, more)
  if hash == CLIENT_RESERVED and (before == 0 or bytes == 0) then
    redis.call('HINCRBY', CLIENT_CALLERS, ':jobs:' .. caller, before == 0 and 1 or -1)
  end
  if not redis.call('HGET', CLIENT_RESERVED, name) and not redis.call('HGET', CLIENT_HELD, name) then
    redis.call('HDEL', CLIENT_CALLERS, name)
  end
end

-- Whether a caller ('': one who may see everything) may see a job of `whose` (nil: an older version wrote no owner).
local function may_see(caller, sink, whose)
  return caller == '' or sink == 'client' and (not whose or caller == whose)
end

local function of_caller(what, caller)
  return tonumber(redis.call('HGET', CLIENT_CALLERS, ':' .. what .. ':' .. caller) or 0)
end

-- `deadline`: time by which the job must be done, in Unix ms.
local function reserve(job_id, bytes, deadline)
  set_bytes(CLIENT_RESERVED, job_id, bytes)
  if deadline then
    redis.call('ZADD', CLIENT_DEADLINES, deadline, job_id)
  else
    redis.call('ZREM', CLIENT_DEADLINES, job_id)
  end
end

-- `expires`: time at which a result expires, in Unix ms.
local function hold(name, bytes, expires)
  set_bytes(CLIENT_HELD, name, bytes)
  if expires then redis.call('ZADD', CLIENT_EXPIRY, expires, name) else redis.call('ZREM', CLIENT_EXPIRY, name) end
end

-- Sets the owner of the rows that `reserve` or `hold` will create for a name; nil if unknown. Rows left over from an
-- earlier owner are removed.
local function own(name, caller)
  hold(name, 0)
  reserve(name, 0)
  if caller then redis.call('HSET', CLIENT_CALLERS, name, caller) end
end

-- Keeps a session for another `idle_ms` and accounts for its size. A client's counts like a result that clients hold;
-- an episode of the trainer's is taken by another harness then.
local function keep_session(id)
  local state, idle_ms, bytes, caller, job, index =
    unpack(redis.call('HMGET', SESSION .. id, 'state', 'idle_ms', 'bytes', 'caller', 'job', 'index'))
  redis.call('PEXPIRE', SESSION .. id, idle_ms)
  redis.call('PEXPIRE', TURNS .. id, idle_ms)
  if job then
    redis.call('ZADD', EPISODES, 'XX', now_ms() + idle_ms, episode_name(job, index))
    redis.call('HSET', COUNTERS, 'harness_at', now_ms())
    return
  end
  if state == 'open' then
    redis.call('ZADD', CLIENT_SESSIONS, now_ms() + idle_ms, id)
  else
    redis.call('ZREM', CLIENT_SESSIONS, id)
  end
  redis.call('HSET', CLIENT_CALLERS, ':session:' .. id, caller)
  hold(':session:' .. id, tonumber(bytes), now_ms() + idle_ms)
end

local function total(hash)
  return tonumber(redis.call('HGET', hash, ':total') or 0)
end

-- Removes expired results of clients from the accounts, and ends clients' jobs past their deadline, queued or running.
-- These leave no dead letter, because nobody wants them any more. A replica that runs one loses its lease.
local function end_overdue()
  local now = now_ms()
  redis.call('ZREMRANGEBYSCORE', CLIENT_SESSIONS, '-inf', now)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', CLIENT_EXPIRY, '-inf', now, 'LIMIT', 0, 1000)) do hold(id, 0) end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', CLIENT_DEADLINES, '-inf', now, 'LIMIT', 0, 1000)) do
    reserve(id, 0)
    local hash = JOB .. id
    local entry = redis.call('HGET', hash, 'client_entry')
    if entry and not ended(id) then
      drop(CLIENT_JOBS, entry)
      redis.call('HSET', hash, 'state', 'dead', 'error', 'its deadline passed before it was done')
      redis.call('EXPIRE', hash, RESULT_TTL_S)
      count('overdue')
    end
  end
end

-- Why a job of up to `bytes` is not admitted for a caller ('': one without limits of its own): 'large', 'results',
-- 'caller_results', 'memory' or nil. Then two byte counts as details: what clients (or this caller) have taken, and
-- what they may take (or what is free for this caller).
local function client_refusal(bytes, caller)
  end_overdue()
  local used, limit = memory()
  local reserved, allowed = total(CLIENT_RESERVED), math.floor(CLIENT_SHARE * limit)
  local taken, mine = reserved + total(CLIENT_HELD), of_caller('bytes', caller)
  -- Clients hold nothing: drop counts that an older version did not maintain.
  if taken == 0 then redis.call('DEL', CLIENT_CALLERS) end
  if limit == 0 then return nil, taken, allowed end
  local most = caller == '' and allowed or math.floor(allowed / 2)
  if bytes > most then
    return 'large', taken, most
  elseif taken + bytes > allowed then
    return 'results', taken, allowed
  elseif caller ~= '' and mine + bytes > allowed - taken - bytes then
    return 'caller_results', mine, allowed - taken
  elseif used + reserved + bytes > CLIENT_MEMORY_SHARE * limit then
    return 'memory', taken, allowed
  end
  return nil, taken, allowed
end

-- Ends a job that never becomes a group: writes the dead letter, the tombstone for the trainer and the state at once.
-- `stream` is nil for episodes, which no stream holds.
local function bury(stream, id, fields, message, replica_id)
  local job_id, now = fields.id or '', now_ms()
  -- The trainer must be able to decode the tombstone, whatever was written into the entry.
  if #job_id > 128 or not string.find(job_id, '^%w[%w_.:-]*$') then job_id = '' end
  local hash = JOB .. job_id
  local sink = fields.sink or redis.call('HGET', hash, 'sink')
  if sink ~= 'client' and sink ~= 'eval' then sink = 'train' end
  local letter = cmsgpack.pack({SCHEMA_VERSION, {
    job_id = job_id, run_id = RUN_ID, sink = sink, error = message, replica_id = replica_id, died_at = now / 1000,
    deliveries = tonumber(redis.call('HGET', hash, 'deliveries') or 0),
  }})
  local tombstone = ''
  if job_id ~= '' and sink ~= 'client' then
    tombstone = redis.call('XADD', inbox(sink), '*', 'kind', 'dead', 'id', job_id, 'sink', sink, 'data', letter, 'at', now)
  end
  local buried = redis.call('XADD', DEAD, '*', 'kind', 'dead', 'id', job_id, 'sink', sink, 'data', letter,
    'job', fields.data or '', 'num', fields.num or 0,
    'idle_ms', fields.idle_ms or 0, 'tombstone', tombstone, 'at', now)
  count('dead')
  if stream then drop(stream, id) end
  if job_id == '' then return end
  redis.call('HSET', hash, 'state', 'dead', 'sink', sink, 'error', message, 'told', tombstone, 'letter', buried)
  redis.call('SREM', IN_FLIGHT, job_id)
  end_episodes(job_id)
  if sink == 'client' then
    own(':dead:' .. buried, redis.call('HGET', CLIENT_CALLERS, job_id))
    hold(':dead:' .. buried, KEY_BYTES + #(fields.data or ''))
    redis.call('EXPIRE', hash, RESULT_TTL_S)
  end
  reserve(job_id, 0)
end

-- Counts a failed delivery of an episode. After too many its job is dead, with its other episodes.
local function fail_episode(job_id, index, message, most, holder)
  local hash = JOB .. job_id
  end_session(job_id, index)
  local deliveries = redis.call('HINCRBY', hash, 'deliveries:' .. index, 1)
  if deliveries < tonumber(most) then
    count('redelivered_episodes')
    redis.call('ZADD', EPISODES, now_ms(), episode_name(job_id, index))
    return
  end
  local fields = fields_of(redis.call('HGETALL', hash))
  fields.id = job_id
  redis.call('HSET', hash, 'deliveries', deliveries)
  bury(nil, nil, fields, 'episode ' .. index .. ': ' .. message, holder)
  redis.call('HDEL', hash, 'data', 'num')
end

-- Whether a dead letter can be replayed: 'open' (yes), 'no_job', 'again' (a job with the same id was submitted since)
-- or 'closed' (the trainer has counted it as dead, and another prompt took its place).
local function prospect(letter)
  if (letter.id or '') == '' or (letter.job or '') == '' then return 'no_job' end
  if (redis.call('HGET', JOB .. letter.id, 'state') or 'dead') ~= 'dead' then return 'again' end
  if letter.sink == 'client' then return 'open' end
  local stream = inbox(letter.sink)
  if (letter.tombstone or '') == '' or not read(stream, letter.tombstone) then return 'closed' end
  -- The next trainer reads again what an ended or replaced trainer had read. A trainer whose lease merely expired may
  -- continue: what it has read stays closed.
  local reader, newest = owner(stream, letter.tombstone), redis.call('GET', FENCE)
  return reader and newest and reader == 'trainer/' .. newest and 'closed' or 'open'
end

-- Moves an entry to the end of the queue; it keeps its age.
local function requeue(stream, id)
  local fields = read(stream, id) or {}
  if fields.id and fields.sink and fields.data and fields.at then
    enqueue(fields.id, fields.sink, fields.data, fields.at)
    drop(stream, id)
  else
    bury(stream, id, fields, 'damaged queue entry', '')
  end
end

-- Records a change of the run; called in the script that makes the change.
local function audit(by, did, what)
  what = string.sub(what, 1, AUDIT_BYTES)
  redis.call('XADD', AUDIT, 'MAXLEN', AUDIT_LENGTH, '*', 'by', string.sub(by, 1, AUDIT_BYTES), 'did', did, 'what', what)
  redis.call('EXPIRE', AUDIT, AUDIT_TTL_S)
end

local function audit_jobs(by, did, ids)
  if #ids == 0 then return end
  local more = #ids > 10 and ' and ' .. #ids - 10 .. ' more' or ''
  audit(by, did, table.concat(ids, ', ', 1, math.min(#ids, 10)) .. more)
end

-- True while the queue admits no jobs.
local function closed()
  return redis.call('EXISTS', CLOSED) == 1
end

-- Number of entries that no consumer has read. The stream's `lag` is useless: one out-of-order delete makes it NULL.
local function unread(stream)
  local pending = if_there('XPENDING', stream, GROUP_OF[stream])
  return redis.call('XLEN', stream) - (pending and pending[1] or 0)
end
