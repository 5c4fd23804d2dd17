#!lua flags=allow-oom
-- Stops admission of jobs. ARGV: reason, author.
if redis.call('GET', CLOSED) ~= ARGV[1] then
  redis.call('SET', CLOSED, ARGV[1])
  audit(ARGV[2], 'closed', 'the queue: ' .. ARGV[1])
end
