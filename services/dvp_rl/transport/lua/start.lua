#!lua flags=allow-oom
-- Marks jobs that the caller has just read as running. ARGV: stream, consumer, replica id, then for each job (entry id,
-- job id, deadline in Unix seconds or ''). Answers for each (counted deliveries, or -1 if there is nothing to run; ms
-- left until the deadline).
local stream, consumer, replica_id = unpack(ARGV)
local answers, now = {}, now_ms()
end_overdue()
for i = 4, #ARGV, 3 do
  local entry, id, deadline = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  local answer = -1
  if owner(stream, entry) == consumer then
    if ended(id) then
      drop(stream, entry)
      count('duplicates')
    elseif stream ~= queue(redis.call('HGET', JOB .. id, 'sink') or 'train') then
      -- An older version put it into the wrong queue.
      requeue(stream, entry)
    elseif deadline and deadline * 1000 < now then
      bury(stream, entry, read(stream, entry) or {id = id}, 'deadline passed', replica_id)
    else
      redis.call('HSET', JOB .. id, 'state', 'running')
      answer = tonumber(redis.call('HGET', JOB .. id, 'deliveries') or 0)
    end
  end
  answers[#answers + 1] = {answer, deadline and math.floor(deadline * 1000 - now) or 0}
end
return answers
