#!lua flags=allow-oom
-- Deletes dead letters; tombstones for the trainer stay. ARGV: author, then entry ids. Answers 'dropped' or 'gone' for
-- each.
local answers, dropped = {}, {}
for i = 2, #ARGV do
  local letter = read(DEAD, ARGV[i])
  if letter then
    redis.call('XDEL', DEAD, ARGV[i])
    dropped[#dropped + 1] = (letter.id or '') ~= '' and letter.id or 'letter ' .. ARGV[i]
  end
  hold(':dead:' .. ARGV[i], 0)
  answers[i - 1] = letter and 'dropped' or 'gone'
end
audit_jobs(ARGV[1], 'dropped', dropped)
return answers
