"""How the command line and the demo write for people: one console for stdout, long texts as one line, time spans."""

from __future__ import annotations

import sys

from rich.console import Console

PLAIN_COLUMNS = 110
"""Where there is no terminal, rich would take 80."""

MAX_LINE_CHARACTERS = 160


def make_console() -> Console:
    """A console for stdout that colours only what the markup says."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_COLUMNS)


def brief(text: str, limit: int = MAX_LINE_CHARACTERS) -> str:
    """One line of at most `limit` characters; what a terminal would obey instead of showing is replaced."""
    line = " ".join(text.split())
    line = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def spelled(seconds: float) -> str:
    """A time span as a person says it, with two units at most."""
    if seconds < 1:
        return f"{max(0, int(seconds * 1000))} ms"
    if seconds < 10:
        return f"{int(seconds * 10) / 10:.1f} s"
    for unit, size, smaller, part in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            rest = int(seconds % size // part)
            return f"{int(seconds // size)} {unit} {rest} {smaller}" if rest else f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"
