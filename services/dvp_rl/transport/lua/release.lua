#!lua flags=allow-oom
-- Gives a job back unfinished. ARGV: stream, consumer, entry id.
local stream, consumer, entry = unpack(ARGV)
if owner(stream, entry) ~= consumer then return not_owner(entry) end
requeue(stream, entry)
