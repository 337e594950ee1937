"""What the README and the pages of docs/ tell people to type exists, and both languages tell the same."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from shardprep import errors
from tests import command_reference
from tests.checkout import ROOT

PAGES = sorted(
    [*ROOT.glob("README*.md"), ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]
)
COMMAND = re.compile(
    r"(?:(?<![\w./-])(?<!from )shardprep|python -m (?:preprocess|slurm|loader)) "
    r"(?:help )?(--shard_id|[a-z_]+)(.*)"
)
FLAG = re.compile(r"(?<![\w=-])(--?[a-zA-Z][\w-]*)")
FOREIGN_FLAGS = {  # of sbatch, which the pages name on their own
    "--array", "--cpus-per-task", "--dependency", "--export", "--mail-type", "--mem", "--qos", "--requeue",
    "--reservation", "--signal", "--time",
}  # fmt: skip
FOLDERS = ("shardprep", "preprocess", "loader", "slurm", "lustre", "tests", "benchmarks", "examples")


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_lines(text: str) -> list[str]:
    """The lines of all fenced blocks but drawings, without comments and blank lines."""
    lines = []
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if "▶" not in block:
            bare = [re.sub(r"(^|\s+)#.*$", "", line).rstrip() for line in block.splitlines()]
            lines += [line for line in bare if line]
    return lines


def code_spans(text: str) -> list[str]:
    """What stands between single backticks, line breaks as blanks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def commands(text: str) -> list[tuple[str, set[str]]]:
    """(command, its flags) of every ``shardprep ...`` in blocks and spans, up to a pipe or redirection."""
    found = []
    for line in code_lines(text) + code_spans(text):
        match = COMMAND.search(line)
        if match:
            name, rest = ("shard", match[1] + match[2]) if match[1] == "--shard_id" else (match[1], match[2])
            if name == "lustre":
                name += " " + (rest.split() or ["show"])[0]
            if name != "help":
                bare = re.sub(r"'[^']*'", "", re.split(r"\s[|;&>]", rest)[0])  # quoted: another program's
                found.append((name, set(FLAG.findall(bare))))
    return found


@cache
def flags_of_commands() -> dict[str, set[str]]:
    return {title: set(FLAG.findall(text)) | {"--help"} for title, text in command_reference.helps()}


def links_of(text: str) -> list[str]:
    """Where the links of a page lead, as they are written."""
    return [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, re.MULTILINE)]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_the_readers_of_the_pages_see_what_is_there() -> None:
    """The tests below would pass on nothing otherwise."""
    text = "```\nshardprep run data\na ──▶ b\n```\n```\nshardprep plan --num_shards 9 -x  # c\n```\n"
    text += "`shardprep --shard_id N --output_dir DATA`, `shardprep lustre show DATA | grep --no`"
    assert commands(text) == [
        ("plan", {"--num_shards", "-x"}), ("shard", {"--shard_id", "--output_dir"}), ("lustre show", set())
    ]  # fmt: skip
    assert {"plan", "run", "verify", "lustre show", "lustre apply"} <= set(flags_of_commands())
    assert len(commands((ROOT / "README.md").read_text(encoding="utf-8"))) > 10


def test_both_languages_have_the_same_commands_figures_sections_tables_and_links() -> None:
    english, korean = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.ko.md"))
    assert code_lines(korean) == code_lines(english), "change README.ko.md as README.md was changed"
    for pattern in (r"--[a-z_]+", r"\d+\.\d+", r"^## ", r"^\|"):
        found = [sorted(re.findall(pattern, text, re.MULTILINE)) for text in (english, korean)]
        assert len(found[0]) > 5, pattern
        assert found[0] == found[1], pattern
    links = [set(links_of(text)) - {"README.md", "README.ko.md"} for text in (english, korean)]
    assert links[0] == links[1]
    assert {name for name, _ in commands(english)} <= {name for name, _ in commands(korean)}


def test_the_readme_has_at_most_1100_words() -> None:
    assert 300 < len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1100


def test_the_exit_codes_of_the_page_of_commands_are_those_of_the_errors() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")]
    assert len(kinds) > 5
    listed = [int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    assert listed == sorted({0, *(kind.exit_code for kind in kinds)})


def test_a_reader_of_the_readme_finds_each_page_of_the_docs_by_links() -> None:
    found, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in found:
            found.add(page)
            names = [link.partition("#")[0] for link in links_of(page.read_text(encoding="utf-8"))]
            todo += [(page.parent / name).resolve() for name in names if re.fullmatch(r"[\w./-]+\.md", name)]
    assert set(PAGES) - found == set()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_command_flag_and_module_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in links_of(text):
        if not re.match(r"[a-z]+:", link):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
    known = flags_of_commands()
    for name, flags in commands(text) if page.name != "commands.md" else []:
        assert name in known, f"there is no command {name}"
        assert flags <= known[name], f"{name} has no {flags - known[name]}"
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py"))
    every = {flag for flags in known.values() for flag in flags} | FOREIGN_FLAGS | set(FLAG.findall(scripts))
    for span in code_spans(text):
        if span.startswith("--"):
            bare = re.sub(r"'[^']*'", "", span)  # the value of a flag is another program's
            assert set(FLAG.findall(bare)) <= every | {"--version"}, f"`{span}`"
        if re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w/.]+", span):
            assert (ROOT / span).exists() or (ROOT / f"{span}.py").exists(), span
