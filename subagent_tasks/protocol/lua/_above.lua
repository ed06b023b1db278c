-- is_ended_above(path): whether one of those that started this run, and one another, was killed or has ended. Until all
-- below it has settled it stands in `cascade`, so that a stop reaches the whole tree in the step that says it.
local function is_ended_above(path)
  for id in string.gmatch(path or '', '%S+') do
    if redis.call('SISMEMBER', K.cascade, id) == 1 then return true end
  end
  return false
end
