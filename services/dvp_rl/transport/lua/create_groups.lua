#!lua flags=allow-oom
-- A script, because a plain XGROUP CREATE is refused when the memory is full, and then nobody could connect to drain.
for stream, group in pairs(GROUP_OF) do
  local reply = redis.pcall('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')
  if reply.err and not string.find(reply.err, '^BUSYGROUP') then return reply end
end
