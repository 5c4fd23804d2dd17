#!lua flags=allow-oom
-- Admits jobs again. ARGV: who does it. Answers 1 if it was closed.
local was_closed = redis.call('DEL', CLOSED)
if was_closed == 1 then audit(ARGV[1], 'opened', 'the queue') end
return was_closed
