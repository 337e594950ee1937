"""slurm/squeue.py: the lines of squeue, as jobs."""

from __future__ import annotations

import pytest

from slurm.squeue import Job, parse_queue

# ArrayJobID, ArrayTaskID, State, Reason, exit code, NodeList, TimeUsed, JobID, user, submit and start time,
# TimeLimit, RestartCnt, Name
LINE = "41|{index}|{state}|Priority|{code}|{node}|{used}|47|kim|2026-11-22T01:52:04|N/A|1:00:00|2|prep|"


def parsed(**values: str) -> list[Job]:
    facts = {"index": "3", "state": "RUNNING", "code": "0:0", "node": "n1", "used": "1-00:00:02"} | values
    return parse_queue(LINE.format(**facts) + "\n")


def test_a_line_is_the_last_start_of_a_task() -> None:
    (job,) = parsed()
    assert (job.key, job.user, job.name, job.num_restarts) == (("41", 3), "kim", "prep", 2)
    assert (job.node, job.elapsed_s, job.time_limit, job.start_time) == ("n1", 86402, "1:00:00", "")
    assert (job.is_live, job.state_of_shards, job.waits_for) == (True, "running", "")


@pytest.mark.parametrize(
    ("index", "indices"), [("[3-5,9%2]", [3, 4, 5, 9]), ("7", [7]), ("N/A", [0]), ("123456", [])]
)
def test_each_waiting_task_is_a_job(index: str, indices: list[int]) -> None:
    jobs = parsed(index=index, state="PENDING")
    assert [job.index for job in jobs] == indices
    assert {(job.state_of_shards, job.waits_for) for job in jobs} <= {("pending", "Priority")}


@pytest.mark.parametrize(("code", "number"), [("65:0", 65), ("16640", 65), ("0:9", 137), ("9", 137)])
def test_exit_codes_of_all_versions_are_those_of_a_shell(code: str, number: int) -> None:
    (job,) = parsed(state="FAILED", code=code)
    assert (job.exit_code, job.state_of_shards) == (number, "failed")


def test_a_state_that_is_not_known_counts_as_running() -> None:
    assert [parsed(state=state)[0].is_live for state in ("NEW_STATE", "CANCELLED by 0")] == [True, False]


def test_a_line_with_other_fields_is_refused() -> None:
    for text in ("41|3|RUNNING|", LINE.replace("41", "x")):
        with pytest.raises(ValueError):  # noqa: PT011 - its text is for people
            parse_queue(text)
