#!lua flags=allow-oom
-- ARGV: nonce, ttl in ms, a token given out before, holder, host, pid. Answers the token, or {holder, host, pid, since, ms left} of who holds the run.
local nonce = redis.call('HGET', LEASE, 'nonce')
if nonce and nonce ~= ARGV[1] then
  local holder = redis.call('HMGET', LEASE, 'holder', 'host', 'pid', 'since')
  table.insert(holder, redis.call('PTTL', LEASE))
  return holder
end
-- A retry whose reply was lost gets the token that it already has.
if nonce then return redis.call('HGET', LEASE, 'token') end
local now = now_ms()
-- From the clock, so that the token also grows over a wiped broker; the caller's memory is for a clock that was set back.
local token = string.format('%.0f', math.max(now, (redis.call('GET', FENCE) or 0) + 1, ARGV[3] + 1))
redis.call('SET', FENCE, token)
redis.call('HSET', LEASE, 'token', token, 'nonce', ARGV[1], 'holder', ARGV[4], 'host', ARGV[5], 'pid', ARGV[6], 'since', now)
redis.call('PEXPIRE', LEASE, ARGV[2])
return token
