"""The Lua: its headers say what its bodies do, and it stays in the subset that every server shares."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

import pytest

from idemredis.core.scripts import NAMES, Script, load
from tests.support.servers import Server

LUA = Path(__file__).parents[2] / "lua"

COMMANDS = {"HMGET", "HSET", "PEXPIRE", "PTTL", "DEL"}
FIELDS = {
    "status",
    "generation",
    "owner",
    "fingerprint",
    "lease",
    "retention",
    "created_at",
    "route",
    "response_status",
    "response_headers",
    "response_body",
    "response_omitted",
    "checkpoint",
    "checkpoint_data",
    "checkpoint_seq",
}
GLOBALS = {"redis", "KEYS", "ARGV", "string", "math", "tonumber", "type", "select", "ipairs", "tostring"}
KEYWORDS = {
    "and",
    "break",
    "do",
    "else",
    "elseif",
    "end",
    "false",
    "for",
    "function",
    "if",
    "in",
    "local",
    "nil",
    "not",
    "or",
    "repeat",
    "return",
    "then",
    "true",
    "until",
    "while",
}

every_script = pytest.mark.parametrize("script", load().values(), ids=load())

OF_ROWS = {name: script for name, script in load().items() if name != "survey"}
"""Scripts of one row. `survey` has many, and is for people who look at them."""

every_script_of_a_row = pytest.mark.parametrize("script", OF_ROWS.values(), ids=OF_ROWS)

READ_ONLY = {"read", "survey"}


def header(script: Script) -> dict[str, list[str]]:
    """The blocks of the header by their names, with continued lines joined; the first line under "title"."""
    text, closed, _ = script.text.partition("\n]]\n")
    assert closed
    opened, title, *lines = text.splitlines()
    assert opened == "--[["
    blocks = {"title": [title]}
    block: list[str] = []
    for line in lines:
        if match := re.match(r"([A-Z]+)\b(.*)", line):
            block = blocks.setdefault(match[1], [])
            if match[2].strip():
                block.append(match[2].strip())
        elif line.startswith("    ") and block:
            block[-1] += f" {line.strip()}"
        elif line.strip():
            block.append(line)
    return blocks


def body(script: Script) -> str:
    """What runs: no comments."""
    return re.sub(r"--.*", "", re.sub(r"--\[\[.*?\]\]", "", script.text, flags=re.DOTALL))


def arguments(block: list[str]) -> list[tuple[int, str]]:
    return [
        (int(number), name)
        for line in block
        if (match := re.match(r"  (\d+)  (\w+) +\S", line))
        for number, name in [match.groups()]
    ]


def named_in_locals(source: str, table: str) -> list[tuple[int, str]]:
    """Which element of KEYS or ARGV got which name, in the order of the locals."""
    found = []
    for names, values in re.findall(rf"local ([\w, ]+) = ((?:{table}\[\d+\](?:, )?)+)", source):
        indices = [int(index) for index in re.findall(r"\[(\d+)\]", values)]
        found += list(zip(indices, names.split(", "), strict=True))
    return found


@every_script
def test_a_header_has_its_blocks_in_order_and_begins_with_the_name(script: Script) -> None:
    blocks = header(script)

    assert list(blocks) == ["title", "KEYS", "ARGV", "REPLY", "WRITES"]
    assert blocks["title"][0].startswith(f"{script.name}: ")


@every_script
@pytest.mark.parametrize("table", ["KEYS", "ARGV"])
def test_every_argument_is_documented_in_order_and_named_in_a_local(script: Script, table: str) -> None:
    documented = arguments(header(script)[table])
    source = body(script)
    if (script.name, table) == ("survey", "KEYS"):
        assert re.findall(r"^.*\bKEYS\b.*$", source, re.M) == ["local rows = KEYS"]
        assert [line.split()[:2] for line in header(script)["KEYS"]] == [["1..", "rows"]]
        return

    assert [number for number, _ in documented] == list(range(1, len(documented) + 1))
    assert len(documented) == len(header(script)[table])
    assert named_in_locals(source, table) == documented
    assert len(re.findall(rf"\b{table}\b", source)) == len(documented), "used somewhere without its name"
    for _, name in documented:
        assert len(re.findall(rf"\b{name}\b", source)) > 1, f"{name} is never used"


@every_script
def test_every_reply_is_documented_and_every_documented_reply_can_come(script: Script) -> None:
    documented = {match[1] for line in header(script)["REPLY"] if (match := re.match(r"  (\w+) +token\b", line))}
    assert len(documented) == len(header(script)["REPLY"])
    source = body(script)
    returned = set(re.findall(r"(?:return |with_checkpoint\(|reply = )\{'(\w+)'", source))
    returned |= set(re.findall(r"return finish\('(\w+)'\)", source))

    assert returned == documented


@every_script
def test_every_reply_repeats_the_token_of_its_call(script: Script) -> None:
    token = "token" if script.name in READ_ONLY else "owner"
    replies = re.findall(r"(?:return |with_checkpoint\(|reply = )\{(?:'\w+'|outcome), (\w+)", body(script))

    assert set(replies) == {token}


WRITE = r"(?:redis\.call\('HSET', row|set_clock\(row, [\w\[\]]+, \w+), (.*?)\)+\n"
"""A call that writes fields, its fields captured."""


@every_script
def test_the_header_names_the_fields_that_the_body_writes(script: Script) -> None:
    says = " ".join(header(script)["WRITES"])
    source = body(script)
    functions = re.findall(r"^local function (\w+)", source, re.M)
    unused = [name for name in functions if len(re.findall(rf"\b{name}\b", source)) == 1]
    for name in unused:
        source = re.sub(rf"^local function {name}\b.*?^end\n", "", source, flags=re.M | re.DOTALL)
    written = {
        field
        for fields in re.findall(WRITE, source, flags=re.DOTALL)
        for field in re.findall(r"'(\w+)'", fields)
        if field in FIELDS
    }
    named = {field for field in FIELDS if re.search(rf"\b{field}\b", says)}
    named |= {field for field in FIELDS if "response_*" in says and field.startswith("response_")}
    if "all fields of a new row" in says:
        named |= {"status", "generation", "owner", "fingerprint", "lease", "retention", "created_at", "route"}

    assert written == named
    assert "TTL" in says
    assert ("PEXPIRE" in source) == (script.name not in READ_ONLY)


def test_lease_retention_and_ttl_change_together_in_one_place() -> None:
    """One without the others would move the end of the lease."""
    for path in LUA.rglob("*.lua"):
        if path.name != "clock.lua":
            source = path.read_text()
            assert "PEXPIRE" not in re.sub(r"--.*", "", source), path
            for fields in re.findall(r"redis\.call\('HSET', (.*?)\)\n", source, flags=re.DOTALL):
                assert not set(re.findall(r"'(\w+)'", fields)) & {"lease", "retention"}, path
    clock = (LUA / "lib" / "clock.lua").read_text()
    assert len(re.findall(r"^local function", clock, re.M)) == 1
    assert clock.count("'PEXPIRE', row, retention") == clock.count("'HSET', row, 'retention', retention, ...") == 2


def test_the_scripts_call_these_commands_and_no_others() -> None:
    called = {name: set(re.findall(r"redis\.p?call\('(\w+)'", body(script))) for name, script in load().items()}

    assert set().union(*called.values()) == COMMANDS
    for script in load().values():
        assert len(re.findall(r"redis\.\w+", body(script))) == len(re.findall(r"redis\.p?call\('\w+'", body(script)))


@every_script_of_a_row
def test_a_script_touches_its_one_key_alone(script: Script) -> None:
    source = body(script)
    for command, rest in re.findall(r"redis\.p?call\('(\w+)'(, \w+)?", source):
        assert rest == ", row", command

    assert re.findall(r"KEYS\[\d+\]", source) == ["KEYS[1]"]
    assert arguments(header(script)["KEYS"]) == [(1, "row")]


def test_the_survey_touches_its_rows_alone() -> None:
    source = body(load()["survey"])

    assert "for i, row in ipairs(rows) do" in source
    assert {rest for _, rest in re.findall(r"redis\.p?call\('(\w+)'(, \w+)?", source)} == {", row"}
    assert {name for name, _ in re.findall(r"redis\.p?call\('(\w+)'(, \w+)?", source)} == {"PTTL", "HMGET"}


@every_script
def test_a_script_checks_everything_before_it_writes(script: Script) -> None:
    """Once it has written, nothing more is found wrong with the row: the block that wrote returns."""
    source = body(script)
    source = re.sub(r"^local function (?!finish\b).*?^end\n", "", source, flags=re.M | re.DOTALL)
    refusals = [match.start() for match in re.finditer(r"return \{'(?:fenced|lost|corrupt|reused)'", source)]

    for write in re.finditer(r"^( *).*(?:set_clock|extend_lease|'HSET')\b", source, re.M):
        for refusal in refusals:
            between = source[write.end() : refusal]
            assert refusal < write.start() or re.search(rf"^{write[1]}return ", between, re.M), write[0]


@every_script
def test_a_script_uses_no_undeclared_name(script: Script) -> None:
    """fakeredis reads one as nil, a real server only fails when it gets there."""
    source = re.sub(r"'[^']*'", "''", body(script))
    declared = {
        name.strip() for names in re.findall(r"\blocal ([\w, ]+?)(?= =|\n)", source) for name in names.split(",")
    }
    declared |= set(re.findall(r"local function (\w+)", source))
    declared |= {
        name.strip() for names in re.findall(r"function \w+\(([\w, .]*)\)", source) for name in names.split(",")
    }
    declared |= {
        name.strip() for names in re.findall(r"\bfor ([\w, ]+?) (?:=|in\b)", source) for name in names.split(",")
    }
    used = set(re.findall(r"(?<![\w.:'])[A-Za-z_]\w*", source))

    assert used - declared - KEYWORDS <= GLOBALS


def test_no_script_assigns_a_global() -> None:
    for script in load().values():
        declared = set(re.findall(r"\blocal (?:function )?(\w+)", body(script)))
        declared |= {name for names in re.findall(r"local ([\w, ]+) =", body(script)) for name in names.split(", ")}
        for name in re.findall(r"^\s*(\w+) = ", body(script), flags=re.MULTILINE):
            assert name in declared


def test_every_file_is_a_script_or_a_fragment_that_one_includes() -> None:
    assert {path.stem for path in LUA.glob("*.lua")} == set(NAMES)
    included = {
        name for path in LUA.glob("*.lua") for name in re.findall(r"^-- include (\S+)$", path.read_text(), re.M)
    }
    assert included == {f"lib/{path.name}" for path in LUA.glob("lib/*.lua")}


@every_script
def test_the_fragments_are_joined_in(script: Script) -> None:
    written = (LUA / f"{script.name}.lua").read_text()

    assert "-- include" not in script.text
    for name in re.findall(r"^-- include (\S+)$", written, re.M):
        assert script.text.count((LUA / name).read_text()) == 1
    before = "".join(takewhile(lambda line: not line.startswith("-- include"), written.splitlines(keepends=True)))
    assert script.text.startswith(before)


@every_script
def test_the_hash_is_the_one_that_the_server_makes(script: Script, real_server: Server) -> None:
    with real_server.client() as client:
        sha = client.script_load(script.text)

    assert sha in (script.sha, script.sha.encode())
