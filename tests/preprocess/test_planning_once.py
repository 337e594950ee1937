"""Tasks of an array that find no plan: one of them plans, and none waits for long."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from preprocess.plan import plan_of_task as making
from preprocess.plan import planning
from preprocess.plan.plan_of_task import plan_of_task
from shardprep.errors import NotFound

if TYPE_CHECKING:
    from tests.conftest import Prep

NUM_TASKS = 10
CLAIM = ".plan.json.claimed.tmp"


@pytest.fixture
def given(prep: Prep, sample_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return {"input_dir": sample_dir, "output_dir": tmp_path / "data", "model_id": str(prep.model_dir)}


@pytest.fixture
def num_planned(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Each plan that is made."""
    made: list[Path] = []
    make = planning.make_plan

    def counted(config: Any, *args: Any, **settings: Any) -> Any:
        made.append(config.output_dir)
        return make(config, *args, **settings)

    monkeypatch.setattr(making, "make_plan", counted)
    return made


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_ten_tasks_without_a_plan_that_start_together_make_one(
    given: dict[str, Any], num_planned: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "_LEAST_WAIT_S", 600.0)  # however slow this machine is
    begin = threading.Barrier(NUM_TASKS)

    def task(_: int) -> str:
        begin.wait()
        return plan_of_task(None, given).plan_id

    with ThreadPoolExecutor(NUM_TASKS) as pool:
        plans = set(pool.map(task, range(NUM_TASKS)))
    assert len(plans) == 1
    assert len(num_planned) == 1
    assert not (given["output_dir"] / CLAIM).exists()


@pytest.mark.parametrize("fails", [False, True])
def test_a_task_waits_for_anothers_plan_no_longer_than_its_own_would_take_and_not_for_one_that_failed(
    given: dict[str, Any], num_planned: list[Path], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    given["output_dir"].mkdir()
    claim = given["output_dir"] / CLAIM
    claim.write_text("")  # of a task that was killed, or will fail
    clock = Clock()
    monkeypatch.setattr(making, "time", clock)
    if fails:
        monkeypatch.setattr(clock, "sleep", lambda seconds: Clock.sleep(clock, seconds) or claim.unlink())
    plan_of_task(None, given)
    assert len(num_planned) == 1
    assert clock.now_s < 1 if fails else 3.0 <= clock.now_s < 3.5


def test_a_task_that_cannot_plan_leaves_no_folder_and_no_claim(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match=r"holds no \.txt file"):
        plan_of_task(None, {**given, "input_dir": tmp_path / "empty"})
    assert not given["output_dir"].exists()
    given["output_dir"].mkdir()
    with pytest.raises(NotFound, match=r"holds no \.txt file"):
        plan_of_task(None, {**given, "input_dir": tmp_path / "empty"})
    assert list(given["output_dir"].iterdir()) == []


def test_a_task_that_was_submitted_for_a_plan_makes_none_where_it_is_gone(
    prep: Prep, given: dict[str, Any], num_planned: list[Path]
) -> None:
    flags = ["--output_dir", given["output_dir"], "--shard_id", 0, "--planned"]
    more = ["--input_dir", given["input_dir"], "--model_id", given["model_id"]]
    for words in (flags, [*flags, *more]):
        ended = prep.command(*words)
        assert ended.code == 66, ended.text
        assert "shardprep plan --input_dir RAW --output_dir" in ended.text
    assert num_planned == []
    assert not given["output_dir"].exists()
    plan_of_task(None, given)
    assert prep.command(*flags).code == 0, "and with a plan it makes its shard"
