#!lua flags=no-writes
-- Answers the command lines that the caller's user may not run. ARGV: command lines.
local refused = {}
for _, line in ipairs(ARGV) do
  local words = {}
  for word in string.gmatch(line, '%S+') do words[#words + 1] = word end
  if not redis.acl_check_cmd(unpack(words)) then refused[#refused + 1] = line end
end
return refused
