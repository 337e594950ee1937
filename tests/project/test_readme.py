"""What the README and the pages of docs/ tell people to type exists, and both languages tell the same."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from functools import cache
from pathlib import Path

import pytest

from shardprep import errors
from shardprep.__main__ import COMMANDS
from tests.checkout import ROOT

PAGES = sorted(
    [*ROOT.glob("README*.md"), ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]
)
PACKAGES = ("preprocess", "loader", "slurm", "lustre")
COMMAND = re.compile(rf"(?:python -m ({'|'.join(PACKAGES)})|(?<![\w./-])shardprep)(?=[ `]|$)(.*)")
FLAG = re.compile(r"(?<![\w=-])(--?[a-zA-Z][\w-]*)")
# flags of other programs that the pages name on their own: sbatch's
FOREIGN_FLAGS = {  # of sbatch
    "--array",
    "--cpus-per-task",
    "--dependency",
    "--export",
    "--mail-type",
    "--mem",
    "--requeue",
    "--reservation",
    "--signal",
    "--time",
}


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_blocks(text: str) -> list[list[str]]:
    """The lines of every fenced block, without comments, blank lines and drawings."""
    fenced = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    blocks = [block.splitlines() for block in fenced]
    bare = [[re.sub(r"(^|\s+)#.*$", "", line).rstrip() for line in block] for block in blocks]
    return [[line for line in block if line] for block in bare if not any("▶" in line for line in block)]


def code_lines(text: str) -> list[str]:
    """The same, as one list."""
    return [line for block in code_blocks(text) for line in block]


def code_spans(text: str) -> list[str]:
    """What stands between single backticks, line breaks as blanks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def commands(text: str) -> list[tuple[str, str]]:
    """(package, arguments) of every ``python -m <package>`` of ours, in blocks and in spans."""
    lines = code_lines(text) + code_spans(text)
    found = [match for line in lines for match in [COMMAND.search(line.replace(" help ", " "))] if match]
    found = [match for match in found if match[2] != " help"]
    return [(match[1] or package_of(match[2]), match[2].removeprefix(" lustre")) for match in found]


def package_of(arguments: str) -> str:
    """Whose command ``shardprep`` with these arguments runs."""
    return COMMANDS.get(next(iter(arguments.split()), ""), "preprocess")


@cache
def help_of(package: str, *words: str) -> str:
    """What ``python -m package words --help`` prints; fails where that is no command."""
    main = importlib.import_module(f"{package}.__main__").main
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        pytest.raises(SystemExit) as ending,
    ):
        main([*words, "--help"])
    assert ending.value.code == 0, f"python -m {package} {' '.join(words)} --help: {out.getvalue()}"
    return out.getvalue()


def subcommands(package: str) -> list[str]:
    """The commands of a package."""
    program = importlib.import_module(f"{package}.__main__").PROGRAM
    return [word for word, command in program.commands.items() if not command.is_nameless]


def words_of(package: str, arguments: str) -> tuple[str, ...]:
    """The subcommand that the arguments begin with; ``shard`` for preprocess's form without one."""
    known = [*subcommands(package), *(["shard"] if package == "preprocess" else [])]
    first = next(iter(arguments.split()), "")
    if first in known:
        return (first,)
    assert not known or not re.fullmatch(r"[a-z_]+", first), f"python -m {package} has no command {first!r}"
    return ("shard",) if package == "preprocess" and "--shard_id" in arguments else ()


def flags_of(arguments: str) -> set[str]:
    """The flags among the arguments, up to a pipe, redirection or the next command."""
    return set(FLAG.findall(re.split(r"\s[|;&>]", arguments)[0]))


def test_the_readers_of_the_pages_see_what_is_there() -> None:
    """The tests below would pass on nothing otherwise."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "shardprep run data" in code_lines(text)
    assert ("slurm", " retry /lustre/data") in commands(text)
    assert ("preprocess", " verify /lustre/data") in commands(text), "in a span"
    form = " --shard_id N --input_dir RAW --output_dir DATA --model_id M"
    assert ("preprocess", form) in commands(text)
    assert flags_of(" plan --num_shards 100 --out='a b' -x | grep --no") == {"--num_shards", "--out", "-x"}
    assert {"plan", "run", "verify"} <= set(subcommands("preprocess"))
    assert {"show", "apply"} <= set(subcommands("lustre"))
    assert code_blocks("```\na ──▶ b\n```\n```sh\n# c\nd  # e\n```\n") == [["d"]]


def test_both_languages_have_the_same_commands_in_the_same_order() -> None:
    english, korean = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.ko.md"))
    assert code_lines(korean) == code_lines(english), "change README.ko.md as README.md was changed"
    assert len(code_lines(english)) > 10
    assert commands(english)
    assert set(commands(english)) <= set(commands(korean)), "a command in the text of README.md alone"


def test_both_languages_have_the_same_sections_tables_and_links() -> None:
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.ko.md")]
    for pattern in (r"^## ", r"^\|"):
        english, korean = (len(re.findall(pattern, text, re.MULTILINE)) for text in texts)
        assert english == korean > 5, pattern
    english_links, korean_links = (set(links_of(text)) - {"README.md", "README.ko.md"} for text in texts)
    assert english_links == korean_links


def test_the_readme_has_at_most_1100_words() -> None:
    assert 300 < len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1100


def test_the_korean_readme_has_the_commands_and_figures_of_the_english_one() -> None:
    def told(name: str) -> list[list[str]]:
        text = (ROOT / name).read_text(encoding="utf-8")
        flags = re.findall(r"--[a-z_]+", text)
        figures = re.findall(r"\d+\.\d+", text)
        return [sorted(flags), figures, re.findall(r"\]\((docs/[^)]+|[A-Z.]+\.md)\)", text)]

    ours, theirs = told("README.ko.md"), told("README.md")
    assert ours[:2] == theirs[:2]
    assert {*theirs[2]} <= {*ours[2], "README.ko.md"}


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


def links_of(text: str) -> list[str]:
    """Where the links of a page lead, as they are written."""
    return [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in links_of(text):
        if not re.match(r"[a-z]+:", link):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_module_that_a_page_names_by_its_path_exists(page: Path) -> None:
    folders = "|".join(["shardprep", *PACKAGES, "tests", "benchmarks", "examples"])
    for span in code_spans(page.read_text(encoding="utf-8")):
        if re.fullmatch(rf"(?:{folders})/[\w/.]+", span):
            assert (ROOT / span).exists() or (ROOT / f"{span}.py").exists(), span


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "commands.md"], ids=page_id)
def test_every_command_named_exists_with_its_flags(page: Path) -> None:
    for package, arguments in commands(page.read_text(encoding="utf-8")):
        words = words_of(package, arguments)
        text = help_of(package, *words)
        for flag in flags_of(arguments):
            assert flag in FLAG.findall(text), f"python -m {package} {' '.join(words)} has no {flag}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_flag_named_on_its_own_is_one_of_some_command(page: Path) -> None:
    packages = [name for name in PACKAGES if (ROOT / name / "__main__.py").exists()]
    forms = [(name, *words) for name in packages for words in [(), *((sub,) for sub in subcommands(name))]]
    helps = [help_of(*form) for form in [*forms, ("preprocess", "shard")]]
    helps += [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]
    known = {flag for text in helps for flag in FLAG.findall(text)} | FOREIGN_FLAGS
    for span in code_spans(page.read_text(encoding="utf-8")):
        if span.startswith("--"):
            missing = set(FLAG.findall(span)) - known
            assert not missing, f"`{span}`: no command has {missing}"
