#!lua flags=allow-oom
-- Removes stale replicas, and idle consumers that own nothing. ARGV: age in ms. Answers the number removed.
local gone, age = 0, tonumber(ARGV[1])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', REPLICAS, '-inf', now_ms() - age, 'LIMIT', 0, 1000)) do
  redis.call('ZREM', REPLICAS, id)
  redis.call('DEL', REPLICA .. id)
  gone = gone + 1
end
for stream, group in pairs(GROUP_OF) do
  local consumers = if_there('XINFO', 'CONSUMERS', stream, group)
  for _, item in ipairs(consumers or {}) do
    local consumer = {}
    for i = 1, #item, 2 do consumer[item[i]] = item[i + 1] end
    -- A consumer that owns entries stays until another one has taken them over.
    if consumer.pending == 0 and consumer.idle >= age then
      redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer.name)
      gone = gone + 1
    end
  end
end
return gone
