"""The command line of ``shardprep``: help, flags, and errors for mistyped commands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from loader import ensure_prepared
from shardprep import meanings
from shardprep.__main__ import COMMANDS
from shardprep.errors import UsageError
from tests import command_reference
from tests.children import run_child
from tests.world import World, call_main, refuses, tokenizer_dir

HEAVY = ("numpy", "torch", "tokenizers", "transformers", "orjson", "tqdm", "webdataset")


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """Command -> its help, including the commands of lustre."""
    return dict(command_reference.helps())


def test_help_lists_all_commands_and_is_the_usage_error_without_a_command() -> None:
    shown = call_main("--help").out
    assert [line.split()[0] for line in shown.splitlines() if line[:2] == "  "] == list(COMMANDS)
    assert call_main("help").out == shown
    assert shown in call_main().ends(2).err
    assert call_main("--version").ends(0).out.startswith("shardprep 0.")
    (of_plan,) = {call_main(*words.split()).out for words in ("help plan", "plan --help", "plan -h")}
    assert "--num_shards N" in of_plan


def test_help_fits_into_80_columns(helps: dict[str, str]) -> None:
    for title, text in helps.items():
        assert max(map(len, text.splitlines())) < 80, title


def test_each_flag_has_a_documented_default_or_is_required(helps: dict[str, str]) -> None:
    num_flags = 0
    for title, text in helps.items():
        usage, _, rest = text.partition("\n\n")
        for flag in re.findall(r"^  (-(?:.*\n)(?: {5,}.*\n)*)", rest, re.MULTILINE):
            name = flag.split()[0].rstrip(",")
            assert "default" in flag or name == "-h" or f" {name} " in usage, f"{title}: {flag}"
            num_flags += 1
    assert num_flags > 60


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag_prints_the_usage_of_its_command(command: str) -> None:
    name = "lustre show" if command == "lustre" else command
    for flag in ("--frob_nicate", "--frob-nicate"):
        call_main(*name.replace("_", "-").split(), flag).ends(2, "error:", f"usage: shardprep {name}")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("frobnicate", "plan"),
        ("--shard_id x", "--shard_id"),
        ("plan --encodeing utf-8", "--encoding"),
        ("plan raw data", "--input_dir"),
        ("shard --shard_id 0 data", "--output_dir"),
        ("/ --shard_id 0", "--output_dir"),
        *((f"run DATA --shards={ids}", "0 to 2") for ids in ("a", "1-", "2-1", "", "3")),
        *((f"plan PLAN --shard_bytes {size}", "--shard_bytes") for size in ("M", "1.5G", "-1", "1P", "0")),
        *((f"run DATA --memory_gb={gb}", "--memory_gb") for gb in ("nan", "-1", "0")),
        ("plan PLAN --limit " + "9" * 24, "--limit"),
        *((f"plan PLAN --{name} a\0b", r"'a\x00b'") for name in ("text_field", "id_field", "model_id")),
        ("run a\0b", r"a\x00b"),
        ("verify a\0b", r"a\x00b"),
        ("a\0b", r"a\x00b"),
        ("plan PLAN --id_field \udcff", "--id_field"),
    ],
    ids=repr,
)  # fmt: skip
def test_a_mistyped_command_ends_with_2_and_names_the_flag(
    world: World, tmp_path: Path, words: str, named: str
) -> None:
    (world.data_dir / "shard-00000.json").unlink()  # so that run has something to do
    plan = " ".join(world.words_of_plan(output_dir=tmp_path / "new"))
    words = words.replace("DATA", str(world.data_dir)).replace("PLAN", plan)
    call_main(*words.split(" ")).ends(2, named)
    assert not (tmp_path / "new").exists()


def test_flags_accept_dashes_for_underscores_and_sizes_are_binary(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a-b_c.txt": "a line\n" * 900})
    plans = []
    for number, (mark, size) in enumerate((("_", "2048"), ("-", "2K"), ("_", "2KiB"), ("-", " 2kb "))):
        data = tmp_path / f"data-{number}_x"
        words = [f"--input{mark}dir={world.raw_dir}", f"--output{mark}dir", data, f"--no-keep{mark}text"]
        call_main("plan", *words, f"--model{mark}id", tokenizer_dir(), f"--shard{mark}bytes", size).ends(0)
        plans.append((data / "plan.json").read_bytes())
    assert len(set(plans)) == 1


@pytest.mark.processes
def test_lists_of_shard_ids_accept_ranges_and_repetitions(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "a line\n" * 90}).plan(num_shards=9)
    assert world.main("run", world.data_dir, shards="8, 5-6,6-7", num_proc=1).code == 0
    assert sorted(path.stem[-1] for path in world.data_dir.glob("*.tar")) == ["5", "6", "7", "8"]


LIST_LOADED = f"""
import sys
from shardprep.__main__ import main
for words in ("--help", "veriy", "run --help", "submit --help"):
    try:
        main(words.split())
    except SystemExit:
        pass
