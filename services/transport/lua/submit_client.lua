#!lua
-- ARGV: job id, data, limit of unread jobs, bytes that the job may come to, ms until its deadline or ''. Answers {the state
-- of a job that exists, 'new', 'closed', 'backlog', 'memory', 'results' or 'large'; bytes that clients have taken; how many
-- they may}.
local refusal, taken, allowed = client_refusal(tonumber(ARGV[4]))
local outcome = redis.call('HGET', JOB .. ARGV[1], 'state')
if outcome then
  -- A no-op.
elseif closed() then
  outcome = 'closed'
elseif refusal then
  outcome = refusal
elseif unread(CLIENT_JOBS) >= tonumber(ARGV[3]) then
  outcome = 'backlog'
else
  enqueue(ARGV[1], 'client', ARGV[2], now_ms())
  reserve(ARGV[1], tonumber(ARGV[4]), ARGV[5] ~= '' and now_ms() + ARGV[5])
  count('submitted')
  outcome = 'new'
end
return {outcome, taken, allowed}
