#!lua flags=allow-oom
-- No new jobs from here on. ARGV: why.
redis.call('SET', CLOSED, ARGV[1])