found = [name for name in {HEAVY} if name in sys.modules]
sys.exit(f"loaded: {{found}}" if found else 0)
"""


@pytest.mark.processes
def test_help_imports_no_large_library() -> None:
    run_child([sys.executable, "-c", LIST_LOADED])


# What is typed -> words of the hint.
HINTS = {
    "run --tokenizer T": "plan --model_id",
    "plan --tokenizer T": "use --model_id",
    "plan --workers 4": "run DATA --num_proc",
    "run DATA --workers 4": "use --num_proc",
    "run DATA --num_workers=4": "use --num_proc",
    "submit DATA --workers 4": "--cpus_per_task",
    "plan --force": "new --output_dir",
    "run DATA --force": "--again",
    "plan --packed": "--record packed",
    "plan --packing": "--record packed --seq_len",
    "plan --max_length 2048": "max_length=",
    "run DATA --seq_len 8": "plan --record packed --seq_len",
    "plan --text_column content": "use --text_field",
    "plan --dataset allenai/c4": "hf download",
    "plan --output DATA": "use --output_dir",
    "plan --shards 4": "use --num_shards",
    "run DATA --shard 4": "use --shards",
    "run DATA --num_shards 4": "plan --num_shards",
    "export DATA --to nanogpt --output OUT": "use --output_dir",
    "overlap DATA --against E --output_dir OUT --out OUT": "use --output",
    "plan --recursive True": "takes no value",
    "verify --data DATA": "word without a flag",
    "submit DATA --qos long": "--sbatch_args '--qos=...'",
    "submit DATA -C fat": "--sbatch_args '-C ...'",
    "retry DATA -w node7": "--sbatch_args '-w ...'",
    "run DATA -w 4": "use --num_proc",
    "submit DATA --mail-user me": "--sbatch_args '--mail-user=...'",
    "submit DATA --exclusive": "--sbatch_args '--exclusive'",
    "submit DATA -M tail": "SLURM_CLUSTERS",
    "submit DATA -p long": "use --partition",
    "submit DATA --mem 4": "use --mem_gb",
    "run DATA --mem 4": "use --memory_gb",
    "status DATA --follow": "use --watch",
    "plan --seed 4": "seed=",
    "run DATA --resume": "goes on",
    "plan --dry-rum": "did you mean --dry_run?",
    "plan --forse": "",
    "plan --num_shard 3": "did you mean --num_shards?",
    "tokenize": "use run",
    "dedup": "use duplicates",
    "withdraw": "use blank",
}


@pytest.mark.parametrize("words", HINTS)
def test_a_flag_or_command_of_another_tool_is_refused_with_what_means_it_here(words: str) -> None:
    shown = call_main(*words.split()).ends(2).err.splitlines()[0]
    assert HINTS[words] in shown
    if not HINTS[words]:
        assert ";" not in shown, "no hint is better than a wrong one"


def test_each_hint_names_flags_and_commands_that_exist(helps: dict[str, str]) -> None:
    every = {"--repo", "--local", "--no"}  # of hf download, and of --no-NAME
    for text in helps.values():
        every |= set(re.findall(r"--(?:no-)?[a-z_]+", text.replace("[no-]", "")))
    every |= {f"--no-{flag[2:]}" for flag in every}
    num_hints = 0
    for meaning in meanings.FLAGS:
        num_hints += 1
        hints = " ".join((meaning.ours, meaning.otherwise, *meaning.of.values()))
        assert set(re.findall(r"--(?:no-)?[a-z_]+", hints)) <= every, meaning
        assert set(" ".join(meaning.of).split()) <= {*COMMANDS}, meaning
        assert len(set(meaning.typed.split())) == len(meaning.typed.split()), meaning
    assert num_hints > 60
    for command in meanings.COMMANDS:
        assert command in (*COMMANDS, "--version")


def test_output_dir_names_the_data_set_wherever_a_word_does(world: World, tmp_path: Path) -> None:
    data, num_commands = world.data_dir, 0
    more_of: dict[str, list[object]] = {
        "logs": ["0"], "report": ["--output", tmp_path / "r.html"], "where": ["--state", tmp_path / "no"],
        "stage": ["--to", tmp_path / "staged"],
    }  # fmt: skip
    for command in ("run", "verify", "peek", "status", "report", "clean", "logs", "where", "cancel", "stage"):
        more = more_of.get(command, [])
        as_word = call_main(command, data, *more)
        for flag in (["--output_dir", data], [f"--output-dir={data}"]):
            assert call_main(command, *more, *flag).code == as_word.code, command
        num_commands += as_word.code == 0
        assert "unrecognized" not in as_word.err
    assert num_commands >= 7
    call_main("run", data, "--output_dir", data).ends(2, "unrecognized")
    call_main("run").ends(2, "DATA")


def test_the_version_is_printed_for_both_flags() -> None:
    assert call_main("-V").ends(0).out == call_main("--version").out == call_main("plan", "--version").out


_PATHS = "input_dir|output_dir|output|exclude|transform|chat_template_file|ids|against|to|state"
PATH_FLAGS = re.compile(rf"^  (--(?:{_PATHS})) [A-Z]+\b", re.MULTILINE)


def test_an_empty_path_or_a_url_is_refused_by_every_command(
    helps: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unset variable would be the current folder, and a URL a new folder "s3:"."""
    monkeypatch.chdir(tmp_path)
    num_tried = 0
    for command, text in helps.items():
        words = command.split()
        given = [[*words, flag] for flag in PATH_FLAGS.findall(text)]
        positional = text.splitlines()[0].partition(f"{command} ")[2].partition(" ")[0]
        if positional in ("DATA", "PATH") and command not in ("where", "forecast"):  # may be a URL
            given.append(words)
        for each in given:
            for value in ("", " ", "s3://bucket/some", "HTTPS://host/a%20b", "file:///data/raw"):
                ended = call_main(*each, value)
                assert ended.code == 2, (each, value, ended.text)
                assert repr(value) in ended.err or value in ended.err, (each, value, ended.text)
                num_tried += 1
    assert num_tried > 150
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["plan", "--input_dir=s3://bucket/raw"], "aws s3 sync s3://bucket/raw FOLDER"),
        (["plan", "--input_dir", "hf://datasets/a/b"], "hf download a/b --repo-type dataset"),
        (["plan", "--input_dir", "https://huggingface.co/datasets/a/b"], "hf download a/b"),
        (["plan", "--output_dir", "gs://b/it's"], "rsync --recursive FOLDER"),
        (["verify", "file://host/data"], "such as /data"),
        (["plan", "--input_dir="], "is the variable set"),
    ],
)
def test_the_refusal_of_a_url_says_how_to_get_it_here(words: list[str], named: str) -> None:
    call_main(*words).ends(2, named)


@pytest.mark.parametrize("value", ["", "s3://bucket/some"])
def test_ensure_prepared_refuses_the_same_paths(value: str) -> None:
    with refuses(UsageError, found=f"output_dir {value or repr(value)}"):
        ensure_prepared(value, input_dir="raw", model_id="model")
    with refuses(UsageError, found=f"input_dir {value or repr(value)}"):
        ensure_prepared("data", input_dir=value, model_id="model")


@pytest.mark.processes
def test_bash_completes_commands_and_flags(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(World(tmp_path).main("completion", "bash").out)
    for words, expected in {
        "shardprep pe": "peek",
        "shardprep run --sh": "--shards",
        "shardprep lustre s": "show",
        "shardprep plan --record pa": "packed",
    }.items():
        ask = f"source {script}; COMP_WORDS=({words}); COMP_CWORD={words.count(' ')}; _shtab_shardprep"
        assert run_child(["bash", "-c", f"{ask}; echo ${{COMPREPLY[@]}}"]).stdout.split() == [expected]
