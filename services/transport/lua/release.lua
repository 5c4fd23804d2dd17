#!lua flags=allow-oom
-- Gives a job back unfinished. ARGV: consumer, entry id.
if owner(JOBS, REPLICA_GROUP, ARGV[2]) ~= ARGV[1] then return not_owner(ARGV[2]) end
requeue(ARGV[2])
