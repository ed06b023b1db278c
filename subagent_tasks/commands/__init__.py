"""One module per command of `subagent-tasks`; each has the click command as `command`."""
