"""The environment of a command: closed pipes, full disks, locales, a user's preprocess.py, and signals.

``| head`` causes no traceback, and a shard is made even if the log cannot be written. File names are UTF-8 in
any locale. A user's own preprocess.py does not hide a package.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hatchling
import pytest

from loader import UsageError, get_llama3_dataloader
from shardprep.__main__ import main
from tests.checkout import ROOT
from tests.children import child, end_of, environ_of_children, is_living, run_child, shardprep
from tests.held_children import Hold
from tests.waiting import wait_until
from tests.world import World, call_main, tokenizer_dir

pytestmark = pytest.mark.long

COMMANDS = (
    "verify DATA",
    "status DATA",
    "lustre show DATA",
    "peek DATA",
    "plan --dry_run --num_shards 5 --output_dir NEW --input_dir RAW --model_id MODEL",
    "plan --help",
)


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    """The writing end of a pipe whose reading end is closed, so that the first write fails."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def run_into(number: int, words: str, world: World, *, is_buffered: bool) -> tuple[int, str]:
    """Run a command in this process with this descriptor as standard output. Returns exit code and stderr."""
    places = {"DATA": world.data_dir, "NEW": world.data_dir.with_name("new"), "RAW": world.raw_dir}
    places["MODEL"] = world.tokenizer
    err = io.StringIO()
    raw: Any = io.FileIO(os.dup(number), "w")
    out = io.TextIOWrapper(io.BufferedWriter(raw) if is_buffered else raw, write_through=not is_buffered)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stdout", "__stdout__"):  # equal when Python starts
            patch.setattr(sys, name, out)
        patch.setattr(sys, "stderr", err)
        try:
            code = main([str(places.get(word, word)) for word in words.split()])
        except SystemExit as ending:
            code = int(ending.code or 0)
    return code, err.getvalue()


@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_with_a_closed_output_pipe_ends_with_0(
    world: World, closed_pipe: int, words: str, is_buffered: bool
) -> None:
    """The write fails at the first line, or with buffering at the end."""
    code, said = run_into(closed_pipe, words, world, is_buffered=is_buffered)
    assert (code, "rror" in said) == (0, False), said
    assert (world.data_dir / "index.json").exists() or words != "verify DATA", "it has finished its work"


@pytest.mark.parametrize("words", COMMANDS[:3])
def test_output_that_is_lost_on_a_full_disk_is_an_error(world: World, words: str) -> None:
    with Path("/dev/full").open("w") as full:
        code, said = run_into(full.fileno(), words, world, is_buffered=True)
    assert code == 74
    assert "No space left on device" in said.splitlines()[-1]


@pytest.mark.processes
def test_a_process_with_a_closed_output_pipe_prints_no_error_at_exit(world: World, closed_pipe: int) -> None:
    """Python flushes its streams at exit, and could print "Exception ignored"."""
    words = shardprep("status", world.data_dir)
    assert run_child(words, env=environ_of_children(), stdout=closed_pipe).stderr == ""


@pytest.mark.processes
@pytest.mark.parametrize("log", ["closed pipe", "full disk", "closed terminal"])
def test_a_worker_whose_log_cannot_be_written_finishes_its_shard(
    world: World, closed_pipe: int, log: str
) -> None:
    """It prints before the work (a note about its array) and after it, and draws a bar on a terminal."""
    stderr = closed_pipe if log == "closed pipe" else os.open("/dev/full", os.O_WRONLY)
    if log == "closed terminal":
        master, stderr = os.openpty()
        os.close(master)
    (world.data_dir / "shard-00000.json").unlink()
    array = {"MIN": "0", "MAX": "0", "STEP": "1", "COUNT": "1"}
    environ = {f"SLURM_ARRAY_TASK_{name}": number for name, number in array.items()}
    words = shardprep("shard", "--shard_id", 0, "--output_dir", world.data_dir)
    run_child(words, env=environ_of_children(**environ), stderr=stderr)
    assert (world.data_dir / "shard-00000.json").exists()
    assert not list(world.data_dir.glob(".*"))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("charset", ["ASCII", "EUC-KR"])
