#!lua flags=no-writes
-- A page of dead letters. ARGV: XRANGE or XREVRANGE, from, to, count.
-- Answers (entry id, data, job, prospect) for each.
local page = {}
for _, entry in ipairs(redis.call(ARGV[1], DEAD, ARGV[2], ARGV[3], 'COUNT', ARGV[4])) do
  local letter = fields_of(entry[2])
  page[#page + 1] = {entry[1], letter.data or '', letter.job or '', prospect(letter)}
end
return page
