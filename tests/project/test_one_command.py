"""``shardprep`` is every command of every package, under the name by which it was called."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

import pytest

from shardprep import removed
from shardprep.__main__ import COMMANDS, main
from tests import command_reference
from tests.children import run_child

ROOT = Path(__file__).parents[2]
HEAVY = ("numpy", "torch", "tokenizers", "transformers", "orjson", "tqdm", "webdataset")


@pytest.mark.parametrize("word", ["--help", "help"])
def test_help_has_a_line_for_each_command_and_says_what_the_package_says(
    capsys: pytest.CaptureFixture[str], word: str
) -> None:
    assert main([word]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if line[:2] == "  ")
    assert list(lines) == list(COMMANDS)
    for command, package in COMMANDS.items():
        commands = importlib.import_module(f"{package}.__main__").PROGRAM.commands
        assert package == command or lines[command] == commands[command].summary
        if package not in COMMANDS:
            assert set(commands) - {"show"} == {name for name, of in COMMANDS.items() if of == package}


def test_the_page_of_commands_says_what_they_declare_in_80_columns() -> None:
    found = command_reference.PAGE.read_text("utf-8")
    assert found == command_reference.page(), "run: python -m tests.command_reference"
    for title, text in command_reference.helps():
        assert max(map(len, text.splitlines())) < 80, title


def test_each_flag_says_its_default_or_is_required() -> None:
    num_flags = 0
    for title, text in command_reference.helps():
        usage, _, rest = text.partition("\n\n")
        for flag in re.findall(r"^  (-(?:.*\n)(?: {5,}.*\n)*)", rest, re.MULTILINE):
            name = flag.split()[0].rstrip(",")
            assert "default" in flag or name == "-h" or f" {name} " in usage, f"{title}: {flag}"
            num_flags += 1
    assert num_flags > 100


@pytest.mark.parametrize("words", [["help", "plan"], ["plan", "--help"]])
def test_help_of_a_command_is_asked_for_in_two_ways(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        main(words)
    assert ending.value.code == 0
    assert "--num_shards N" in capsys.readouterr().out


def test_an_unknown_command_is_answered_with_the_nearest_and_all_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["veriy", "DATA"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "error: there is no command 'veriy'; did you mean verify? commands: doctor, plan, "
    )
    assert all(command in said for command in COMMANDS)


def test_without_a_command_the_list_is_shown_and_the_code_is_that_of_a_wrong_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 2
    assert "train_tokenizer" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("shardprep 0.")


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["plan"], "shardprep plan"),
        (["shard", "--shard_id", "0"], "shardprep shard"),
        (["--shard_id", "0"], "shardprep shard"),
        (["train-tokenizer", "--input-dir", "x", "--output-dir", "y"], "shardprep train_tokenizer"),
        (["status", "DATA"], "shardprep status"),
        (["stage", "DATA", "--to", "x"], "shardprep stage"),
        (["lustre", "show", "DATA"], "shardprep lustre show"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_usage_shows_the_name_under_which_a_command_was_called(
    capsys: pytest.CaptureFixture[str], words: list[str], usage: str
) -> None:
    with pytest.raises(SystemExit) as ending:
        main([*words, "--frobnicate"])
    assert ending.value.code == 2
    said = capsys.readouterr().err
    assert f"\nusage: {usage} " in said
    assert "unrecognized arguments: --frobnicate" in said


LIST_LOADED = f"""
import sys
from shardprep.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
found = [name for name in {HEAVY} if name in sys.modules]
sys.exit(f"loaded: {{found}}" if found else 0)
"""


@pytest.mark.processes
@pytest.mark.parametrize("words", ["--help", "veriy", "run --help", "submit --help"])
def test_help_loads_nothing_large(words: str) -> None:
    run_child([sys.executable, "-c", LIST_LOADED, *words.split()])


@pytest.mark.processes
def test_in_a_folder_with_a_preprocess_py_python_m_shardprep_names_it(tmp_path: Path) -> None:
    (tmp_path / "preprocess.py").write_text("raise SystemExit('the old script was run')\n")
    command = [sys.executable, "-m", "shardprep", "verify", "DATA"]
    done = run_child(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, code=2)
    assert done.stderr.startswith(
        f"error: {tmp_path / 'preprocess.py'} hides shardprep's package of the same"
    )
    assert done.stderr.count("\n") == 1


def test_each_flag_with_a_value_says_its_default() -> None:
    for command, package in COMMANDS.items():
        program = importlib.import_module(f"{package}.__main__").PROGRAM
        for word in program.commands if package == command else [command]:
            parser = program._parser([word], "shardprep")[1][word]
            for action in parser._actions:
                is_shown = action.option_strings and action.help not in (None, argparse.SUPPRESS)
                if is_shown and action.nargs != 0 and not action.required:
                    assert "default" in action.help, f"{command} {word} {action.option_strings[-1]}"


def test_who_uses_a_removed_flag_or_command_is_told_what_to_do_instead(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And no flag that is told to be gone is there."""
    helps = "".join(text for _, text in command_reference.helps())
    for name, instead in removed.FLAGS.items():
        *of_command, flag = name.split()
        with pytest.raises(SystemExit) as ending:
            main([*(of_command or ["report"]), "DATA", f"{flag}=x"])
        assert ending.value.code == 2
        assert instead in capsys.readouterr().err
    assert not re.findall(rf"^  (?:-. \S+, )?({'|'.join(removed.FLAGS)})\b", helps, re.MULTILINE)
    for command, instead in removed.COMMANDS.items():
        assert main([command]) == 2
        assert instead in capsys.readouterr().err
        assert command not in COMMANDS
