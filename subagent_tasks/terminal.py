"""How the command line and the demo write for people: one console for stdout, and long texts as one line."""

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
