"""What the project's files point at: links of the documentation lead somewhere, and no file tells of a machine.

A machine shows by its folders and by where its packages come from. What is common of both is listed here, in pieces,
so that this file passes its own scan; what only the machine at hand knows is asked of it.
"""

from __future__ import annotations

import ipaddress
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?P<inline>[^)\s]+)[^)]*\)|^\[[^\]]+\]: (?P<reference>\S+)", re.MULTILINE)

# A path, not the tail of a relative one, of a URL, or of what a variable or an expression begins.
_START = r"(?:(?<=file://)|(?<![\w.$}\])~*/-]))"
_FOLDERS = ("home", "root", "Users", "work", "workspace", "workspaces", "builds", "opt", "mnt", "Volumes")
_FOLDER_PATH = re.compile(rf"{_START}/(?:{'|'.join(_FOLDERS)})/[\w.]+|\b[A-Za-z]:[\\/]+(?:{'|'.join(_FOLDERS)})[\\/]")

_REGISTRIES = (
    *("py" + "pi", "python" + "hosted", "ana" + "conda", "npm" + "js", "yarn" + "pkg", "deb" + "ian", "ubu" + "ntu"),
    *("artifact" + "ory", "jf" + "rog", "nex" + "us"),
)
_REGISTRY_HOST = re.compile(
    rf"\b(?:[\w-]+\.)*(?:{'|'.join(_REGISTRIES)})(?:\.[\w-]+)*\.(?:org|com|net|io|dev|internal|local)\b"
)
_SOURCE_VARIABLE = re.compile(r"(?:PIP|UV|NPM_CONFIG)_\w*(?:INDEX|LINKS|REGISTRY|PROXY)\w*", re.IGNORECASE)


# ------------------------------------------------------------------ links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    """A reader follows it from where the page lies; an anchor is not part of the path."""
    assert [link for link in links(page) if not leads_somewhere(page, link)] == []


def test_the_links_of_the_readme_are_found() -> None:
    """A page without any would pass the test above unread."""
    assert "docs/decisions.md" in links(PAGES[0])


def links(page: Path) -> list[str]:
    """The link targets of a page that are no URLs."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    targets = [match["inline"] or match["reference"] for match in _LINK.finditer(text)]
    return [target for target in targets if not re.match(r"[a-z][a-z0-9+.-]*:", target)]


def leads_somewhere(page: Path, link: str) -> bool:
    path = link.partition("#")[0]
    target = (page.parent / path).resolve()
    # Out of the repository it would lead somewhere on one machine alone.
    return not path.startswith("/") and target.is_relative_to(ROOT) and target.exists()


# ------------------------------------------------------------------ traces of a machine


def test_no_file_holds_a_path_of_a_machine() -> None:
    """Home and work folders of anybody; those of the image are ours."""
    own = re.compile(rf"{_START}(?:{'|'.join(map(re.escape, own_paths()))})(?![\w-])")
    found = [place for pattern in (_FOLDER_PATH, own) for place in places(pattern)]
    assert found == []


def test_no_file_names_where_packages_come_from() -> None:
    """Registries of the public, and whatever this machine was told to use."""
    sources = [re.escape(source) for source in package_sources()]
    patterns = [_REGISTRY_HOST, *([re.compile("|".join(sources))] if sources else [])]
    assert [place for pattern in patterns for place in places(pattern)] == []


@pytest.mark.parametrize(
    ("pattern", "trace"),
    [
        (_FOLDER_PATH, "at /" + "home/me/project"),
        (_FOLDER_PATH, "'/" + "root/.cache'"),
        (_FOLDER_PATH, "file:///" + "work/x"),
        (_FOLDER_PATH, "C:" + "\\Users\\me"),
        (_REGISTRY_HOST, "https://" + "py" + "pi.org/simple"),
        (_REGISTRY_HOST, "files." + "python" + "hosted.org"),
        (_REGISTRY_HOST, "registry." + "npm" + "js.org"),
    ],
)
def test_a_trace_is_found(pattern: re.Pattern[str], trace: str) -> None:
    """The scan would pass whatever is written otherwise."""
    assert pattern.search(trace)


@pytest.mark.parametrize(
    "text", ["tests/" + "wo" + "rk/a.py", "redis://host/home/a", "{folder}/opt/a", "httpx2==2.16.2", "root/a"]
)
def test_what_is_no_trace_is_not_found(text: str) -> None:
    """Nobody should have to write around the scan."""
    assert not _FOLDER_PATH.search(text)
    assert not _REGISTRY_HOST.search(text)


@cache
def texts() -> dict[str, str]:
    """The text files that are tracked or about to be, without the paths that the image has inside."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    inside = re.compile("|".join(re.escape(path) for path in re.findall(r"^WORKDIR (\S+)", dockerfile, re.MULTILINE)))
    found: dict[str, str] = {}
    for name in filter(None, listed.stdout.decode().split("\0")):
        try:
            found[name] = inside.sub("", (ROOT / name).read_text(encoding="utf-8"))
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
    return found


def places(pattern: re.Pattern[str]) -> Iterator[str]:
    """Where it stands, as file:line and what."""
    for name, text in texts().items():
        for match in pattern.finditer(text):
            yield f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}"


def own_paths() -> list[str]:
    """Folders of this machine that no file can mean by chance."""
    return [str(path) for path in (ROOT, Path.home()) if len(path.parts) > 1]


def package_sources() -> set[str]:
    """Hosts and folders that pip, uv or npm of this machine fetch from; loopback addresses say nothing."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"], capture_output=True, text=True
    )
    values = [value for name, value in os.environ.items() if _SOURCE_VARIABLE.fullmatch(name)]
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        if re.search(r"index|links|host|proxy", name):
            values.append(value.strip("'\"").replace("\\n", " "))
    found: set[str] = set()
    for word in (word for value in values for word in value.split()):
        url = urlsplit(word)
        if url.hostname:
            # A name without a dot could be any word of a text.
            found |= {url.hostname} if "." in url.hostname and not _is_loopback(url.hostname) else set()
        elif url.scheme in ("", "file") and len(Path(url.path).parts) > 2:
            found.add(url.path)
    return found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
