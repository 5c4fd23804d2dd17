#!lua
-- Admits a client's job. ARGV: job id, data, limit of unread jobs, most bytes that the job may take, ms until its
-- deadline or '', caller or ''. Answers {the state of an existing job, 'new', or why it is not admitted: 'closed',
-- 'backlog', 'caller_backlog' or what client_refusal returns; two numbers with details}.
local id, data, most, bytes, until_ms, caller = unpack(ARGV)
local refusal, taken, allowed = client_refusal(tonumber(bytes), caller)
local outcome, sink, whose = unpack(redis.call('HMGET', JOB .. id, 'state', 'sink', 'caller'))
local queued = unread(CLIENT_JOBS)
local places, running = most - queued, redis.call('XLEN', CLIENT_JOBS) - queued
-- A lower bound: the running jobs may be other callers'.
local waiting = math.max(0, of_caller('jobs', caller) - running)
if outcome then
  if not may_see(caller, sink, whose) then return redis.error_reply('CONFLICT job ' .. id .. ' is another caller\'s') end
elseif closed() then
  outcome = 'closed'
elseif refusal then
  outcome = refusal
elseif places <= 0 then
  outcome = 'backlog'
elseif caller ~= '' and waiting + 1 > math.max(places - 1, 1) then
  outcome, taken, allowed = 'caller_backlog', waiting, places
else
  enqueue(id, 'client', data, now_ms())
  redis.call('HSET', JOB .. id, 'caller', caller)
  own(id, caller)
  reserve(id, tonumber(bytes), until_ms ~= '' and now_ms() + until_ms)
  count('submitted')
  outcome = 'new'
end
return {outcome, taken, allowed}
