#!lua flags=no-writes
-- Pending entries of a stream (read but not finished), oldest first. ARGV: stream, entry id before the page, count.
-- Answers for each (entry id, consumer, ms since last claimed or renewed, job id, sink, counted deliveries, age in ms).
local page, now = {}, now_ms()
local pending = if_there('XPENDING', ARGV[1], GROUP_OF[ARGV[1]], '(' .. ARGV[2], '+', ARGV[3])
for _, item in ipairs(pending or {}) do
  local fields = read(ARGV[1], item[1]) or {}
  local id = fields.id or ''
  local deliveries = id ~= '' and redis.call('HGET', JOB .. id, 'deliveries') or 0
  page[#page + 1] = {item[1], item[2], item[3], id, fields.sink or '', tonumber(deliveries), now - (fields.at or now)}
end
return page
