#!lua flags=no-writes
-- Entries of a stream that somebody has read and not yet finished, oldest first. ARGV: stream, after, how many.
-- Answers (entry id, consumer, ms since the owner's last sign of life, job id, sink, counted deliveries, age in ms) each.
local page, now = {}, now_ms()
local pending = if_there('XPENDING', ARGV[1], GROUP_OF[ARGV[1]], '(' .. ARGV[2], '+', ARGV[3])
for _, item in ipairs(pending or {}) do
  local fields = read(ARGV[1], item[1]) or {}
  local id = fields.id or ''
  local deliveries = id ~= '' and redis.call('HGET', JOB .. id, 'deliveries') or 0
  page[#page + 1] = {item[1], item[2], item[3], id, fields.sink or '', tonumber(deliveries), now - (fields.at or now)}
end
return page
