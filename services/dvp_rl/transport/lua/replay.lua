#!lua
-- Requeues the jobs of dead letters. No allow-oom, because it admits jobs. ARGV: author, then for each letter (entry
-- id, job id, most bytes that the job may take). Answers for each 'replayed', 'gone', 'memory', 'large', or the
-- prospect that rules it out.
local answers, replayed, full = {}, {}, memory_full()
for i = 2, #ARGV, 3 do
  local entry, id, bytes = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  local hash, letter = JOB .. id, read(DEAD, entry)
  local answer = letter and prospect(letter) or 'gone'
  local refusal = answer == 'open' and letter.sink == 'client' and client_refusal(bytes, '')
  if not letter and redis.call('HGET', hash, 'replayed') == entry then
    -- A retry whose reply was lost.
    answer = 'replayed'
  elseif refusal == 'large' then
    answer = 'large'
  elseif answer == 'open' and (full or refusal) then
    answer = 'memory'
  elseif answer == 'open' then
    -- The tombstone is withdrawn: the trainer never learns that the job was dead.
    if letter.tombstone ~= '' then drop(inbox(letter.sink), letter.tombstone) end
    redis.call('XDEL', DEAD, entry)
    redis.call('HDEL', hash, 'deliveries', 'error', 'letter')
    for index = 0, (letter.num or 0) - 1 do redis.call('HDEL', hash, 'deliveries:' .. index) end
    redis.call('HSET', hash, 'replayed', entry)
    redis.call('PERSIST', hash)
    enqueue(id, letter.sink, letter.job, now_ms(), letter.num, letter.idle_ms)
    if letter.sink == 'client' then
      local caller = redis.call('HGET', CLIENT_CALLERS, ':dead:' .. entry)
      if caller then redis.call('HSET', hash, 'caller', caller) end
      own(id, caller)
      hold(':dead:' .. entry, 0)
      reserve(id, bytes)
    end
    if letter.sink == 'train' then redis.call('SADD', IN_FLIGHT, id) end
    count('replayed')
    replayed[#replayed + 1] = id
    answer = 'replayed'
  end
  answers[#answers + 1] = answer
end
audit_jobs(ARGV[1], 'replayed', replayed)
return answers
