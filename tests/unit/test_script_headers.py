"""Each script says in its header what its Python declaration says, and does no more than both allow (style)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import subagent_tasks.protocol
from subagent_tasks.protocol import scripts
from subagent_tasks.protocol.lifecycle import departs
from subagent_tasks.protocol.scripts import Script

LUA = Path(subagent_tasks.protocol.__file__).parent / "lua"
INCLUDES = {"_above", "_accept", "_now", "_beats", "_enqueue", "_finish"}
PROVIDES = {
    "_above": ("is_ended_above(",),
    "_accept": ("has_room(", "accept("),
    "_now": ("now_ms(", "now_us("),
    "_beats": ("is_alive(", "silent_ms("),
    "_enqueue": ("enqueue(",),
    "_finish": ("finish(",),
}

every_script = pytest.mark.parametrize("script", scripts.ALL, ids=[script.name for script in scripts.ALL])


@dataclass(frozen=True)
class Header:
    """What the comment at the head of a script declares."""

    sentence: str
    keys: tuple[str, ...]
    key_types: tuple[str, ...]
    args: tuple[str, ...]
    returns: dict[str, str]
    publishes: str


def text_of(name: str) -> str:
    return (LUA / f"{name}.lua").read_text(encoding="utf-8")


def code_of(*names: str) -> str:
    """The scripts without their comments."""
    return "\n".join(line.partition("--")[0] for name in names for line in text_of(name).splitlines())


def read_header(name: str) -> Header:
    comment = [line[2:] for line in text_of(name).splitlines() if line.startswith("--")]
    sections: dict[str, list[str]] = {"": []}
    section = ""
    for line in comment:
        if line.strip() in ("KEYS", "ARGV", "RETURNS", "PUBLISHES"):
            section = line.strip()
            sections[section] = []
        elif section != "PUBLISHES" or line.startswith("   "):
            sections[section].append(line)
    # Three blanks begin an entry; more go on with the one before.
    entries = {
        title: [line[3:] for line in lines if line.startswith("   ") and line[3:4] != " "]
        for title, lines in sections.items()
    }
    heads = {
        title: [re.match(r"([\w.]+(?:, \w+)*)\s*(\S*)", line) for line in lines] for title, lines in entries.items()
    }
    returns: dict[str, str] = {}
    for line in entries["RETURNS"]:
        for answer in re.split(r" \| (?![^<]*>)", line):
            word = answer.replace(":", " ").split()[0]
            returns[word] = f"{returns.get(word, '')} {answer}"
    return Header(
        sentence=" ".join(sections[""]).strip(),
        keys=tuple(head[1] for head in heads["KEYS"] if head),
        key_types=tuple(head[2] for head in heads["KEYS"] if head),
        args=tuple(name for head in heads["ARGV"] if head for name in head[1].split(", ")),
        returns=returns,
        publishes=" ".join(entries["PUBLISHES"]),
    )


@every_script
def test_the_header_names_the_script_and_says_what_it_does(script: Script) -> None:
    """style: one sentence first."""
    assert re.match(rf"{script.name}: \S.*\.$", read_header(script.name).sentence.partition("\n")[0])


@every_script
def test_the_header_lists_the_declared_keys_in_order(script: Script) -> None:
    """style: one test reads each header and its Python declaration and compares them."""
    assert read_header(script.name).keys == script.keys


@every_script
def test_the_header_lists_the_declared_arguments_in_order(script: Script) -> None:
    """style: as for keys; three dots stand for arguments of any number."""
    declared = (*script.args, "...") if script.rest else script.args
    assert read_header(script.name).args == declared


@every_script
def test_the_header_gives_each_key_its_type(script: Script) -> None:
    """style: KEYS with their types."""
    assert set(read_header(script.name).key_types) <= {"hash", "stream", "zset", "set", "string", "list"}


@every_script
def test_the_header_says_what_is_published(script: Script) -> None:
    """style: PUBLISHES; a script that rings nobody says so."""
    header = read_header(script.name)
    publishes = "redis.call('PUBLISH'" in code_of(script.name, *script.includes)
    assert header.publishes
    assert publishes != header.publishes.startswith("nothing")


@every_script
def test_every_answer_is_in_the_header(script: Script) -> None:
    """style: RETURNS words."""
    returns = read_header(script.name).returns
    answers = re.findall(r"return \{ '(\w+)'(?:, '(\w+)')?", code_of(script.name))
    assert answers
    assert {word for word, _ in answers} == set(returns)
    assert [(word, detail) for word, detail in answers if detail and detail not in returns[word]] == []


@every_script
def test_every_return_of_a_script_is_an_answer_in_words(script: Script) -> None:
    """style: scripts answer with words."""
    lines = re.sub(r"local function .*?\nend\n", "", code_of(script.name), flags=re.DOTALL).splitlines()
    returns = [line.strip() for line in lines if re.search(r"\breturn\b", line)]
    assert [line for line in returns if not re.search(r"return \{ '\w+'", line)] == []


@every_script
def test_a_script_touches_only_declared_keys(script: Script) -> None:
    """style: keys only from KEYS. A loop over them counts as them; a channel is no key."""
    code = code_of(script.name, *script.includes)
    loops = re.findall(r"for _, key in ipairs\(\{([^}]*)\}\)", code)
    assert all(name.strip().startswith("K.") for loop in loops for name in loop.split(","))
    calls = re.findall(r"redis\.call\('(\w+)'(?:,\s*([^,)]+))?", code)
    touched = {key.strip() for command, key in calls if command not in ("TIME", "PUBLISH")}
    # `enqueue` is given its keys: those of the run, or of an owner that goes on.
    given = re.findall(r"(?<!function )enqueue\(A\.\w+, K\.\w+, K\.\w+, A\.\w+, .+\)", code)
    assert len(given) == len(re.findall(r"(?<!function )enqueue\(", code))
    assert {key for key in touched if not key.startswith("K.")} <= {"queued", "queue", *(["key"] if loops else [])}


@every_script
def test_a_script_uses_the_names_it_declares_and_no_other(script: Script) -> None:
    """An undeclared name is nil in Lua, and a nil key an error at run time; an unused one is a wrong declaration."""
    code = code_of(script.name, *script.includes)
    # `record` in the prelude reads K.record.
    keys: set[str] = set(re.findall(r"\bK\.(\w+)", code))
    if "record(" in code:
        keys.add("record")
    assert keys == set(script.keys)
    assert set(re.findall(r"\bA\.(\w+)", code)) == set(script.args)


@every_script
def test_a_script_reads_positions_only_behind_the_named_arguments(script: Script) -> None:
    """Positions are counted in one place, the prelude."""
    code = code_of(script.name, *script.includes)
    assert "KEYS" not in code
    positions = re.findall(r"ARGV\b.{0,6}", code)
    assert all("REST" in code for _ in positions)
    assert bool(positions) == script.rest


@every_script
def test_a_script_includes_what_it_uses_and_nothing_else(script: Script) -> None:
    """An include that is missing fails at run time only."""
    code = code_of(script.name, *script.includes)
    used = {
        include
        for include, functions in PROVIDES.items()
        if any(re.search(rf"(?<!function )\b{re.escape(function)}", code) for function in functions)
    }
    assert set(script.includes) == used


@every_script
def test_a_script_leaves_only_states_the_table_lets_it_leave(script: Script) -> None:
    """style: the table alone knows; a script that asks is told, and one that is not told does not ask."""
    assert ("departs[" in code_of(script.name)) == (script.move is not None)
    if script.move is not None:
        told = re.search(r"local departs = \{ (.*) \}", script.source)
        assert told is not None
        assert set(told[1].split(", ")) == {f"{state} = true" for state in departs(script.move)}


@every_script
def test_no_script_names_a_state_to_leave_by_itself(script: Script) -> None:
    """A state written into a script is one it enters, or one that means 'it is already done'."""
    written = re.findall(r"'HSET', K\.record, 'state', '(\w+)'", code_of(script.name, *script.includes))
    assert set(written) <= {"queued", "driven", "suspended", "settled"}


def test_every_lua_file_is_a_script_or_an_include() -> None:
    """A file that nobody declares is dead, or a script without tests."""
    names = {path.stem for path in LUA.glob("*.lua")}
    assert names == {script.name for script in scripts.ALL} | INCLUDES


def test_every_declared_script_is_in_all() -> None:
    """ALL is what the tests of repetition run over."""
    declared = {value.name for value in vars(scripts).values() if isinstance(value, Script)}
    assert declared == {script.name for script in scripts.ALL}


def test_scripts_have_different_names_and_shas() -> None:
    """The SHA is how a server finds a script."""
    assert (
        len({script.name for script in scripts.ALL}) == len({script.sha for script in scripts.ALL}) == len(scripts.ALL)
    )


def test_a_missing_argument_is_refused_by_name() -> None:
    """P13: before anything is sent."""
    with pytest.raises(KeyError, match="lease_ms"):
        scripts.BEAT.arg_list({"process": "p"})


def test_further_arguments_are_refused_where_none_are_declared() -> None:
    """P13: a script would silently ignore them."""
    with pytest.raises(TypeError, match="'beat' takes no further arguments"):
        scripts.BEAT.arg_list({"process": "p", "lease_ms": 1}, rest=["more"])
