#!lua flags=allow-oom
-- Resumes admission of jobs. ARGV: author. Answers 1 if the queue was closed.
local was_closed = redis.call('DEL', CLOSED)
if was_closed == 1 then audit(ARGV[1], 'opened', 'the queue') end
return was_closed
