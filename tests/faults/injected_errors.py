"""An OSError at the k-th call to the operating system, for each k: refused in words, and mended by running
the command again."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from shardprep.errors import Stopped
from tests.faults.commands import EXPORTS, LITTER
from tests.faults.disturbed_files import spread
from tests.faults.forked_case import Ended
from tests.faults.judging import (
    READERS,
    Undisturbed,
    Verdict,
    different,
    not_ended,
    refusal,
    shape,
    wrong_that_counts,
)
from tests.faults.os_calls import ERRORS, Call, Mode, OsCalls
from tests.faults.outcomes import Outcome
from tests.faults.small_data_sets import SmallDataSet, Stage

FORMS = ("json", "best_fit", "formats")
QUICK_FORMS = ("best_fit",)
_LITTER = LITTER.format("*", "?")
_SHORT: dict[Mode, str] = {"short": "half of the bytes", "all short": "half of the bytes, at each call"}


@dataclass(frozen=True)
class Hit:
    """A command at a stage of the data set, hit again and again."""

    command: str
    stage: Stage
    name: str  # in the table
    share: float = 3  # of the faults: most for what makes most calls, few for what takes long

    def number(self, num_faults: int) -> int:
        """None in a short form where the share is below an eighth."""
        return round(self.share * num_faults)


@dataclass(frozen=True, kw_only=True)
class OsFault:
    """What happens at which call to the operating system."""

    at: int
    mode: Mode
    error: int = 0  # or the signal

    @property
    def stop(self) -> int:
        """The signal, if it is one."""
        return self.error if self.mode == "signal" else 0

    @property
    def words(self) -> str:
        if self.stop:
            return signal.Signals(self.stop).name
        return _SHORT.get(self.mode, f"{os.strerror(self.error)}, {self.mode}")


HITS = (
    Hit("plan", "raw", "plan"),
    Hit("shard", "planned", "shard", 5),
    Hit("shard", "verified", "shard, done"),
    Hit("run", "planned", "run", 1),
    Hit("verify", "made", "verify"),
    Hit("verify --fast", "made", "verify --fast", 1.5),
    Hit("load", "verified", "load", 4),
    Hit("load", "made", "load, no index", 1.5),
    Hit("stage", "verified", "stage"),
    Hit("status", "made", "status", 1.5),
    Hit("submit", "planned", "submit", 1.5),
    Hit("peek", "verified", "peek", 0.5),
    Hit("doctor", "planned", "doctor", 0.5),
    Hit("train_tokenizer", "raw", "train_tokenizer", 0.5),
    Hit("report", "verified", "report", 0.5),
    Hit("clean", "littered", "clean", 0.5),
    *(Hit(name, "verified", name, 0.12) for name in EXPORTS),
)

# Of all formats: what differs there is how a worker reads.
_HITS_OF_FORMATS = (
    Hit("shard", "planned", "formats that are cut", 0.5),
    Hit("shard 1", "planned", "formats read whole", 0.5),
)


def hits_of(data_set: SmallDataSet, hits: Sequence[Hit], num_faults: int) -> Sequence[Hit]:
    """The commands to hit on a data set."""
    chosen = _HITS_OF_FORMATS if data_set.form == "formats" else hits
    return [hit for hit in chosen if hit.number(num_faults)]


def outcomes(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Each call of each command once; in turn its errors, every third one lasting from there on."""
    for data_set in data_sets:
        calls = OsCalls(data_set.place)
        for hit in hits_of(data_set, HITS, num_faults):
            expected, made = counted(data_set, calls, hit)
            modes: tuple[Mode, ...] = ("once", "once", "lasting")
            for number, at in enumerate(spread(len(made), hit.number(num_faults))):
                errors = ERRORS[made[at].op]
                mode = modes[number % len(modes)]
                fault = OsFault(at=at, mode=mode, error=_error(errors, number, mode))
                yield struck("injected_errors", data_set, calls, hit, expected, fault)


def _error(errors: Sequence[int], number: int, mode: Mode) -> int:
    """They take turns; an interrupted call cannot last, nor can O_DIRECT be refused to who left it."""
    error = errors[number % len(errors)]
    return errors[0] if mode == "lasting" and error in (errno.EINTR, errno.EINVAL) else error


def counted(data_set: SmallDataSet, calls: OsCalls, hit: Hit) -> tuple[Undisturbed, list[Call]]:
    """An undisturbed run: what it leaves and delivers, and its calls."""
    data_set.reset(hit.stage)
    with calls.ordered("count"):
        ended = data_set.run(hit.command, calls.arm)
    made = calls.calls()
    if ended.how != "ended" or ended.code or not made:
        message = f"{data_set.form}: {hit.name} failed undisturbed, with {len(made)} calls: {ended}"
        raise RuntimeError(message)
    return Undisturbed(ended.value, data_set.published()), made