def test_commands_make_the_same_plan_in_a_locale_that_is_not_utf8(tmp_path: Path, charset: str) -> None:
    environ = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if charset != "ASCII":
        path = tmp_path / "ko_KR.euckr"
        if localedef := shutil.which("localedef"):
            words = [localedef, "-c", "-i", "ko_KR", "-f", charset, str(path)]
            subprocess.run(words, capture_output=True, check=False)
        if not path.is_dir():
            pytest.skip("localedef or its sources of locales are not installed")
        environ = {"LOCPATH": str(tmp_path), "LC_ALL": path.name}
    model = Path(shutil.copytree(tokenizer_dir(), tmp_path / "모델"))
    world = World(tmp_path, tokenizer=model, raw_dir=tmp_path / "원문é", data_dir=tmp_path / "expected")
    world.raw({"글.txt": "하늘과 바다\n"}).plan(num_shards=1)
    data = tmp_path / "자료é"
    commands = [["plan", *world.words_of_plan(output_dir=data, num_shards=1)]]
    if charset != "ASCII":  # one charset is enough for the other commands
        commands.append(["shard", "--shard_id", "0", "--output_dir", str(data)])
        commands.append(["report", str(data), "--output", str(data / "r.html")])
    for words in commands:
        run_child(shardprep(*words), env=environ_of_children(**environ))
    assert (data / "plan.json").read_bytes() == (world.data_dir / "plan.json").read_bytes()


