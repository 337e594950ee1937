"""Commands, flags and links in the README and docs/ exist, and both languages of the README agree.

Also their examples, pictures, and the site.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from shardprep import errors
from tests import command_reference
from tests.checkout import ROOT
from tests.children import child, end_of, run_child
from tests.documented import examples_of

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*ROOT.glob("README*.md"), ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *DOCS]
COMMAND = re.compile(
    r"(?:(?<![\w./-])(?<!from )shardprep|python -m (?:preprocess|slurm|loader)) "
    r"(?:help )?(--shard_id|[a-z_]+)(.*)"
)
FLAG = re.compile(r"(?<![\w=-])(--?[a-zA-Z][\w-]*)")
FOREIGN_FLAGS = {  # flags of sbatch that the pages mention alone
    "--array", "--cpus-per-task", "--dependency", "--export", "--mail-type", "--mem", "--qos", "--requeue",
    "--reservation", "--signal", "--time",
}  # fmt: skip
FOLDERS = ("shardprep", "preprocess", "loader", "slurm", "lustre", "tests", "benchmarks", "examples")


def code_lines(text: str) -> list[str]:
    """Return the lines of all fenced blocks except drawings, without comments and blank lines."""
    lines = []
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if "▶" not in block:
            bare = [re.sub(r"(^|\s+)#.*$", "", line).rstrip() for line in block.splitlines()]
            lines += [line for line in bare if line]
    return lines


def code_spans(text: str) -> list[str]:
    """Return the text between single backticks, with line breaks as spaces."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def commands(text: str) -> list[tuple[str, set[str]]]:
    """Return (command, flags) of every ``shardprep ...`` in blocks and spans, up to a pipe or redirection."""
    found = []
    for line in code_lines(text) + code_spans(text):
        match = COMMAND.search(line)
        if match:
            name, rest = ("shard", match[1] + match[2]) if match[1] == "--shard_id" else (match[1], match[2])
            if name == "lustre":
                name += " " + (rest.split() or ["show"])[0]
            if name != "help":
                bare = re.sub(r"'[^']*'", "", re.split(r"\s[|;&>]", rest)[0])  # quotes: for another program
                found.append((name, set(FLAG.findall(bare))))
    return found


@cache
def flags_of_commands() -> dict[str, set[str]]:
    return {title: set(FLAG.findall(text)) | {"--help"} for title, text in command_reference.helps()}


def links_of(text: str) -> list[str]:
    """Return the targets of a page's links as written."""
    return [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, re.MULTILINE)]


def test_the_parsers_of_pages_find_commands_and_flags() -> None:
    """Otherwise the tests below would pass vacuously."""
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
    kinds = {kind.exit_code for kind in vars(errors).values() if hasattr(kind, "exit_code")}
    assert len(kinds) > 5
    assert errors.EXIT_CODES.keys() == {0, *kinds}
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    shown = {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)}
    assert "`doctor`" in shown.pop(1), "no error has this code"
    assert shown == errors.EXIT_CODES


def test_the_page_of_commands_names_each_command() -> None:
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    named = {span.removeprefix("shardprep ") for span in code_spans(text)}
    assert set(flags_of_commands()) - {"completion"} <= named


def first_numbers(section: str) -> dict[str, list[float]]:
    """Return the first numbers in the cells of a table of docs/speed.md, by its first column."""
    found = {}
    for row in re.findall(r"^\| (.+) \|$", section, re.MULTILINE):
        name, *cells = row.split(" | ")
        numbers = [re.match(r"[\d.]+", cell) for cell in cells]
        found[name.replace("**", "")] = [float(number[0]) for number in numbers if number]
    return found


