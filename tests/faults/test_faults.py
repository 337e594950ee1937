"""Short forms of the fault campaigns; ``python -m tests.faults`` runs them at length."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.checkout import ROOT
from tests.children import run_child
from tests.faults import fuzzed_inputs
from tests.faults.fuzz_targets import WrongError

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc compiles what injects the faults"),
    pytest.mark.timeout(1800),  # they take CPU time, which a busy machine gives slowly
]


Outcomes = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def of_campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """Campaign -> its outcomes, once it has ended: the short form of all, one after the other.

    They run in one process, which forks for each outcome: to make the data sets takes 8 s of CPU.
    """
    path = tmp_path_factory.mktemp("faults") / "outcomes.json"
    errors = path.with_suffix(".stderr")
    command = [sys.executable, "-m", "tests.faults", "--quick", "--json", str(path)]
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        ) as process,
    ):
        assert process.stdout is not None
        ended: set[str] = set()

        def outcomes(name: str, kind: str = "") -> list[dict[str, Any]]:
            """Those of a module, or where it makes two kinds the ones named ``kind``."""
            while name not in ended:
                line = process.stdout.readline() if process.stdout else ""
                assert line, errors.read_text(encoding="utf-8")
                ended.add(line.removesuffix(": ended\n"))
            return [each for each in json.loads(path.read_bytes()) if each["campaign"] == (kind or name)]

        yield outcomes
        process.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)


def shown(outcomes: list[dict[str, Any]]) -> str:
    return "\n".join(str(outcome) for outcome in outcomes[:20])


def failed(outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [outcome for outcome in outcomes if outcome["kind"] not in ("refused", "equal")]


def test_a_flipped_bit_is_refused_or_without_effect(of_campaign: Outcomes) -> None:
    outcomes = of_campaign("bit_flips")
    assert len(outcomes) > 25
    assert {outcome["kind"] for outcome in outcomes} >= {"refused", "equal"}
    assert not failed(outcomes), shown(failed(outcomes))


def test_bad_json_is_refused_in_words_or_without_effect(of_campaign: Outcomes) -> None:
    outcomes = of_campaign("bad_json")
    assert len(outcomes) > 60
    assert {outcome["kind"] for outcome in outcomes} >= {"refused", "equal"}
    assert not failed(outcomes), shown(failed(outcomes))


def test_another_kind_of_file_in_place_of_an_input_or_a_shard_is_refused(of_campaign: Outcomes) -> None:
    outcomes = of_campaign("replaced_files")
    assert len(outcomes) > 60
    assert {outcome["kind"] for outcome in outcomes} >= {"refused", "equal"}
    assert not failed(outcomes), shown(failed(outcomes))


def test_an_error_of_any_call_is_named_and_the_command_run_again_gives_equal_bytes(
    of_campaign: Outcomes,
) -> None:
    outcomes = of_campaign("injected_errors")
    assert len(outcomes) > 25
    assert {outcome["kind"] for outcome in outcomes} >= {"refused", "equal"}
    assert not failed(outcomes), shown(failed(outcomes))


def test_reads_and_writes_that_move_fewer_bytes_are_gone_on_with(of_campaign: Outcomes) -> None:
    outcomes = of_campaign("short_transfers")
    assert len(outcomes) > 20
    assert {outcome["kind"] for outcome in outcomes} == {"equal"}, shown(failed(outcomes))


def test_a_full_disk_is_named_and_a_second_run_gives_equal_bytes(of_campaign: Outcomes) -> None:
    outcomes = of_campaign("full_disks")
    assert len(outcomes) > 3
    assert {outcome["kind"] for outcome in outcomes} >= {"refused", "equal"}
    assert not failed(outcomes), shown(failed(outcomes))


def test_a_kill_at_any_call_leaves_what_is_done_or_nothing_that_counts(of_campaign: Outcomes) -> None:
    outcomes = of_campaign("kills")
    assert len(outcomes) > 12
    assert sum(outcome["form"] == "formats" for outcome in outcomes) == 2, "a worker of every format"
    assert not failed(outcomes), shown(failed(outcomes))


def test_a_stop_signal_at_any_call_ends_with_75_and_leaves_no_temporary(of_campaign: Outcomes) -> None:
    outcomes = of_campaign("stop_signals")
    assert len(outcomes) > 12
    assert "refused" in {outcome["kind"] for outcome in outcomes}
    assert not failed(outcomes), shown(failed(outcomes))


def test_another_writer_at_any_call_changes_nothing(of_campaign: Outcomes) -> None:
    outcomes = of_campaign("races")
    assert len(outcomes) > 3
    assert {outcome["kind"] for outcome in outcomes} == {"equal"}, shown(failed(outcomes))


def test_an_input_or_a_shard_that_changes_at_any_call_is_refused_or_without_effect(
    of_campaign: Outcomes,
) -> None:
    outcomes = of_campaign("races", "changes")
    assert len(outcomes) > 3
    assert {outcome["kind"] for outcome in outcomes} >= {"refused"}
    assert not failed(outcomes), shown(failed(outcomes))


def test_a_clock_that_is_wrong_or_jumps_changes_nothing(of_campaign: Outcomes) -> None:
    outcomes = of_campaign("clocks")
    assert len(outcomes) >= 8
    assert {outcome["kind"] for outcome in outcomes} == {"equal"}, shown(failed(outcomes))


def test_a_bit_of_an_input_of_any_format_is_read_or_refused_in_words(of_campaign: Outcomes) -> None:
    outcomes = of_campaign("altered_inputs")
    assert len({outcome["file"] for outcome in outcomes}) > 10
    assert not failed(outcomes), shown(failed(outcomes))


def test_fuzzed_inputs_are_refused_or_read_as_an_independent_reader_reads_them(of_campaign: Outcomes) -> None:
    outcomes = of_campaign("fuzzed_inputs")
    assert len(outcomes) > 150
    assert {outcome["kind"] for outcome in outcomes} >= {"refused", "equal"}
    assert not failed(outcomes), shown(failed(outcomes))


@pytest.mark.parametrize("error", [WrongError("found another"), IndexError("out of range")])
def test_a_check_that_fails_is_an_outcome_with_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(fuzzed_inputs, "CORPUS", tmp_path)

    def check(value: int) -> bool:
        if value > 9:
            raise error
        return True

    work = fuzzed_inputs.tried("a target", st.integers(0, 10**6), check, 50)
    _, found = work()
    kind, what = found["failure"]
    assert kind == ("wrong" if isinstance(error, WrongError) else "traceback")
    assert "value=10" in what, "the smallest that fails"
    assert list(tmp_path.rglob("*")), "it is kept"


@pytest.mark.parametrize(
    ("work", "how"),
    [
        ("0, None", "ended"),
        ("exec('raise ShardprepError()')", "ended"),
        ("sys.exit(78)", "ended"),
        ("1 // 0", "traceback"),
        ("0, threading.Thread(target=lambda: 1 // 0).start()", "traceback"),
        ("os.abort()", "traceback"),
        ("0, bytearray(8 << 30)", "memory"),
        ("exec('while True: pass')", "hang"),
        ("os.kill(os.getpid(), 9)", "killed"),
    ],
)
def test_a_run_in_a_fork_is_told_how_it_ended(work: str, how: str) -> None:
    script = (
        "import os, sys, threading\n"
        "from tests.faults.forked_case import run_forked\n"
        "class ShardprepError(Exception): exit_code = 74\n"
        f"print(run_forked(lambda: ({work}), cpu_limit_s=1).how)"
    )
    assert run_child([sys.executable, "-c", script]).stdout.split() == [how]


def test_calls_of_python_and_of_libraries_fail_where_it_was_ordered_and_nowhere_else(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    root.mkdir()
    other.mkdir()
    (tmp_path / "script.py").write_text(
        f"""
