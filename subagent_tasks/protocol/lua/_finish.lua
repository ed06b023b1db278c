-- finish(run): the one way into `settled`. Outcome, Celery result, notice, capacity and lifetimes change together; whoever
-- comes second finds the state settled and changes nothing.
local function finish(run)
  local now = now_ms()
  local retention = tonumber(A.retention_ms)
  local seq = tonumber(run.seq)

  redis.call('XADD', K.transcript, (seq + 1) .. '-0', 'k', 'settled', 'd', A.event, 't', now)
  redis.call('HSET', K.record, 'state', 'settled', 'status', A.status, 'detail', A.detail, 'outcome', A.outcome,
    'finished_at', now, 'settle_id', A.settle_id, 'worker', '', 'seq', seq + 1)
  redis.call('DEL', K.inbox)
  redis.call('ZREM', K.queued, A.id)
  redis.call('SREM', K.flagged, A.id)
  redis.call('SREM', K.active, A.id)
  redis.call('SREM', K.unsettled, A.id)

  redis.call('SET', K.result, A.result, 'PX', retention)
  redis.call('PUBLISH', K.result, A.result)

  -- A foreground ending is told as the call's result. A job's is announced, unless its owner's model killed it.
  if run.mode == 'background' and not (run.reported == 'kill' and A.status == 'killed') then
    local notice_id = redis.call('XADD', K.notices, '*', 'n', A.notice)
    redis.call('HSET', K.record, 'notice_id', notice_id)
    -- The stream of a session that never rests has no lifetime: its entries have.
    redis.call('XTRIM', K.notices, 'MINID', now - retention)
    -- Bounded for a session that nobody reads: the oldest make room, and its readers are told how many did.
    local excess = redis.call('XLEN', K.notices) - tonumber(A.max_notices)
    if excess > 0 then
      local oldest = redis.call('XRANGE', K.notices, '-', '+', 'COUNT', excess)
      redis.call('XTRIM', K.notices, 'MAXLEN', A.max_notices)
      redis.call('HSET', K.owner, 'dropped_upto', oldest[#oldest][1])
      redis.call('HINCRBY', K.owner, 'dropped', excess)
    end
    redis.call('PUBLISH', A.owner_channel, '{"notice":' .. A.notice .. ',"id":"' .. notice_id .. '"}')
  end
  redis.call('PUBLISH', A.owner_channel, A.announcement)

  redis.call('PEXPIRE', K.record, retention)
  redis.call('PEXPIRE', K.transcript, retention)
  if run.mode == 'background' then
    redis.call('ZADD', K.expiring, now + retention, A.expiry)
    redis.call('PEXPIRE', K.expiring, 2 * retention)
  end
  for _, key in ipairs({ K.jobs, K.notices, K.cursors, K.owner }) do
    if redis.call('EXISTS', K.unsettled) == 0 then
      redis.call('PEXPIRE', key, retention)
    end
  end
end
