#!lua flags=allow-oom
-- Counts a delivery that failed. ARGV: consumer, entry id, error, most deliveries (0: dead at once), replica id.
-- Answers 1 when the job is dead.
local consumer, entry, message, most, replica_id = unpack(ARGV)
if owner(JOBS, REPLICA_GROUP, entry) ~= consumer then return not_owner(entry) end
local fields = read(JOBS, entry) or {}
local deliveries = 0
if fields.id then deliveries = redis.call('HINCRBY', JOB .. fields.id, 'deliveries', 1) end
if deliveries >= tonumber(most) then
  bury(JOBS, REPLICA_GROUP, entry, fields, message, replica_id)
  return 1
end
count('redelivered')
requeue(entry)
return 0
