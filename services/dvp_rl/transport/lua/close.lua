#!lua flags=allow-oom
-- No new jobs from here on. ARGV: why, who does it.
if redis.call('GET', CLOSED) ~= ARGV[1] then
  redis.call('SET', CLOSED, ARGV[1])
  audit(ARGV[2], 'closed', 'the queue: ' .. ARGV[1])
end
