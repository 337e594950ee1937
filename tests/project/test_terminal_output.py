"""No command sends a control character of a name, a text or a message to the terminal.

Folders, files, sources, ids, texts and Slurm's words hold what retitles, clears or colours a terminal, rings
its bell, or turns the direction of text. In this process the functions that print are seen, in a child its
streams, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from preprocess.look.train_tokenizer import train_tokenizer
from shardprep.__main__ import main
from shardprep.console import printable
from shardprep.signals import STOP_SIGNALS
from tests.checkout import ROOT
from tests.slurm.fake_slurm import QUEUES, install_fake_slurm, submitted, write_log
from tests.waiting import HANG_S

if TYPE_CHECKING:
    from tests.conftest import Prep

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\r\x7f\u202e\u2066\u2028\x00"
IN_NAMES = HOSTILE.replace("\x00", "")
TEXT = f"한국어 text {HOSTILE} stays\nshardprep-failure {{}}"
# Whatever may move a cursor, or is no character at all; ``\n`` is the end of a line that was meant.
CONTROLS = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

pytestmark = pytest.mark.processes


class Folders:
    def __init__(self, root: Path) -> None:
        self.raw = root / f"raw{IN_NAMES}"
        self.model = root / f"model{IN_NAMES}"
        self.data = root / f"data{IN_NAMES}"
        self.root = root

    @property
    def input_path(self) -> str:
        return f"source{IN_NAMES}/a{IN_NAMES}.jsonl"


@pytest.fixture(scope="module")
def folders(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    found = Folders(tmp_path_factory.mktemp("terminal"))
    train_tokenizer(input_dir=sample_dir, vocab_size=300, output_dir=found.model)
    path = found.raw / found.input_path
    path.parent.mkdir(parents=True)
    records = [{"text": f"{number} {TEXT}", "id": TEXT, "of": f"{number % 2}{TEXT}"} for number in range(40)]
    lines = [*map(json.dumps, records), json.dumps({TEXT: TEXT}), f"no JSON {IN_NAMES}"]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (found.raw / "b.txt").write_text(f"plain {IN_NAMES}\n", encoding="utf-8")
    options: dict[str, Any] = {
        "recursive": True,
        "id_field": "id",
        "source_field": "of",
        "max_bad_fraction": 0.5,
    }
    prep.plan(found.raw, found.data, num_shards=2, model_id=str(found.model), **options)
    prep.make(found.data)
    return found


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """A command in this process leaves its signal handlers, its CPUs and a logger's level behind."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    cpus, level = os.sched_getaffinity(0), logging.getLogger("loader").level
    yield
    logging.getLogger("loader").setLevel(level)
    os.sched_setaffinity(0, cpus)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Run a command in this process: (its exit code, what it printed)."""
    capsys.readouterr()
    try:
        code = main([str(word) for word in words])
    except SystemExit as ending:
        code = int(str(ending.code))
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def check(text: str, *, shows: str = r"\x1b[2J\x1b]0;title\x07\x9b31m\r\x7f\u202e\u2066\u2028") -> None:
    """Nothing moves a cursor, and what is foreign is shown all the same."""
    found = CONTROLS.search(text)
    assert found is None, text[max(0, found.start() - 80) : found.end() + 20]
    assert shows in text


COMMANDS: dict[str, tuple[int | None, list[Any]]] = {
    "plan": (0, ["plan", "--input_dir", "RAW", "--output_dir", "NEW", "--model_id", "MODEL",
                 "--num_shards", 2, "--recursive", "--dry_run"]),
    "run": (0, ["run", "COPY", "--num_proc", 1]),
    "shard": (0, ["--shard_id", 1, "--output_dir", "COPY"]),
    "too many bad documents": (65, ["--shard_id", 1, "--output_dir", "COPY", "--max_bad_fraction", 0]),
    "run where one fails": (65, ["run", "COPY", "--num_proc", 1, "--max_bad_fraction", 0]),
    "verify": (0, ["verify", "DATA"]),
    "verify what is broken": (66, ["verify", "COPY"]),
    "doctor": (None, ["doctor", "--no-torch", "--input_dir", "RAW", "--output_dir", "DATA",
                      "--model_id", "MODEL"]),
    "peek": (0, ["peek", "DATA", "--num", 50, "--chars", 0]),
    "export": (0, ["export", "DATA", "--to", "nanogpt", "--output_dir", "NEW"]),
    "clean": (0, ["clean", "COPY"]),
    "train_tokenizer": (0, ["train_tokenizer", "--input_dir", "RAW", "--output_dir", "NEW", "--recursive",
                            "--vocab_size", 280]),
    "report": (0, ["report", "DATA", "--json"]),
    "report into a file": (0, ["report", "DATA", "--output", "NEW"]),
    "status": (0, ["status", "DATA"]),
    "submit": (2, ["submit", "COPY", "--dry_run"]),
    "lustre": (0, ["lustre", "show", "DATA"]),
    "show": (0, ["-m loader", "DATA"]),
    "blank": (66, ["blank", "DATA", "--output", "NEW", "--ids", "no" + TEXT.replace("\0", "")]),
    "where nothing is": (66, ["where", "DATA", "--state", "no" + TEXT.replace("\0", "")]),
    "stage": (0, ["stage", "DATA", "--to", "NEW"]),
    "no such folder": (66, ["verify", "NEW"]),
    "no such file": (66, ["--shard_id", 1, "--output_dir", "COPY", "--input_dir", "NEW"]),
    "no such command": (2, [TEXT]),
    "a wrong value": (2, ["peek", "DATA", "--grep", f"({TEXT}"]),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_shows_control_characters_as_escapes(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:  # fmt: skip
    install_fake_slurm(tmp_path, monkeypatch)
    expected, words = COMMANDS[name]
    if words[0] in ("show", "-m loader", "where", "stage"):
        pytest.importorskip("torch", reason="the loader needs it")
    copy = tmp_path / f"copy{IN_NAMES}"
    if "COPY" in words:
        shutil.copytree(folders.data, copy)
        (copy / "shard-00001.json").unlink()
        (copy / ".shard-00000.tar.host-1-01234567.tmp").touch()
    places = {"RAW": folders.raw, "DATA": folders.data, "MODEL": folders.model, "COPY": copy}
    given = [places.get(word, tmp_path / f"new{IN_NAMES}" if word == "NEW" else word) for word in words]
    if given[0] == "-m loader":
        from loader.__main__ import main as loader_main

        capsys.readouterr()
        code = loader_main([str(word) for word in given[1:]])
        captured = capsys.readouterr()
        text = captured.out + captured.err
    else:
        code, text = said(capsys, *given)
    assert code == expected or expected is None, text
    check(text, shows=r"\x1b")
    assert not any(line.startswith("shardprep-failure {}") for line in text.splitlines())


def test_a_line_end_in_a_name_begins_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Else a file's name could write the line of a log by which status knows why a task failed."""
    code, text = said(capsys, "verify", '/no\nshardprep-failure {"shard_id": 0}')
    assert code == 66
    assert r'/no\nshardprep-failure {"shard_id": 0}' in text


