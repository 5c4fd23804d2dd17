#!lua flags=allow-oom
-- Announces a weight version. ARGV: fence, seq, version, oldest seq that may take jobs, data.
-- Answers 'ok', or the last announced version if that is not older.
local refused = fenced_off(ARGV[1])
if refused then return refused end
local last = redis.call('XREVRANGE', VERSIONS, '+', '-', 'COUNT', 1)[1]
if last then
  local fields = read(VERSIONS, last[1])
  -- A retry whose reply was lost.
  if fields.version == ARGV[3] then return 'ok' end
  if tonumber(fields.seq) >= tonumber(ARGV[2]) then return fields.version end
end
-- An expired lease is gone with its holder's name; the fence still admits a trainer that nobody replaced.
local by = redis.call('HMGET', LEASE, 'holder', 'host', 'pid')
by = by[1] and by[1] .. ' (host ' .. (by[2] or '?') .. ', pid ' .. (by[3] or '?') .. ')' or 'a trainer whose lease had run out'
redis.call('XADD', VERSIONS, 'MAXLEN', '~', 1000, '*', 'kind', 'announcement', 'seq', ARGV[2], 'version', ARGV[3],
  'min_seq', ARGV[4], 'data', ARGV[5], 'at', now_ms(), 'by', by)
redis.call('SET', SEQ, string.format('%.0f', math.max(redis.call('GET', SEQ) or 0, ARGV[2])))
return 'ok'
