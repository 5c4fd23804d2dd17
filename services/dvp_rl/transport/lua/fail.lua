#!lua flags=allow-oom
-- Counts a failed delivery and requeues the job, or buries it after too many. ARGV: stream, consumer, entry id, error,
-- most deliveries (0: dead at once), replica id. Answers 1 if the job is dead.
local stream, consumer, entry, message, most, replica_id = unpack(ARGV)
if owner(stream, entry) ~= consumer then return not_owner(entry) end
local fields = read(stream, entry) or {}
local deliveries = 0
if fields.id then deliveries = redis.call('HINCRBY', JOB .. fields.id, 'deliveries', 1) end
if deliveries >= tonumber(most) then
  bury(stream, entry, fields, message, replica_id)
  return 1
end
count_redelivered(stream)
requeue(stream, entry)
return 0
