-- enqueue(id, queued, queue, message, now): the run waits from now on; its Celery message goes out in the same step. An
-- empty message means that the broker is another server: the caller publishes right after the move, and the sweeper
-- finds what was lost in between.
local function enqueue(id, queued, queue, message, now)
  redis.call('ZADD', queued, now, id)
  if message ~= '' then redis.call('LPUSH', queue, message) end
end
