"""`python -m subagent_tasks`: the command line, where its script is not on the path."""

from __future__ import annotations

from subagent_tasks.cli import main

if __name__ == "__main__":
    main()
