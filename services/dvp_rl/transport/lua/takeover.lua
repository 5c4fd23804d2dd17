#!lua flags=allow-oom
-- Takes over entries that any trainer read and none acknowledged. ARGV: fence, stream, consumer, count, last entry id
-- before the page. Answers (entry id, flat list of fields) for each.
local refused = fenced_off(ARGV[1])
if refused then return refused end
local _, stream, consumer, wanted, after = unpack(ARGV)
local pending = if_there('XPENDING', stream, TRAINER_GROUP, '(' .. after, '+', wanted)
local entries = {}
for _, item in ipairs(pending or {}) do
  local entry = redis.call('XRANGE', stream, item[1], item[1])[1]
  if not entry then
    redis.call('XACK', stream, TRAINER_GROUP, item[1])
  else
    if item[2] ~= consumer then
      redis.call('XCLAIM', stream, TRAINER_GROUP, consumer, 0, item[1], 'JUSTID')
      count('redelivered_groups')
    end
    entries[#entries + 1] = entry
  end
end
return entries
