"""Flags are PrepConfig's fields, and a mistyped one is a usage error that says what was expected."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loader.__main__
import lustre.__main__
import preprocess.__main__
import slurm.__main__
from preprocess.__main__ import num_processes, parse_ids
from preprocess.make.task import array_note
from shardprep import command_line
from shardprep.command_line import Command, Program, given_of, needs, parse_size
from shardprep.errors import UsageError
from shardprep.format.options import PrepConfig
from tests.checkout import ROOT
from tests.conftest import Prep


def test_dashes_and_underscores_in_a_flag_are_the_same() -> None:
    for argv in (
        ["--shard_id", "3", "--output_dir=/a-b_c", "--no-keep_text", "--seq-len", "8", "--input-dir=x"],
        ["--shard-id", "3", "--output-dir=/a-b_c", "--no_keep_text", "--seq_len=8", "--input_dir", "x"],
    ):
        args = parse(argv)
        assert (args.command, args.shard_id) == ("shard", 3)
        assert given_options(args) == {
            "output_dir": Path("/a-b_c"), "keep_text": False, "seq_len": 8, "input_dir": Path("x")
        }  # fmt: skip
    assert given_options(parse(["plan"])) == given_options(parse(["--shard_id", "0"])) == {}


def parse(argv: list[str]) -> argparse.Namespace:
    return preprocess.__main__.PROGRAM.parse(preprocess.__main__.command_words(argv))


def loader_parse(argv: list[str]) -> argparse.Namespace:
    return loader.__main__.PROGRAM.parse(loader.__main__.command_words(argv))


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    return given_of(args, PrepConfig)


slurm_parse = slurm.__main__.PROGRAM.parse
PARSE: dict[str, Callable[[list[str]], argparse.Namespace]] = {
    "preprocess": parse,
    "slurm": slurm_parse,
    "lustre": lustre.__main__.PROGRAM.parse,
    "loader": loader_parse,
}

# Flags of several words of every command of every package, each once with its value.
FLAGS = [
    "preprocess verify O --fast", "preprocess plan --num_shards=2 --max_bad_fraction=1",
    "preprocess run O --num_proc=2 --memory_gb=1 --writer_batch_size=2",
    "preprocess train_tokenizer --input_dir=x --vocab_size=600 --output_dir=T",
    "preprocess --shard_id=0 --no-keep_text",
    "slurm submit O --dry_run --cpus_per_task=2 --mem_gb=1 --time_min=3",
    "slurm retry O --max_attempts=2 --shards_per_task=2 --max_parallel=3", "slurm status O --json",
    "lustre show O", "lustre apply O --stripe=8 --dry_run",
    "loader O --batch_size=2 --num_workers=0 --model_id=m --max_length=3",
    "loader stage O --to=D",
]  # fmt: skip


@pytest.mark.parametrize("line", FLAGS)
def test_every_command_takes_dashes_for_underscores(line: str) -> None:
    package, *words = line.split()
    read = PARSE[package]
    dashed = [re.sub(r"^--[a-z_]+", lambda flag: flag[0].replace("_", "-"), word) for word in words]
    assert dashed != words or not any("_" in word for word in words)
    assert read(dashed) == read(words)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (parse, ["verify", "O", "--quick"]),
        (parse, ["run", "O", "--num_shards", "3"]),
        (slurm_parse, ["status", "O", "--partition", "cpu"]),
        (slurm_parse, ["cancel", "O", "--all"]),
        (lustre.__main__.main, ["show", "O", "--dry_run"]),
    ],
)
def test_an_unknown_flag_prints_the_usage_of_its_own_command(
    command: Callable[[list[str]], object], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        command(words)
    assert ending.value.code == 2
    said = capsys.readouterr().err
    assert f"unrecognized arguments: {words[2]}" in said
    assert re.search(rf"^usage: python -m \w+ {words[0]} ", said, re.MULTILINE)
    assert said.count("\n") <= 4


def test_every_option_is_a_flag_with_a_help_text_and_a_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        parse(["plan", "--help"])
    assert ending.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for item in dataclasses.fields(PrepConfig):
        if not item.metadata["help"]:
            assert not re.search(rf"--{item.name}[ ,]", text), "planning finds it out"
            continue
        assert re.search(rf"--{item.name}[ ,]", text), item.name
        assert re.search(re.escape(item.metadata["help"]) + r" \(default: \S", text), item.name


def test_sizes_are_binary_and_what_is_no_size_is_refused() -> None:
    sizes = {"1": 1, "512M": 512 << 20, "2G": 2 << 30, "3k": 3 << 10, "1TiB": 1 << 40, " 5MB ": 5 << 20}
    assert {text: parse_size(text, "--shard_bytes") for text in sizes} == sizes
    for text in ("", "M", "1.5G", "-1", "1P", "1 0"):
        with pytest.raises(UsageError, match="expected a number of bytes such as 512M"):
            parse_size(text, "--shard_bytes")


def test_ids_come_in_order_and_once_and_none_past_the_plan() -> None:
    assert parse_ids("0-2,5", 9) == [0, 1, 2, 5]
    assert parse_ids("8, 5-6,6-7", 9) == [5, 6, 7, 8]
    for text in ("", "9", "0-9", "a", "1-", "-1", "1,,2"):
        with pytest.raises(UsageError, match="expected ids of 0 to 8, such as 8"):
            parse_ids(text, 9)


def test_the_environment_gives_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATASET_NUM_PROC", raising=False)
    assert num_processes(argparse.Namespace(num_proc=None), 6, 64.0) == 6
    assert num_processes(argparse.Namespace(num_proc=None), 6, 1.0) == 2, "memory for two"
    monkeypatch.setenv("DATASET_NUM_PROC", "3")
    assert num_processes(argparse.Namespace(num_proc=None), 6, 64.0) == 3
    assert num_processes(argparse.Namespace(num_proc=5), 6, 64.0) == 5, "what is given wins"
    for wrong in ("0", "-1", "many", "1.5"):
        monkeypatch.setenv("DATASET_NUM_PROC", wrong)
        with pytest.raises(UsageError, match=f"DATASET_NUM_PROC is '{wrong}' in the environment, expected"):
            num_processes(argparse.Namespace(num_proc=None), 6, 64.0)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "--shard_id"),
        (["--shard_id", "x"], "invalid int value"),
        (["plan", "--num_shards", "2", "--shard_bytes", "1M"], "not allowed with"),
        (["plan", "--record", "rows"], "invalid choice"),
        (
            ["plan", "--encodeing", "utf-8"],
            "unrecognized arguments: --encodeing utf-8; did you mean --encoding?",
        ),
        (["plan", "--input", "raw"], "unrecognized arguments: --input raw; did you mean --input_dir?"),
        (["veriy", "DATA"], "there is no command 'veriy'; did you mean verify? commands: plan, run, verify,"),
        (
            ["plan", "raw", "data"],
            "unrecognized arguments: raw data; plan takes folders by their flags: --input_dir, ",
        ),
        (["--shard_id", "0", "data"], "shard takes folders by their flags: --input_dir, --output_dir"),
        (
            ["/", "--shard_id", "0"],
            "it is a folder, so type a command before it, or --output_dir; commands: plan,",
        ),
        (["frobnicate"], "there is no command 'frobnicate'; commands: plan, run, verify, "),
    ],
    ids=str,
)
def test_a_mistyped_command_ends_with_2_and_names_the_mistake(
    prep: Prep, argv: list[str], named: str
) -> None:
    ended = prep.command(*argv)
    assert ended.code == 2
    assert any(part in ended.text for part in named.split("|"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 8}, "--seq_len is for packed rows; add --record packed"),
        ({"record": "packed", "keep_text": True}, "--keep_text is for documents"),
        ({"record": "packed", "seq_len": 0}, "--seq_len is 0, expected 1 to "),
        ({"max_bad_fraction": 1.5}, r"--max_bad_fraction is 1\.5, expected 0 to 1"),
        ({"record": "rows"}, "--record is 'rows', expected one of documents, packed"),
        ({"encoding": "utf-7"}, "--encoding utf-7 is neither a superset of ASCII.*iconv"),
        ({"encoding": "cp037"}, "--encoding cp037 is neither a superset of ASCII"),
        ({"encoding": "iso2022_kr"}, "--encoding iso2022_kr is neither"),
        ({"encoding": "unicode_escape"}, "--encoding unicode_escape is neither"),
        ({"encoding": "nothing"}, "--encoding 'nothing' is no text encoding of Python"),
        ({"encoding": "rot13"}, "--encoding 'rot13' is no text encoding of Python"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PrepConfig(**options)  # type: ignore[arg-type]


def test_names_of_one_encoding_are_one_option() -> None:
    assert {PrepConfig(encoding=name).encoding for name in ("UTF8", "utf-8", "u8", "utf_8")} == {"utf-8"}
    assert PrepConfig(encoding="EUC-KR").encoding == "euc_kr"


def array(first: int, last: int, step: int = 1, count: int | None = None) -> dict[str, str]:
    size = len(range(first, last + 1, step)) if count is None else count
    numbers = {"MIN": first, "MAX": last, "STEP": step, "COUNT": size}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in numbers.items()}


@pytest.mark.parametrize(
    ("environ", "left"),
    [
        (array(0, 9), "10-11"),
        (array(2, 11), "0-1"),
        (array(0, 11, 5), "1-4,6-9,11"),
        (array(0, 11), None),
        (array(0, 99), None),
        (array(1, 7, 1, count=3), None),
        ({}, None),
        ({"SLURM_ARRAY_TASK_MIN": "0"}, None),
    ],
    ids=str,
)
def test_an_array_smaller_than_the_plan_says_what_it_leaves_out(
    environ: dict[str, str], left: str | None
) -> None:
    note = array_note(environ, 12, Path("DATA"))
    if left is None:
        assert note is None
        return
    assert note is not None
    assert f"leaves out shards {left}; to make them: shardprep submit {Path('DATA').absolute()}" in note


@pytest.mark.parametrize("path", [None, "/data/x"])
def test_an_error_of_the_system_that_no_stage_expects_is_a_line_and_74(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), *([path] if path else []))

    command = Command(summary="", add_flags=lambda _: None, run=fail)
    monkeypatch.setattr(command_line, "raise_on_stop_signals", lambda: None)
    assert Program(name="x", description="", commands={"fail": command}).run(["fail"]) == 74
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path}: Input/output error" if path else "error: Input/output error")
    assert "at test_command_line.py:" in said
    assert "run this again" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("of_ours", [False, True])
def test_a_library_that_is_not_installed_is_named_and_a_fault_of_ours_is_not_hidden(
    of_ours: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "shardprep.no_such_module" if of_ours else "no_such_library.of_it"

    def run(_: argparse.Namespace) -> int:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    command = Command(summary="needs it", add_flags=lambda _: None, run=run)
    program = Program(name="program", description="", commands={"go": command})
    if of_ours:
        with pytest.raises(ModuleNotFoundError):
            program.run(["go"])
        return
    assert program.run(["go"]) == UsageError.exit_code
    said = capsys.readouterr().err
    assert "needs no_such_library, which is not installed; run: pip install no_such_library" in said


def test_a_number_of_24_digits_and_a_nul_are_usage_errors(
    prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    flags = ["plan", "--input_dir", sample_dir, "--output_dir", tmp_path / "data"]
    ended = prep.command(*flags, "--model_id", prep.model_dir, "--limit", "9" * 24)
    assert ended.code == 2, ended.text
    assert f"--limit is {'9' * 24}, expected 1 to {2**63 - 1}" in ended.text
    for words in ([*flags, "--model_id", "a\0b"], ["run", "a\0b"], ["verify", "a\0b"], ["a\0b"]):
        ended = prep.command(*words)
        assert ended.code == 2, ended.text
        assert "'a\\x00b' holds a NUL" in ended.text
    for name in ("model_id", "text_field", "id_field", "also", "input_dir", "output_dir"):
        with pytest.raises(UsageError, match=rf"--{name} is 'a\\x00b', which holds a NUL"):
            PrepConfig(**dict[str, Any]({name: "a\0b"}))
    with pytest.raises(UsageError, match=r"--id_field is .* not UTF-8"):
        PrepConfig(id_field="\udcff")
    assert not (tmp_path / "data").exists()


def test_a_missing_library_is_answered_with_the_extra_that_brings_it() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = project.partition("[project.optional-dependencies]\n")[2].partition("\n\n")[0].splitlines()
    found = [(line.partition(" ")[0], name) for line in extras for name in re.findall(r'"(\w+)>', line)]
    assert len(found) > 6
    for extra, library in found:
        line = f"this needs {library}, which is not installed; run: pip install 'shardprep[{extra}]'"
        assert needs("this", library) == line
