#!lua flags=allow-oom
-- Admits jobs again. Answers 1 if it was closed.
return redis.call('DEL', CLOSED)