import errno, json
from pathlib import Path
from tests.faults.os_calls import OsCalls
root, other = Path({str(root)!r}), Path({str(other)!r})
calls = OsCalls(root)
def ended(at, error):
    with calls.ordered("count" if at is None else "once", at=at or 0, error=error):
        calls.arm()
        try:
            (other / "file").write_bytes(b"never counted")
            (root / "file").write_bytes(b"counted")
            (root / "file").rename(root / "renamed")
        except OSError as failure:
            return failure.errno
made = ended(None, 0)
names = [call.op for call in calls.calls()]
errors = [ended(at, errno.EDQUOT) for at, op in enumerate(names)]
print(json.dumps([made, names, errors]))
""",
        encoding="utf-8",
    )
    starter = f"""
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tests.faults.os_calls import start_preloaded
sys.exit(start_preloaded(Path({str(tmp_path)!r}), [{str(tmp_path / "script.py")!r}]))
"""
    done = run_child([sys.executable, "-c", starter], env={**os.environ, "PYTHONPATH": str(ROOT)})
    made, names, errors = json.loads(done.stdout)
    assert made is None
    assert names[0] == "create"
    assert {"write", "close written", "rename"} <= set(names)
    # Python's own open() asks for the size of a file and goes on where there is no answer.
    assert errors == [None if name == "stat" else errno.EDQUOT for name in names]