def test_the_costs_on_the_first_screen_are_those_of_the_tables_of_speed() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    speed = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    of_shards, _, of_batches = speed.partition("## Packed rows to batches")
    shards = first_numbers(of_shards)  # CPU seconds per MB: Korean, English ...
    expected = [round(cpu_s * 10**6 / 3600) for cpu_s in shards["shardprep packed"][:2]]
    others = [row for name, row in shards.items() if row and not name.startswith(("shardprep", "baseline"))]
    assert len(others) == 6
    for number in range(2):
        best = min(row[number] for row in others)
        expected.append(round(best / shards["shardprep packed"][number]))
    shown = re.search(r"(\d+) core-hours for 1 TB of Korean, (\d+) for .*?: 1/(\d+) and 1/(\d+)", readme)
    assert shown
    assert [int(each) for each in shown.groups()] == expected
    loaders = {name: row[0] for name, row in first_numbers(of_batches).items() if row}  # Mtok per CPU second
    ours = loaders.pop("shardprep, packed")
    rates = re.search(
        r"([\d,]+) batches per second of one core; the next loader takes ([\d.]+) times", readme
    )
    assert rates
    assert int(rates[1].replace(",", "")) == round(ours * 10**6 / (8 * 2048), -3)
    assert float(rates[2]) == round(ours / max(loaders.values()), 1)


def test_each_page_of_the_docs_can_be_reached_from_the_readme_by_links() -> None:
    found, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in found:
            found.add(page)
            names = [link.partition("#")[0] for link in links_of(page.read_text(encoding="utf-8"))]
            todo += [(page.parent / name).resolve() for name in names if re.fullmatch(r"[\w./-]+\.md", name)]
    assert set(PAGES) - found == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_command_flag_and_module_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in links_of(text):
        if not re.match(r"[a-z]+:", link):
            # The strict build of the site checks anchors.
            assert (page.parent / link.partition("#")[0]).exists(), link
    known = flags_of_commands()
    for name, flags in commands(text):
        assert name in known, f"there is no command {name}"
        assert flags <= known[name], f"{name} has no {flags - known[name]}"
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py"))
    every = {flag for flags in known.values() for flag in flags} | FOREIGN_FLAGS | set(FLAG.findall(scripts))
    for span in code_spans(text):
        if span.startswith("--"):
            bare = re.sub(r"'[^']*'", "", span)  # quoted flags are for another program
            assert set(FLAG.findall(bare)) <= every | {"--version"}, f"`{span}`"
        if re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w/.]+", span):
            assert (ROOT / span).exists() or (ROOT / f"{span}.py").exists(), span


def test_every_file_and_section_that_scripts_and_code_point_to_exists() -> None:
    files = [path for folder in FOLDERS if folder != "tests" for path in (ROOT / folder).rglob("*.*")]
    files = [path for path in files if path.suffix in (".py", ".sh", ".j2", ".jinja")]
    files += [ROOT / "Makefile", *(ROOT / ".ci").iterdir(), *(ROOT / "examples").glob("*")]
    num_found = 0
    for path in dict.fromkeys(file for file in files if file.is_file()):
        text = re.sub(r"\s+(?:# )?", " ", path.read_text(encoding="utf-8"))
        for name, section in re.findall(
            r"((?:docs|examples|benchmarks)/[\w/-]+\.\w+)(?:, \"([^\"]+)\")?", text
        ):
            assert (ROOT / name).exists(), f"{path} names {name}"
            if section:
                heading = rf"^#+ (An? )?{re.escape(section)}$"
                assert re.search(heading, (ROOT / name).read_text("utf-8"), re.MULTILINE | re.IGNORECASE), (
                    path
                )
            num_found += 1
    assert num_found > 20


