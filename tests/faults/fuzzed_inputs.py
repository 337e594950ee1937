"""Inputs that hypothesis makes: altered files of a data set, tars, JSON ids, raw text, lengths of documents.

Each is given to the function that reads it, in one process: it refuses with an error of ours, or finds what
was written, or what an independent reader finds (Python's tarfile and json, a reader of lines in the tests).
A failing input is shrunk, shown, and kept in ``corpus/``, from where it is tried first ever after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from shardprep.errors import ShardprepError
from tests.faults.forked_case import described, run_forked
from tests.faults.fuzz_targets import Check, WrongError, targets
from tests.faults.outcomes import Kind, Outcome
from tests.faults.small_data_sets import SmallDataSet

FORMS = ("json", "best_fit")
QUICK_FORMS = ("best_fit",)
CORPUS = Path(__file__).with_name("corpus")
_INPUTS_PER_FAULT = 5  # an input takes a millisecond, a fault of the other campaigns a process
_CPU_LIMIT_S = 3_600


def outcomes(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """An outcome for each input; those of a target that fails end with the first failure."""
    for data_set in data_sets:
        data_set.reset("verified")
        for name, strategy, check in targets(data_set.place):
            number = num_faults * _INPUTS_PER_FAULT
            work = tried(name, strategy, check, number)
            ended = run_forked(work, cpu_limit_s=_CPU_LIMIT_S, wall_limit_s=_CPU_LIMIT_S)
            if ended.how == "ended":
                for kind, count in ended.value["counts"].items():
                    for _ in range(count):
                        yield _outcome(data_set.form, name, kind, "")
                if failure := ended.value["failure"]:
                    yield _outcome(data_set.form, name, *failure)
            else:
                kind = "traceback" if ended.how == "killed" else ended.how
                yield _outcome(data_set.form, name, kind, ended.text)


def _outcome(form: str, target: str, kind: Kind, what: str) -> Outcome:
    return Outcome(
        campaign="fuzzed_inputs",
        form=form,
        file=target,
        command=target,
        fault="an input of hypothesis",
        kind=kind,
        what=what,
    )


def tried(
    name: str, strategy: st.SearchStrategy[Any], check: Check, number: int
) -> Callable[[], tuple[int, dict[str, Any]]]:
    """What a fork does: try ``number`` inputs, and count those that are refused and those that are read."""
    counts: Counter[str] = Counter()

    @settings(
        max_examples=number,
        deadline=None,
        database=DirectoryBasedExampleDatabase(CORPUS),
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(strategy)
    def check_one(value: Any) -> None:
        try:
            is_read = check(value)
        except ShardprepError:
            is_read = False
        counts["equal" if is_read else "refused"] += 1

    check_one.__qualname__ = name  # by which the corpus is kept

    def work() -> tuple[int, dict[str, Any]]:
        failure = None
        try:
            check_one()
        except Exception as error:  # shrunk by hypothesis, which notes the input
            kind = "wrong" if isinstance(error, WrongError) else "traceback"
            failure = kind, " ".join([described(error), *getattr(error, "__notes__", [])])
        return 0, {"counts": counts, "failure": failure}

    return work
