-- tell(run, owner, now): the notice of an ending that nobody was told of yet. A parent session has a stream of its own, a
-- child reads notices at its next step, with its inbox; one that has settled reads nothing any more.
local function tell(run, owner, now)
  if run.mode == 'foreground' and not run.untold then return end
  if A.notice == '' or (run.reported == 'kill' and A.status == 'killed') then return end
  if owner.kind ~= 'parent' then
    -- Nor does one whose record has expired: what is written to it would stay for ever.
    if owner.state and owner.state ~= 'settled' then
      local place = redis.call('XADD', K.notices, '*', 'lane', 'next-step', 'd', A.notice)
      redis.call('HSET', K.record, 'notice_id', place)
    end
    return
  end
  local notice_id = redis.call('XADD', K.notices, '*', 'n', A.notice)
  redis.call('HSET', K.record, 'notice_id', notice_id)
  -- The stream of a session that never rests has no lifetime: its entries have.
  redis.call('XTRIM', K.notices, 'MINID', now - tonumber(A.retention_ms))
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

-- wake(owner, now): queues an owner that is suspended and awaits no more than it said it could go on with. Here, in the
-- settling step, so that no ending falls between its looking and its waiting.
local function wake(owner, now)
  redis.call('SREM', K.awaited, A.id)
  if not wakes[owner.state] or redis.call('SCARD', K.awaited) > tonumber(owner.wake_at) then return false end
  redis.call('DEL', K.awaited)
  redis.call('ZREM', K.alarms, A.owner_id)
  redis.call('HSET', K.owner, 'state', 'queued')
  enqueue(A.owner_id, K.owner_queued, K.owner_queue, A.wake_message, now)
  return true
end

-- cascade(): what the run had started, and what is unsettled still, must end with it; any process walks the set.
local function cascade()
  if redis.call('EXISTS', K.own_unsettled) == 0 then
    redis.call('SREM', K.cascade, A.id)
    return false
  end
  redis.call('SADD', K.cascade, A.id)
  return true
end

-- finish(run): the one way into `settled`. Outcome, Celery result, notice, capacity and lifetimes change together; whoever
-- comes second finds the state settled and changes nothing. Returns what follows: `wake`, `cascade`, `unhold`, or nothing.
local function finish(run)
  local now = now_ms()
  local retention = tonumber(A.retention_ms)
  local seq = tonumber(run.seq)
  local values = redis.call('HMGET', K.owner, 'kind', 'state', 'wake_at')
  local owner = { kind = values[1], state = values[2], wake_at = values[3] }

  if seq == 0 then
    -- It never began. What it was asked stays readable, and can be asked again by hand.
    for _, entry in ipairs(redis.call('XRANGE', K.inbox, '-', '+')) do
      seq = seq + 1
      redis.call('XADD', K.transcript, seq .. '-0', 'k', 'input', 'd', entry[2][4], 't', now)
    end
  end
  redis.call('XADD', K.transcript, (seq + 1) .. '-0', 'k', 'settled', 'd', A.event, 't', now)
  redis.call('HSET', K.record, 'state', 'settled', 'status', A.status, 'detail', A.detail, 'outcome', A.outcome,
    'finished_at', now, 'settle_id', A.settle_id, 'worker', '', 'seq', seq + 1)
  redis.call('DEL', K.inbox)
  redis.call('DEL', K.own_awaited)
  redis.call('ZREM', K.alarms, A.id)
  redis.call('ZREM', K.queued, A.id)
  redis.call('SREM', K.flagged, A.id)
  redis.call('SREM', K.held, A.id)
  redis.call('SREM', K.active, A.id)
  redis.call('SREM', K.unsettled, A.id)

  redis.call('SET', K.result, A.result, 'PX', retention)
  redis.call('PUBLISH', K.result, A.result)

  if owner.state == 'settled' and redis.call('EXISTS', K.unsettled) == 0 then
    -- The last of what a run that has ended had started.
    redis.call('SREM', K.cascade, A.owner_id)
  end
  tell(run, owner, now)
  redis.call('PUBLISH', A.owner_channel, A.announcement)
  local follows = {}
  if wake(owner, now) then table.insert(follows, 'wake') end
  if cascade() then table.insert(follows, 'cascade') end
  -- Another process has taken the run over since its record was read: it is that one's set that still names it.
  if run.caller ~= A.caller then table.insert(follows, 'unhold') end
  if #follows > 0 then redis.call('HSET', K.record, 'follows', table.concat(follows, ' ')) end

  for _, key in ipairs({ K.record, K.transcript, K.own_jobs }) do redis.call('PEXPIRE', key, retention) end
  if run.mode == 'background' then
    -- Its owner's index knows it for as long again, so that an expired job is not taken for one that never was.
    redis.call('ZADD', K.expiring, now + 2 * retention, A.expiry)
    redis.call('PEXPIRE', K.expiring, 3 * retention)
  end
  -- A child's keys have lifetimes once it has settled itself; a parent session's while nothing of it is unsettled.
  if owner.kind == 'parent' and redis.call('EXISTS', K.unsettled) == 0 then
    for _, key in ipairs({ K.jobs, K.notices, K.cursors, K.owner }) do redis.call('PEXPIRE', key, retention) end
  end
  return table.concat(follows, ' ')
end
