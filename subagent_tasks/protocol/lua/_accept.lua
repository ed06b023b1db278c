-- has_room(): whether the owner may have one more unsettled job.
local function has_room()
  return redis.call('SCARD', K.active) < tonumber(A.max_active_jobs)
end

-- accept(run, now): the one way into `queued` for a new run: its record, the owner's indexes and the Celery message. `run`
-- has what the owner decides: root, depth, path; and `seq`, the length of its transcript. `now` is in microseconds.
local function accept(run, now)
  redis.call('HSET', K.record, 'version', A.version, 'kind', 'one-shot', 'id', A.id, 'owner', A.owner_id, 'root', run.root,
    'depth', run.depth, 'path', run.path, 'digest', A.digest, 'mode', A.mode, 'caller', A.caller, 'state', 'queued',
    'token', 0, 'seq', run.seq, 'attempt', 0, 'created_at', math.floor(now / 1000), unpack(ARGV, REST))
  if redis.call('SADD', K.unsettled, A.id) == 1 and redis.call('SCARD', K.unsettled) == 1 then
    for _, key in ipairs({ K.jobs, K.notices, K.cursors, K.owner }) do redis.call('PERSIST', key) end
  end
  if A.mode == 'background' then
    redis.call('ZADD', K.jobs, now, A.id)
    redis.call('SADD', K.active, A.id)
  end
  enqueue(A.id, K.queued, K.queue, A.message, math.floor(now / 1000))
end
