#!lua
-- ARGV: job id, data, limit of unread jobs. Answers the state of a job that exists, 'new', 'closed', 'backlog' or 'memory'.
local state = redis.call('HGET', JOB .. ARGV[1], 'state')
if state then return state end
if closed() then return 'closed' end
if memory_full() then return 'memory' end
if unread(JOBS, REPLICA_GROUP) >= tonumber(ARGV[3]) then return 'backlog' end
enqueue(ARGV[1], 'client', ARGV[2], now_ms())
count('submitted')
return 'new'
