"""What a check has to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `fix` is empty for what is well; `is_mendable` says that `--fix` can see to it."""

    check: str
    level: Level
    message: str
    fix: str = ""
    is_mendable: bool = False
