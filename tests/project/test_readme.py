"""What the README and the pages of docs/ tell people to type exists, and both languages tell the same.

Their examples, pictures and site are looked at, too.
"""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import pytest

from shardprep import errors
from tests import command_reference
from tests.checkout import ROOT
from tests.documented import examples_of

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


@pytest.mark.parametrize("name", ["preprocess_speed", "loader_speed"])
def test_the_pictures_of_the_readme_are_those_of_the_tables_in_the_docs_and_as_long_as_their_ratios(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = (ROOT / "docs/speed.md").read_text(encoding="utf-8")
    drawn = (ROOT / f"docs/pictures/{name}.svg").read_text(encoding="utf-8")
    expected = importlib.import_module("ratio_picture").pictures(tables)[name]
    assert drawn == expected, "draw them anew: python benchmarks/ratio_picture.py docs/speed.md docs/pictures"
    for path in (ROOT / "README.md", ROOT / "README.ko.md"):
        assert f"docs/pictures/{name}.svg" in path.read_text(encoding="utf-8")
    svg, namespace = ET.fromstring(drawn), "{http://www.w3.org/2000/svg}"
    bars = [each.attrib for each in svg.iter(f"{namespace}rect") if each.attrib["class"].startswith("bar")]
    texts = [each.text or "" for each in svg.iter(f"{namespace}text")]
    numbers = [float(text[:-1].replace(",", "")) for text in texts if text.endswith("x")]
    assert len(numbers) == len(bars) > 2
    widths: dict[str, list[tuple[float, float]]] = {}  # of the bars of a column, with their numbers
    for bar, number in zip(bars, numbers, strict=True):
        widths.setdefault(bar["x"], []).append((number, float(bar["width"])))
    for column in widths.values():
        longest, width = max(column)
        assert all(each == pytest.approx(width * number / longest, abs=2) for number, each in column)


@pytest.mark.processes
def test_the_site_has_every_page_no_broken_link_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed: make install")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / ".site/mkdocs.yml")]
    built = subprocess.run([*command, "-d", str(tmp_path)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"results", "CHANGELOG", "README.ko"}
    assert pages <= {path.stem for path in tmp_path.rglob("*.html")}
    listed = (tmp_path / "llms.txt").read_text(encoding="utf-8")
    assert all(f"{page}.html)" in listed for page in pages)
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text("utf-8")
        )
        assert loaded == [], page


# A page is read from top to bottom: an example may use a dictionary of one above it.
# Conversations are packed by plan.
SCRIPTS = {
    page: "\n".join(code for code in examples_of(page) if "SFTTrainer" not in code)
    for page in ("README.md", *sorted(path.name for path in (ROOT / "docs").glob("*.md")))
}
SCRIPTS |= {path.name: path.read_text("utf-8") for path in (ROOT / "examples").glob("*.py")}
# `make demo` prints the beginning of a training script at its end.
SCRIPTS["demo.sh"] = "\n".join(
    re.findall(r"^dataloader = .*$", (ROOT / "examples/demo.sh").read_text("utf-8"), re.MULTILINE)
)


def arguments_of_loaders(code: str) -> list[set[str]]:
    """Return the names of the arguments of each loader that a script makes, of dictionaries, too."""
    tree = ast.parse(code)
    dictionaries = {
        str(target): {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in (each.id for each in node.targets if isinstance(each, ast.Name))
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "get_llama3_dataloader":
            names: set[str] = set()
            for keyword in node.keywords:
                if keyword.arg:
                    names.add(keyword.arg)
                elif isinstance(keyword.value, ast.Name):
                    names |= {str(name) for name in dictionaries.get(keyword.value.id, ())}
            found.append(names)
    return found


def test_every_loader_of_an_example_packs_documents_and_keeps_them_apart() -> None:
    loaders = [(name, names) for name, code in SCRIPTS.items() for names in arguments_of_loaders(code)]
    assert len(loaders) > 15
    for name, names in loaders:
        assert {"seq_len", "boundaries"} <= names, (name, names)


@pytest.mark.processes
def test_tasks_of_a_node_that_begin_together_enter_one_unpacked_environment(tmp_path: Path) -> None:
    environment, shared = tmp_path / "ENV", tmp_path / "shared"
    (environment / "bin").mkdir(parents=True)
    shared.mkdir()
    (environment / "bin/python").write_text("#!/bin/sh\necho from_the_tar\n")
    (environment / "bin/python").chmod(0o755)
    setup = shutil.copy(ROOT / "examples/environment_on_node.sh", shared)
    subprocess.run(["tar", "-C", environment, "-cf", shared / "environment.tar", "."], check=True)
    command = ["bash", "-c", f"source {setup}; echo $environment; python"]
    tasks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    told = {task.communicate()[0] for task in tasks}
    (place, words) = told.pop().split()
    try:
        assert (told, words) == (set(), "from_the_tar")
        assert [*Path("/tmp").glob(f"{Path(place).name}*")] == [Path(place)], "no half is left"
    finally:
        shutil.rmtree(place)