def test_status_shows_what_a_log_and_slurm_say_as_escapes(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = install_fake_slurm(tmp_path, monkeypatch)
    data = Path(shutil.copytree(folders.data, tmp_path / "data"))
    for number in range(2):
        (data / f"shard-{number:05d}.json").unlink()
    submitted(data)
    queue = QUEUES["24.11.5"].replace("1|0|", "1|5|").replace("1|4|", "1|0|")  # task 0 waits, task 1 failed
    fake.answers("squeue", queue.replace("JobArrayTaskLimit", "Why\x1b[2J\x07\x9b31m"))
    write_log(data, "1_1.log", "begin\n\x1b[2J\x1b]0;title\x07\x9b31m\u202e the last line\n")
    code, text = said(capsys, "status", data)
    assert code == 0
    check(text, shows=r"    | \x1b[2J\x1b]0;title\x07\x9b31m\u202e the last line")
    assert r"waits for Why\x1b[2J\x07\x9b31m" in text


def test_what_programs_read_stays_json_and_has_each_character(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_slurm(tmp_path, monkeypatch)
    code, text = said(capsys, "status", folders.data, "--json")
    assert code == 0
    check(text, shows=r"\u001b")
    assert json.loads(text)["folder"] == str(folders.data)
    code, text = said(capsys, "doctor", "--no-torch", "--json", "--input_dir", tmp_path / IN_NAMES)
    assert code == 66
    check(text, shows=r"\u001b")
    assert any(IN_NAMES in finding["text"] for finding in json.loads(text)["findings"])


def test_korean_and_all_else_that_can_be_printed_stays_as_it_is(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = "한국어 é 👩\u200d👧 नमस्ते\u200c ไทย \\x1b \u00a0\u3000\ufeff"
    assert printable(kept) == kept
    assert printable("a\tb\nc\udc80") == r"a\tb\nc\udc80"
    _, text = said(capsys, "peek", folders.data, "--num", 50, "--chars", 0)
    assert "한국어 text " in text
    assert "\n  shardprep-failure {}" in text, "a line end of a text is one on the screen, behind two blanks"


# A command that does what none should: it prints past the functions, warns, logs, and ends in a traceback.
CARELESS = r"""
import logging, sys, warnings
from shardprep.command_line import Command, Program

def run(args):
    print("\x1b[2J printed")
    sys.stderr.write("\x9b31m written\n")
    warnings.warn("\x07 warned")
    logging.getLogger("loader").warning("\u202e logged")
    raise RuntimeError("\x1b]0;title\x07 raised")

words = {"go": Command(summary="go", add_flags=lambda parser: None, run=run)}
Program(name="x", description="y", commands=words).run(sys.argv[1:])
"""


def in_a_child(words: Sequence[Any], **settings: object) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=HANG_S,
        check=False,
        **settings,  # type: ignore[call-overload]
    )
    return done.returncode, done.stdout.decode()


def test_a_library_a_warning_a_log_line_and_a_traceback_reach_the_terminal_as_escapes() -> None:
    code, text = in_a_child(["-c", CARELESS, "go"])
    assert code == 1
    check(text, shows=r"\x1b]0;title\x07 raised")
    for words in (r"\x1b[2J printed", r"\x9b31m written", r"\x07 warned", r"\u202e logged", "Traceback"):
        assert words in text


def test_a_flag_that_does_not_exist_is_shown_with_escapes() -> None:
    code, text = in_a_child(["-m", "preprocess", "plan", f"--no{IN_NAMES}"])
    assert code == 2
    check(text)


def test_a_stream_that_cannot_say_korean_gets_escapes(folders: Folders) -> None:
    words = ["-m", "preprocess", "peek", folders.data]
    code, text = in_a_child(words, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert code == 0, text
    check(text, shows=r"\ud55c\uad6d\uc5b4 text \x1b[2J")


def test_a_bar_on_a_terminal_moves_the_cursor_and_no_line_beside_it_does(
    folders: Folders, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folders.data, tmp_path / f"copy{IN_NAMES}"))
    (copy / "shard-00000.json").unlink()
    text = on_a_terminal(["-m", "preprocess", "run", copy, "--num_proc", "1"])
    assert "\r" in text.replace("\r\n", "\n")
    check(text.replace("\r", "\n"))
    assert re.search(r"shard 00000 of 2: .*\\x1b\[2J", text), "its line stands beside the bar"


def test_the_screen_of_a_watched_status_has_only_the_codes_that_draw_it(
    folders: Folders, tmp_path: Path
) -> None:
    text = on_a_terminal(["-m", "slurm", "status", folders.data, "--watch"])
    drawn = re.sub(r"\x1b\[[HJK]", "", text.replace("\r\n", "\n"))
    assert drawn != text
    check(drawn, shows=r"\x1b")


def on_a_terminal(words: Sequence[str | Path]) -> str:
    """What a child writes that has a terminal, of 400 columns; in blanks and letters, it ends well."""
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "400"},
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
    ) as child:
        os.close(slave)
        parts = []
        with contextlib.suppress(OSError):  # EIO: nobody has the other end any more
            while part := os.read(master, 1 << 16):
                parts.append(part)
    os.close(master)
    text = b"".join(parts).decode()
    assert child.returncode == 0, text
    return text
