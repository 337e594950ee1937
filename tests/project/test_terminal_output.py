"""No command prints control characters from names, texts or messages to the terminal. Also bars and logs.

Folders, files, sources, ids, texts and messages of Slurm contain characters that change the title, clear or
colour the terminal, ring its bell, or change the direction of text.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.children import run_child, shardprep
from tests.slurm.fake_slurm import QUEUES, Desk, install_fake_slurm
from tests.world import World, call_main, tokenizer_dir

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\r\x7f\u202e\u2066\u2028\x00"
IN_NAMES = HOSTILE.replace("\x00", "")
TEXT = f"한국어 text {HOSTILE} stays\nshardprep-failure {{}}"
IN_WORDS = "no" + TEXT.replace("\0", "")
# Characters that may move the cursor, and surrogates. ``\n`` is allowed, as the end of a line.
CONTROLS = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A data set with hostile names and texts. Never written to."""
    root = tmp_path_factory.mktemp("terminal")
    model = Path(shutil.copytree(tokenizer_dir(), root / f"model{IN_NAMES}"))
    world = World(root, tokenizer=model, raw_dir=root / f"raw{IN_NAMES}", data_dir=root / f"data{IN_NAMES}")
    records = [{"text": f"{number} {TEXT}", "id": TEXT, "of": f"{number % 2}{TEXT}"} for number in range(40)]
    lines = [*map(json.dumps, records), json.dumps({TEXT: TEXT}), f"no JSON {IN_NAMES}"]
    world.raw({
        f"source{IN_NAMES}/a{IN_NAMES}.jsonl": "".join(f"{line}\n" for line in lines),
        "b.txt": f"plain {IN_NAMES}\n",
    })  # fmt: skip
    options = {"recursive": True, "id_field": "id", "source_field": "of", "max_bad_fraction": 0.5}
    return world.plan(num_shards=2, **options).run()


def check(text: str, *, shows: str = r"\x1b[2J\x1b]0;title\x07\x9b31m\r\x7f\u202e\u2066\u2028") -> None:
    """Check that a text has no control characters, and that they are shown as escapes."""
    found = CONTROLS.search(text)
    assert found is None, text[max(0, found.start() - 80) : found.end() + 20]
    assert shows in text


