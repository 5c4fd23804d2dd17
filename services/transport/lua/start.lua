#!lua flags=allow-oom
-- Marks jobs that the caller has just read as running. ARGV: consumer, replica id, then (entry id, job id, deadline in
-- seconds or '') each. Answers (counted deliveries, or -1 when there is nothing to run; ms left until the deadline) each.
local answers, now = {}, now_ms()
for i = 3, #ARGV, 3 do
  local entry, id, deadline = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  local answer = -1
  if owner(JOBS, REPLICA_GROUP, entry) == ARGV[1] then
    if ended(id) then
      drop(JOBS, REPLICA_GROUP, entry)
      count('duplicates')
    elseif deadline and deadline * 1000 < now then
      bury(JOBS, REPLICA_GROUP, entry, read(JOBS, entry) or {id = id}, 'deadline passed', ARGV[2])
    else
      redis.call('HSET', JOB .. id, 'state', 'running')
      answer = tonumber(redis.call('HGET', JOB .. id, 'deliveries') or 0)
    end
  end
  answers[#answers + 1] = {answer, deadline and math.floor(deadline * 1000 - now) or 0}
end
return answers
