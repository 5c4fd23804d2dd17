#!lua
-- ARGV: job id, data, limit of unread jobs, bytes that its result may come to. Answers {the state of a job that exists,
-- 'new', 'closed', 'backlog', 'memory', 'results' or 'large'; bytes of clients; how many may be, 0 without a limit}.
local state = redis.call('HGET', JOB .. ARGV[1], 'state')
local bytes, taken, allowed = tonumber(ARGV[4]), client_memory()
local outcome = 'new'
if state then
  outcome = state
elseif closed() then
  outcome = 'closed'
elseif bytes > allowed then
  outcome = 'large'
elseif memory_above(CLIENT_MEMORY_SHARE) then
  outcome = 'memory'
elseif unread(JOBS, REPLICA_GROUP) >= tonumber(ARGV[3]) then
  outcome = 'backlog'
elseif taken + bytes > allowed then
  outcome = 'results'
else
  enqueue(ARGV[1], 'client', ARGV[2], now_ms())
  book(ARGV[1], bytes)
  count('submitted')
end
return {outcome, taken, allowed == math.huge and 0 or allowed}
