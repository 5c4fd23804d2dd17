#!lua flags=allow-oom
-- Requeues an unfinished job. ARGV: stream, consumer, entry id.
local stream, consumer, entry = unpack(ARGV)
if owner(stream, entry) ~= consumer then return not_owner(entry) end
requeue(stream, entry)