def struck(
    campaign: str,
    data_set: SmallDataSet,
    calls: OsCalls,
    hit: Hit,
    expected: Undisturbed,
    fault: OsFault,
) -> Outcome:
    """Run the command with a fault at one call, look at what it left, and run it again without."""
    data_set.reset(hit.stage)
    with calls.ordered(fault.mode, at=fault.at, error=fault.error):
        ended = data_set.run(hit.command, calls.arm)
    kind, what = judged(data_set, hit, expected, ended, stop=fault.stop)
    if kind == "refused" and fault.mode in _SHORT:
        kind, what = "wrong", f"a short transfer is refused: {shape(what)}"
    return outcome_at(campaign, data_set, calls, hit, fault, (kind, what))


def outcome_at(
    campaign: str,
    data_set: SmallDataSet,
    calls: OsCalls,
    hit: Hit,
    fault: OsFault,
    verdict: Verdict,
    words: str = "",
) -> Outcome:
    """The outcome of a fault at one call; ``words``: the fault, where it is no error and no signal."""
    made = calls.calls()
    call = made[fault.at] if fault.at < len(made) else Call("none", "(fewer calls this time)")
    return Outcome(
        campaign=campaign,
        form=data_set.form,
        file=f"{call.op} {_named(call.path)}",
        command=hit.name,
        fault=f"{words or fault.words}, at call {fault.at}: {call.op} {call.path}",
        kind=verdict[0],
        what=verdict[1],
    )


def judged(
    data_set: SmallDataSet, hit: Hit, expected: Undisturbed, ended: Ended, *, stop: int = 0
) -> Verdict:
    """How a run ended, what it left, and what comes of it when it is run again, undisturbed.

    ``stop``: the signal that should have ended it, if any.
    """
    kind, what = _killed(ended) if stop == signal.SIGKILL else _verdict(ended, expected)
    if stop and stop != signal.SIGKILL:
        kind, what = _stopped(data_set, ended) or (kind, what)
    if kind in ("equal", "refused"):
        finished = ended.how == "ended" and not ended.code
        kind, what = _afterwards(data_set, hit, expected, finished) or (kind, what)
    return kind, what


def _killed(ended: Ended) -> Verdict:
    """The kill itself must have happened, or the case shows nothing."""
    return (
        ("equal", "") if ended.how == "killed" else ("wrong", f"it was not killed: {ended.how} {ended.code}")
    )


def _stopped(data_set: SmallDataSet, ended: Ended) -> Verdict | None:
    """What is wrong with how a stop signal ended a command: it cleans up and ends with 75, or with 0."""
    if ended.how != "ended":
        return None
    if ended.code not in (0, Stopped.exit_code):
        return "wrong", f"a stop signal ends with {ended.code}: {shape(ended.text)}"
    left = [path.name for path in data_set.place.rglob(".*.tmp") if not fnmatch(path.name, _LITTER)]
    return ("wrong", f"a stop signal leaves {', '.join(map(_named, left))}") if left else None


def _verdict(ended: Ended, expected: Undisturbed) -> Verdict:
    if how := not_ended(ended):
        return how
    if ended.code:
        return refusal(ended)
    return ("equal", "") if ended.value == expected.value else ("wrong", "other batches")


def _afterwards(data_set: SmallDataSet, hit: Hit, expected: Undisturbed, finished: bool) -> Verdict | None:
    """What is wrong with what the run left, or with a second run; None if nothing is."""
    left = data_set.published()
    if wrong := wrong_that_counts(left, expected.files):
        return "wrong", f"what counts is not right: {', '.join(wrong)}"
    other = [name for name in different(left, expected.files, None) if not name.startswith("litter/")]
    if finished and other:
        return "wrong", f"ended with 0, but other bytes: {', '.join(other)}"
    if hit.command in READERS:
        return None
    again = data_set.run(hit.command)
    if how := not_ended(again):
        return how[0], f"run again: {how[1]}"
    if again.code:
        return "wrong", f"run again: exit code {again.code}: {shape(again.text)}"
    if other := different(data_set.published(), expected.files, None):
        return "wrong", f"run again: other bytes: {', '.join(other)}"
    return None


def _named(path: str) -> str:
    """A path without what differs between runs: the random part of a temporary's name."""
    named = re.sub(r"/\.[^/]+", "/(temporary)", path)
    return re.sub(r"[-_.][a-z0-9_]{8}(?=/|$)", "-(random)", named)
