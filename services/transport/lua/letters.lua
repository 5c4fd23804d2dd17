#!lua flags=no-writes
-- A page of dead letters, newest first. ARGV: from where ('+', '(' .. entry id, or one entry id), how many.
-- Answers (entry id, data, job, prospect) each.
local page = {}
for _, entry in ipairs(redis.call('XREVRANGE', DEAD, ARGV[1], '-', 'COUNT', ARGV[2])) do
  local letter = fields_of(entry[2])
  page[#page + 1] = {entry[1], letter.data or '', letter.job or '', prospect(letter)}
end
return page
