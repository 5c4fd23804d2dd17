#!lua
-- Puts the jobs of dead letters back into the queue. No allow-oom: it admits. ARGV: (entry id of the letter, job id,
-- bytes that its result may come to) each.
-- Answers for each 'replayed', 'gone', or the prospect that speaks against it.
local answers, full = {}, memory_full()
local taken, allowed = client_memory()
for i = 1, #ARGV, 3 do
  local entry, id, bytes = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  local hash, letter = JOB .. id, read(DEAD, entry)
  local answer = letter and prospect(letter) or 'gone'
  if not letter and redis.call('HGET', hash, 'replayed') == entry then
    -- A retry whose reply was lost.
    answer = 'replayed'
  elseif answer == 'open' and (full or (letter.sink == 'client' and taken + bytes > allowed)) then
    answer = 'memory'
  elseif answer == 'open' then
    -- The trainer never learns that the job was dead.
    if letter.tombstone ~= '' then drop(inbox(letter.sink), TRAINER_GROUP, letter.tombstone) end
    redis.call('XDEL', DEAD, entry)
    redis.call('HDEL', hash, 'deliveries', 'error')
    redis.call('HSET', hash, 'replayed', entry)
    redis.call('PERSIST', hash)
    enqueue(id, letter.sink, letter.job, now_ms())
    if letter.sink == 'client' then
      book(id, bytes)
      taken = taken + bytes
    end
    if letter.sink == 'train' then redis.call('SADD', IN_FLIGHT, id) end
    count('replayed')
    answer = 'replayed'
  end
  answers[#answers + 1] = answer
end
return answers
