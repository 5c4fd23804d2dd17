#!lua flags=allow-oom
-- Acquires the trainer's lease. ARGV: nonce, TTL in ms, a token issued before, holder, host, pid.
-- Answers the token, or {holder, host, pid, since, ms left} of the current lease.
local nonce = redis.call('HGET', LEASE, 'nonce')
if nonce and nonce ~= ARGV[1] then
  local holder = redis.call('HMGET', LEASE, 'holder', 'host', 'pid', 'since')
  table.insert(holder, redis.call('PTTL', LEASE))
  return holder
end
-- A retry whose reply was lost gets the same token.
if nonce then return redis.call('HGET', LEASE, 'token') end
local now = now_ms()
-- Derived from the clock, so that it grows even if the broker was wiped; the caller's token covers a clock set back.
local token = string.format('%.0f', math.max(now, (redis.call('GET', FENCE) or 0) + 1, ARGV[3] + 1))
redis.call('SET', FENCE, token)
redis.call('HSET', LEASE, 'token', token, 'nonce', ARGV[1], 'holder', ARGV[4], 'host', ARGV[5], 'pid', ARGV[6], 'since', now)
redis.call('PEXPIRE', LEASE, ARGV[2])
return token
