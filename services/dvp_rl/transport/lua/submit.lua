#!lua
-- Admits jobs of the trainer. No allow-oom: admission must stop when the memory is full.
-- ARGV: fence, limit of train jobs in flight, then (job id, sink, data, number of episodes that a harness plays, ms
-- that one may be idle) for each. Answers an outcome for each.
local refused = fenced_off(ARGV[1])
if refused then return refused end
local room, full = ARGV[2] - redis.call('SCARD', IN_FLIGHT), memory_full() or closed()
local outcomes, now = {}, now_ms()
for i = 3, #ARGV, 5 do
  local id, sink, data, num, idle_ms = unpack(ARGV, i, i + 4)
  local outcome = redis.call('HGET', JOB .. id, 'state')
  if not outcome or forgotten(id, sink) then
    -- After a resume on a wiped broker, the set already counts jobs that the stream lost.
    local counts = sink == 'train' and redis.call('SISMEMBER', IN_FLIGHT, id) == 0
    if full or (counts and room <= 0) then
      outcome = 'refused'
    else
      outcome = 'new'
      end_episodes(id)
      redis.call('DEL', JOB .. id)
      enqueue(id, sink, data, now, num, idle_ms)
      count('submitted')
      if sink == 'train' then
        redis.call('SADD', IN_FLIGHT, id)
        redis.call('SREM', UNCHECKPOINTED, id)
      end
      if counts then room = room - 1 end
    end
  end
  outcomes[#outcomes + 1] = outcome
end
return outcomes