@pytest.mark.parametrize("name", ["preprocess_speed", "loader_speed"])
def test_the_pictures_of_the_readme_match_the_tables_in_the_docs(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = (ROOT / "docs/speed.md").read_text(encoding="utf-8")
    drawn = (ROOT / f"docs/pictures/{name}.svg").read_text(encoding="utf-8")
    expected = importlib.import_module("ratio_picture").pictures(tables)[name]
    assert drawn == expected, "run: python benchmarks/ratio_picture.py docs/speed.md docs/pictures"
    for path in (ROOT / "README.md", ROOT / "README.ko.md"):
        assert f"docs/pictures/{name}.svg" in path.read_text(encoding="utf-8")


def test_the_picture_of_the_report_is_of_todays_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    report_picture = importlib.import_module("report_picture")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        today = report_picture.hash_of(report_picture.page())
    finally:
        monkeypatch.undo()
        time.tzset()
    assert report_picture.page_of_picture() == today, "run: python benchmarks/report_picture.py"


@pytest.mark.processes
def test_the_site_has_every_page_no_broken_link_and_no_external_resource(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed: make install")
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / ".site/mkdocs.yml")]
    run_child([*mkdocs, "-d", tmp_path])
    pages = {path.stem for path in DOCS} | {"flags", "members", "results", "CHANGELOG", "README.ko"}
    assert pages <= {path.stem for path in tmp_path.rglob("*.html")}
    listed = (tmp_path / "llms.txt").read_text(encoding="utf-8")
    assert all(f"{page}.html)" in listed for page in pages)
    loaded = r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"'
    for page in tmp_path.rglob("*.html"):
        assert re.findall(loaded, page.read_text("utf-8")) == [], page


def test_every_loader_in_an_example_packs_documents_with_boundaries() -> None:
    pages = {page: examples_of(page) for page in ["README.md", *(each.name for each in DOCS)]}
    # `make demo` prints the begin of a training script at its end.
    pages |= {path.name: [path.read_text("utf-8")] for path in (ROOT / "examples").glob("*.*")}
    num_loaders = 0
    for page, examples in pages.items():
        # An example may use a dictionary of an earlier one. Conversations are packed by plan.
        code = "\n".join(example for example in examples if "SFTTrainer" not in example)
        code = re.sub(r" *#.*", "", code)
        loaders = re.findall(r"get_llama3_dataloader\(((?:.|\n)*?)\)(?: as \w+:)?$", code, re.MULTILINE)
        assert len(loaders) == code.count("get_llama3_dataloader("), page
        for arguments in loaders:
            given = re.findall(r"\*\*(\w+)", arguments)
            dictionaries = [re.search(rf"^{name} = ((?:.|\n)*?[}})])$", code, re.MULTILINE) for name in given]
            words = " ".join([arguments, *(found[1] for found in dictionaries if found)])
            assert {"seq_len", "boundaries"} <= set(re.findall(r"\w+", words)), (page, arguments)
            num_loaders += 1
    assert num_loaders > 15


@pytest.mark.processes
def test_tasks_that_start_together_on_a_node_share_one_unpacked_environment(tmp_path: Path) -> None:
    environment, shared = tmp_path / "ENV", tmp_path / "shared"
    (environment / "bin").mkdir(parents=True)
    shared.mkdir()
    (environment / "bin/python").write_text("#!/bin/sh\necho from_the_tar\n")
    (environment / "bin/python").chmod(0o755)
    setup, packed = shutil.copy(ROOT / "examples/environment_on_node.sh", shared), shared / "environment.tar"
    run_child(["tar", "-C", environment, "-cf", packed, "."])
    os.utime(packed, (os.getpid(), os.getpid()))  # its time is in the name of the folder in /tmp
    with contextlib.ExitStack() as running:
        command = ["bash", "-c", f"source {setup}; echo $environment; python"]
        tasks = [running.enter_context(child(command)) for _ in range(4)]
        outputs = {end_of(task) for task in tasks}
    (place, words) = outputs.pop().split()
    try:
        assert (outputs, words) == (set(), "from_the_tar")
        assert [*Path("/tmp").glob(f"{Path(place).name}*")] == [Path(place)], "no partial copy is left"
    finally:
        shutil.rmtree(place)