COMMANDS: dict[str, tuple[int | None, list[Any]]] = {
    "plan": (0, ["plan", "--input_dir", "RAW", "--output_dir", "NEW", "--model_id", "MODEL",
                 "--num_shards", 2, "--recursive"]),
    "run": (0, ["run", "COPY", "--num_proc", 1, "--verbose"]),
    "shard": (0, ["--shard_id", 1, "--output_dir", "COPY"]),
    "too many bad documents": (65, ["--shard_id", 1, "--output_dir", "COPY", "--max_bad_fraction", 0]),
    "run with a failing shard": (65, ["run", "COPY", "--num_proc", 1, "--max_bad_fraction", 0]),
    "verify": (0, ["verify", "DATA"]),
    "verify a broken data set": (66, ["verify", "COPY"]),
    "doctor": (None, ["doctor", "--output_dir", "DATA", "--model_id", "MODEL"]),
    "peek": (0, ["peek", "DATA", "--num", 50, "--chars", 0]),
    "export": (0, ["export", "DATA", "--to", "nanogpt", "--output_dir", "NEW"]),
    "clean": (0, ["clean", "COPY"]),
    "train_tokenizer": (0, ["train_tokenizer", "--input_dir", "RAW", "--output_dir", "NEW", "--recursive",
                            "--vocab_size", 280]),
    "report": (0, ["report", "DATA", "--json"]),
    "report into a file": (0, ["report", "DATA", "--output", "NEW"]),
    "status": (0, ["status", "DATA"]),
    "status for programs": (0, ["status", "DATA", "--json"]),
    "submit": (2, ["submit", "COPY", "--dry_run"]),
    "lustre": (0, ["lustre", "show", "DATA"]),
    "where without a state": (66, ["where", "DATA", "--state", IN_WORDS]),
    "stage": (0, ["stage", "DATA", "--to", "NEW"]),
    "no such folder": (66, ["verify", "NEW"]),
    "no such file": (66, ["--shard_id", 1, "--output_dir", "COPY", "--input_dir", "NEW"]),
    "no such command": (2, [TEXT]),
    "a wrong value": (2, ["peek", "DATA", "--grep", f"({TEXT}"]),
    "a line end in a name": (66, ["verify", f'/no{IN_NAMES}\nshardprep-failure {{}}']),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_shows_control_characters_as_escapes(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """No name may begin a line, or it could forge the line from which status reads why a task failed."""
    install_fake_slurm(tmp_path, monkeypatch)
    code, words = COMMANDS[name]
    copy = tmp_path / f"copy{IN_NAMES}"
    if "COPY" in words:
        shutil.copytree(world.data_dir, copy)
        (copy / "shard-00001.json").unlink()
        (copy / ".shard-00000.tar.host-1-01234567.tmp").touch()
    places = {"RAW": world.raw_dir, "DATA": world.data_dir, "MODEL": world.tokenizer, "COPY": copy}
    places["NEW"] = tmp_path / f"new{IN_NAMES}"
    ended = call_main(*(places.get(word, word) for word in words))
    assert code in (ended.code, None), ended.text
    check(ended.text, shows=r"\u001b" if "--json" in words else r"\x1b")
    if name == "status for programs":
        assert json.loads(ended.out)["folder"] == str(world.data_dir), "JSON keeps all characters"
    assert not any(line.startswith("shardprep-failure {}") for line in ended.text.splitlines())


def test_status_escapes_control_characters_of_logs_and_slurm(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = world.copy(tmp_path, but=["shard-*.json"]).data_dir
    desk = Desk(data=data, place=install_fake_slurm(tmp_path, monkeypatch))
    desk.submitted()
    queue = QUEUES["24.11.5"].replace("1|0|", "1|5|").replace("1|4|", "1|0|")  # task 0 waits, task 1 failed
    desk.answers("squeue", queue.replace("JobArrayTaskLimit", "Why\x1b[2J\x07\x9b31m"))
    desk.log("1_1.log", "begin\n\x1b[2J\x1b]0;title\x07\x9b31m\u202e the last line\n")
    ended = call_main("status", data).ends(0, r"Why\x1b[2J\x07\x9b31m")
    check(ended.text, shows=r"\x1b[2J\x1b]0;title\x07\x9b31m\u202e the last line")


def test_korean_and_other_printable_characters_are_printed_unchanged(tmp_path: Path) -> None:
    kept = "한국어 é 👩\u200d👧 नमस्ते\u200c ไทย \\x1b \u00a0\u3000\ufeff"
    ended = call_main("verify", tmp_path / f"{kept}\t|\udc80")
    assert ended.code in (2, 66)
    assert rf"{kept}\t|\udc80" in ended.err


# A command that prints directly, warns, logs, and ends in a traceback.
CARELESS = r"""
import logging, sys, warnings
from shardprep.__main__ import main
import preprocess.__main__

def run(*args, **kwargs):
    print("\x1b[2J printed")
    sys.stderr.write("\x9b31m written\n")
    warnings.warn("\x07 warned")
    logging.getLogger("loader").warning("\u202e logged")
    raise RuntimeError("\x1b]0;title\x07 raised")

import os
os.scandir = os.listdir = os.stat = run  # as if a library were broken
main(["verify", sys.argv[1]])
"""


def test_output_warnings_logs_and_tracebacks_of_libraries_are_escaped(tmp_path: Path) -> None:
    done = run_child([sys.executable, "-c", CARELESS, tmp_path], code=1)
    text = done.stdout + done.stderr
    check(text, shows=r"\x1b]0;title\x07 raised")
    for words in (r"\x1b[2J printed", r"\x9b31m written", r"\x07 warned", r"\u202e logged", "Traceback"):
        assert words in text


def test_a_stream_that_cannot_encode_korean_gets_escapes(world: World) -> None:
    done = run_child(shardprep("peek", world.data_dir), env={**os.environ, "PYTHONIOENCODING": "ascii"})
    check(done.stdout, shows=r"\ud55c\uad6d\uc5b4 text \x1b[2J")


def test_a_log_gets_progress_lines_with_percentage_and_speed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances by a minute at each reading."""
    data = world.copy(tmp_path).data_dir
    real, minutes = time.monotonic, iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: real() + 60.0 * next(minutes))
    ended = call_main("verify", data)
    lines = re.findall(r"\b(\d+)% of (\d+) shards, [\d.]+ shards/s", ended.err)
    assert lines, ended.text
    assert {total for _, total in lines} == {"2"}


def on_a_terminal(columns: int, *words: object) -> str:
    """Run a command on a terminal of this width and return its output."""
    parts: list[bytes] = []

    def read(screen: int) -> bytes:
        parts.append(os.read(screen, 1 << 16))
        return parts[-1]

    status = pty.spawn(["env", f"COLUMNS={columns}", *shardprep(*words)], read)
    text = b"".join(parts).decode()
    assert status == 0, text
    return text


def test_status_watch_prints_only_the_control_codes_that_redraw_the_screen(world: World) -> None:
    text = on_a_terminal(400, "status", world.data_dir, "--watch")
    drawn = re.sub(r"\x1b\[2?[HJK]", "", text.replace("\r\n", "\n"))
    assert drawn != text
    check(drawn, shows=r"\x1b")


def test_on_a_terminal_a_progress_bar_has_79_columns_and_is_removed_at_the_end(world: World) -> None:
    shown = on_a_terminal(120, "verify", world.data_dir)
    bars = re.findall(r"\r([^\r\n]*)", shown)
    assert any(bar.startswith("verifying:   0% |") for bar in bars), shown
    assert max(len(bar) for bar in bars if "|" in bar) == 79
    assert re.search(r"\r *\rverified ", shown), "the bar is removed before the last line"


def test_on_a_narrow_terminal_progress_is_a_percentage_and_a_time_without_a_bar(world: World) -> None:
    shown = on_a_terminal(40, "verify", world.data_dir)
    lines = [line for line in re.findall(r"\r([^\r\n]*)", shown) if "%" in line]
    assert lines, shown
    for line in lines:
        assert re.fullmatch(r"verifying: +\d+%, [\d:?]+ left *", line), line
        assert len(line) < 40
    result = re.search(r"(verified 2 shards: .*?  )tokens; ", shown)
    assert result, "results are broken between words, too"
    assert len(result[1]) == 40


def test_on_a_terminal_json_has_no_blanks_that_break_its_strings(world: World) -> None:
    shown = on_a_terminal(40, "status", world.data_dir, "--json")
    assert json.loads(shown)["folder"] == str(world.data_dir)


def test_progress_counts_whole_shards(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances by a minute at each reading, so each step prints a line."""
    data = world.copy(tmp_path, but=["shard-*.json"]).data_dir
    real, minutes = time.monotonic, iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: real() + 60.0 * next(minutes))
    ended = call_main("run", data, "--num_proc", 1)
    assert set(re.findall(r"(\d) of 2 shards: \d+% of", ended.err)) == {"0", "1"}, ended.text


def test_run_and_status_show_the_same_rate(world: World, tmp_path: Path) -> None:
    data = world.copy(tmp_path, but=["shard-*.json"]).data_dir
    of_run = re.search(r"([\d.]+ k?) ?tokens/s\)", call_main("run", data, "--num_proc", 1).err)
    of_status = re.search(r"([\d.]+ k?) ?tokens/s from", call_main("status", data).out)
    assert of_run
    assert of_status
    assert of_run[1] == of_status[1]


def test_a_terminal_breaks_a_message_between_words_and_a_copy_of_it_has_no_line_end(world: World) -> None:
    shown = on_a_terminal(20, "run", world.data_dir).replace("\r\n", "\n")
    assert shown.endswith("2 of 2 shards are   done already\n"), "the terminal begins a row with: done"
