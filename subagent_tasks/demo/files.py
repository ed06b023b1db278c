"""The demo's input: which files are read, and how much of each the model gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from subagent_tasks.errors import ConfigurationError

SUFFIXES = (".md", ".rst", ".txt")
MAX_FILE_BYTES = 1000
"""What fits the small model's context even at a token per byte, and is read in a few seconds on two cores."""
_SKIPPED_LINES = ("#", "|", "---", "===", "<", "![", "[![", "    ", "\t")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file, as it is shown and as the child gets it."""

    name: str
    text: str


def find_files(path: Path | None, *, here: Path, limit: int) -> tuple[list[SourceFile], int]:
    """The first `limit` text files, and how many there are.

    Of `path` and below, or of `here`: its *.md and all in its docs. Raises `ConfigurationError` when there is none.
    """
    if path is not None and not path.is_dir():
        raise ConfigurationError(f"--path {path} is no folder: name one that holds {', '.join(SUFFIXES)} files")
    root = path or here
    candidates = sorted(_below(path) if path is not None else [*here.glob("*.md"), *_below(here / "docs")])
    found: list[SourceFile] = []
    for candidate in candidates:
        text = prose(candidate.read_text(encoding="utf-8", errors="replace"))
        if text:
            found.append(SourceFile(str(candidate.relative_to(root)), cut(text, MAX_FILE_BYTES)))
    if not found:
        where = str(path) if path is not None else f"{here} and its docs"
        raise ConfigurationError(
            f"no text in {where}: name a folder that holds {', '.join(SUFFIXES)} files with --path"
        )
    return found[:limit], len(found)


def prose(text: str) -> str:
    """The paragraphs and lists of a text: headings, tables and code tell a small model nothing. All, if that is all."""
    kept: list[str] = []
    in_code = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and line.strip() and not line.startswith(_SKIPPED_LINES):
            kept.append(line.strip())
    return "\n".join(kept) or text.strip()


def cut(text: str, limit_bytes: int) -> str:
    """At most `limit_bytes` of UTF-8, from the beginning, on a character boundary."""
    return text.encode("utf-8", "replace")[:limit_bytes].decode("utf-8", "ignore")


def _below(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix.lower() in SUFFIXES and path.is_file() and not hidden:
            yield path
