#!lua flags=allow-oom
-- Forgets dead letters; what the trainer was told of them stays. ARGV: entry ids. Answers 'dropped' or 'gone' each.
local answers = {}
for i = 1, #ARGV do
  answers[i] = redis.call('XDEL', DEAD, ARGV[i]) == 1 and 'dropped' or 'gone'
  hold(':dead:' .. ARGV[i], 0)
end
return answers
