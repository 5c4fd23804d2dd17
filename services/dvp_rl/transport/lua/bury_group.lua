#!lua flags=allow-oom
-- A group that cannot be decoded ends its job as dead. ARGV: fence, stream, entry id, error.
local refused = fenced_off(ARGV[1])
if refused then return refused end
local fields = read(ARGV[2], ARGV[3])
if not fields then return end
redis.call('UNLINK', RESULT .. (fields.id or ''))
bury(ARGV[2], ARGV[3], fields, ARGV[4], '')
