-- enqueue(now): the run waits from now on; its Celery message goes out in the same step. An empty message means that the
-- broker is another server: the caller publishes right after the move, and the sweeper finds what was lost in between.
local function enqueue(now)
  redis.call('ZADD', K.queued, now, A.id)
  if A.message ~= '' then redis.call('LPUSH', K.queue, A.message) end
end
