-- unhold: forgets that a host process waited for a run that has ended, or that another process waits for by now.
-- KEYS
--   record  hash  the run's record
--   held    set   foreground runs whose caller the host process is
-- ARGV
--   id      the run id
--   caller  the host process
-- RETURNS
--   forgotten
--   kept: the run is unsettled, and the process is its caller
-- PUBLISHES
--   nothing
local run = record('state', 'caller')
if run.state and run.state ~= 'settled' and run.caller == A.caller then return { 'kept' } end
redis.call('SREM', K.held, A.id)
return { 'forgotten' }
