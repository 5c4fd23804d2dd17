#!lua flags=allow-oom
-- No new jobs from here on. ARGV: why, who does it.
redis.call('SET', CLOSED, ARGV[1])
audit(ARGV[2], 'closed', 'the queue: ' .. ARGV[1])
