#!lua flags=allow-oom
-- Removes the run's shared keys; the caller deletes the keys of single jobs and replicas. ARGV: 'idle' to refuse while
-- a trainer or replica works on the run, ms of silence after which a replica does not count, author.
local holder = redis.call('HGET', LEASE, 'holder')
if ARGV[1] == 'idle' and holder then
  return redis.error_reply('CONFLICT run ' .. RUN_ID .. ' is being trained by ' .. holder .. '; stop it, or force the purge')
end
local newest = redis.call('ZREVRANGE', REPLICAS, 0, 0, 'WITHSCORES')
if ARGV[1] == 'idle' and newest[1] and now_ms() - newest[2] < tonumber(ARGV[2]) then
  return redis.error_reply('CONFLICT replica ' .. newest[1] .. ' is serving run ' .. RUN_ID .. '; stop it, or force the purge')
end
local removed = 0
for _, key in ipairs(BOOKS) do
  if key ~= AUDIT then removed = removed + redis.call('UNLINK', key) end
end
-- A retry whose reply was lost finds nothing.
if removed > 0 then audit(ARGV[3], 'purged', ARGV[1] == 'idle' and 'the run' or 'the run, whoever worked on it') end