def test_in_another_locale_programs_get_a_remedy_and_the_loader_reads_only_ascii_names(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    world.main("verify", world.data_dir).ends(2, "export PYTHONUTF8=1")
    with world.loader(batch_size=2) as loader:
        next(iter(loader))
    (tmp_path / "자료").mkdir()
    for name in ("자료", "missing é"):
        with pytest.raises(UsageError) as found:
            get_llama3_dataloader(tmp_path / name, 2, num_workers=0, rank=0, world_size=1)
        assert "export PYTHONUTF8=1" in str(found.value)


def test_an_input_in_a_folder_whose_name_is_not_utf8_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    (folder / "raw").mkdir(parents=True)
    monkeypatch.chdir(folder)
    Path("raw/a.txt").write_text("a\n")
    words = ["--input_dir", "raw", "--output_dir", "data", "--model_id", tokenizer_dir()]
    call_main("plan", *words).ends(2, r"caf\xe9")


THEIRS = "raise SystemExit('the old script was run')\n"
# The console command, as pip writes it.
COMMAND = """
import sys
from shardprep.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""
MAKE = "from slurm.submitit import MakeShards; import os, sys; os.chdir(sys.argv[2]); "
MAKE += "MakeShards()(sys.argv[1], '0')"
LOADS = "from loader import get_llama3_dataloader\n"
# A file that hides our package, its text, the text of train.py, the command, its exit code and last line.
HIDING = [
    ("preprocess.py", THEIRS, "", "-m slurm status data", 66, "error: FOLDER/data: "),
    ("preprocess.py", THEIRS, "", "-m shardprep status data", 66, "error: FOLDER/data: "),
    ("preprocess.py", THEIRS, "import slurm\n", "train.py", 1, "ImportError: FILE "),
    ("preprocess/__init__.py", THEIRS, "import slurm\n", "train.py", 1, "ImportError: FILE "),
    ("preprocess.py", "", "import preprocess\nimport slurm\n", "train.py", 1, "ImportError: FILE "),
    ("preprocess.py", THEIRS, LOADS, "train.py", 0, ""),
]


def run(folder: Path, *words: object, code: int = 0) -> str:
    """Run Python in a folder and return the last line of its standard error."""
    command = [sys.executable, *map(str, words)]
    done = run_child(command, cwd=folder, env=environ_of_children(), code=code)
    assert "the old script was run" not in done.stdout + done.stderr
    return (done.stderr.splitlines() or [""])[-1]


@pytest.mark.processes
def test_shardprep_and_submitits_tasks_work_in_a_folder_with_a_preprocess_py(tmp_path: Path) -> None:
    planned = World(tmp_path).raw({"a.txt": "a line\n" * 40}).plan(num_shards=3)
    desk = tmp_path / "desk"
    desk.mkdir()
    for name in ("preprocess", "loader"):
        (desk / f"{name}.py").write_text(THEIRS)
    run(ROOT, "-c", MAKE, planned.data_dir, desk)
    assert (planned.data_dir / "shard-00000.json").exists()
    (tmp_path / "shardprep").write_text(COMMAND)
    run(desk, "../shardprep", "run", planned.data_dir, "--num_proc", 2)
    assert len(list(planned.data_dir.glob("shard-*.json"))) == 3


@pytest.mark.processes
@pytest.mark.parametrize(("name", "text", "script", "words", "code", "said"), HIDING)
def test_a_preprocess_py_that_hides_the_package_is_named_but_does_not_affect_the_loader(
    tmp_path: Path, name: str, text: str, script: str, words: str, code: int, said: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    (tmp_path / "train.py").write_text(script)
    assert run(tmp_path, *words.split(), code=code).startswith(
        said.replace("FILE", str(path)).replace("FOLDER", str(tmp_path))
    )


EDITABLE = (
    "import os, sys, hatchling.build; os.chdir(sys.argv[1]); hatchling.build.build_editable(sys.argv[2])"
)
# As Python starts with this installation alone, and runs a script in the given folder.
STARTS = """
import site, sys
site.addsitedir(sys.argv[1])
sys.path.insert(0, sys.argv[2])
sys.path.append(sys.argv[3])
import loader, preprocess
print(loader.__file__, preprocess.__file__)
"""


@pytest.mark.processes
def test_folders_named_like_our_packages_beside_a_script_do_not_hide_them(tmp_path: Path) -> None:
    """Neither from an installation nor from an editable one. Folders with an __init__.py are packages."""
    for name in ("loader", "preprocess", "slurm"):
        (tmp_path / "project" / name).mkdir(parents=True)
        (tmp_path / "project" / name / "job-1.log").write_text("")
    (tmp_path / "wheel").mkdir()
    run_child([sys.executable, "-c", EDITABLE, ROOT, tmp_path / "wheel"])
    (wheel,) = (tmp_path / "wheel").iterdir()
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    libraries = Path(hatchling.__file__).parent.parent
    words = ["-I", "-S", "-c", STARTS, tmp_path / "site", tmp_path / "project", libraries]
    found = run_child([sys.executable, *map(str, words)]).stdout.split()
    assert found == [str(ROOT / name / "__init__.py") for name in ("loader", "preprocess")]


# Signals. tests/faults stops commands at each call to the system and checks for temporaries.


@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_workers_of_run_do_not_outlive_it(tmp_path: Path, how: signal.Signals) -> None:
    """They are in the middle of a shard, and if run is killed it cannot stop them."""
    world = World(tmp_path).raw({"a.txt": "a line of text\n" * 300}).plan(num_shards=2)
    hold = Hold(tmp_path, "fsync", r"\.shard-\d+\.tar")
    words = shardprep("run", world.data_dir, "--num_proc", 2)
    with child(words, env={**environ_of_children(), **hold.environ()}, stderr=-2) as run:
        workers = hold.wait(2, run)
        assert run.pid not in workers
        run.send_signal(how)
        hold.release()
        end_of(run, code=-9 if how == signal.SIGKILL else 75)
        wait_until(lambda: not any(is_living(pid) for pid in workers), every_s=0.01)
    if how != signal.SIGKILL:
        assert not list(world.data_dir.glob(".shard-*"))


# Runs a command, and sends SIGINT to itself while it imports a module. Python drops errors of finalizers.
INTERRUPTED = """
import os, signal, sys, time
def stop():
    os.kill(os.getpid(), signal.SIGINT)
class Thing:
    def __del__(self):
        stop()
        for _ in range(1000):
            pass
def stop_in_a_finalizer():
    Thing()
    time.sleep(60)
class Interrupt:
    def find_spec(self, name, *_):
        if name == MODULE:
            STOP()
sys.meta_path.insert(0, Interrupt())
"""
STOPS = [(module, "stop") for module in ("argparse", "msgspec", "shardprep.console", "shardprep.meanings")]
STOPS.append(("preprocess.clean", "stop_in_a_finalizer"))
STARTED = [
    "from shardprep import main; sys.argv[0] = 'shardprep'; sys.exit(main())",
    "import runpy; runpy.run_module('shardprep', run_name='__main__')",
    "import runpy; runpy.run_module('preprocess', run_name='__main__')",
]


@pytest.mark.processes
@pytest.mark.parametrize("command", STARTED)
@pytest.mark.parametrize(("module", "stop"), STOPS)
def test_ctrl_c_during_imports_prints_one_line(command: str, module: str, stop: str, tmp_path: Path) -> None:
    program = INTERRUPTED.replace("MODULE", repr(module)).replace("STOP", stop) + command
    # The folder does not exist, so without the signal the exit code would be 66.
    ended = run_child([sys.executable, "-c", program, "clean", tmp_path / "none"], code=75)
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
