"""Something happens at the k-th call to the operating system, for each k: four campaigns.

- injected_errors: the call fails, once or from there on. Refused in words, and mended by running it again.
- kills: SIGKILL just before it. Either it is done or nothing of it counts; run again it gives equal bytes.
- stop_signals: SIGTERM, SIGINT or SIGUSR1. It ends with 75, or 0 as it is done, and leaves no temporary.
- short_transfers: a read or a write moves half of its bytes. It goes on.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial

from shardprep.errors import Stopped
from tests.faults.commands import EXPORTS, LITTER
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
)  # fmt: skip
from tests.faults.os_calls import ERRORS, Call, Mode, OsCalls
from tests.faults.outcomes import Outcome, spread
from tests.faults.small_data_sets import SmallDataSet, Stage

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_LITTER = LITTER.format("*", "?")


@dataclass(frozen=True)
class Hit:
    """A command at a stage of the data set, hit again and again."""

    command: str
    stage: Stage
    name: str  # in the table
    share: float = 3  # of the faults: most for what makes most calls, few for what takes long

    def number(self, num_faults: int) -> int:
        """Return how many faults it gets: none in a short form where the share is below an eighth."""
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
    def is_short(self) -> bool:
        return self.mode in ("short", "all short")

    @property
    def words(self) -> str:
        if self.is_short:
            return f"half of the bytes, {self.mode}"
        return signal.Signals(self.stop).name if self.stop else f"{os.strerror(self.error)}, {self.mode}"


# Name in the table -> a command, and the stage of the data set at which it runs.
_STAGES: dict[str, tuple[str, Stage]] = {
    **{name: (name, "raw") for name in ("plan", "train_tokenizer")},
    **{name: (name, "planned") for name in ("shard", "run", "submit", "doctor")},
    **{name: (name, "made") for name in ("verify", "verify --fast", "load tars", "status")},
    **{name: (name, "verified") for name in ("load", "stage", "peek", "report", "blank", *EXPORTS)},
    "clean": ("clean", "littered"),
    "shard, done": ("shard", "verified"),
    "load, no index": ("load", "made"),
    "formats that are cut": ("shard", "planned"),
    "formats read whole": ("shard 1", "planned"),
}


def hits(shares: Mapping[str, float]) -> tuple[Hit, ...]:
    """Return these commands, with their shares of the faults."""
    return tuple(Hit(*_STAGES[name], name, share) for name, share in shares.items())


_OF_EXPORTS = dict.fromkeys(EXPORTS, 0.12)
_ERROR_HITS = hits({
    "plan": 3, "shard": 5, "shard, done": 3, "run": 1, "verify": 3, "verify --fast": 1.5, "load": 4,
    "load, no index": 1.5, "stage": 3, "status": 1.5, "submit": 1.5, "peek": 0.5, "doctor": 0.5,
    "train_tokenizer": 0.5, "report": 0.5, "blank": 0.12, "clean": 0.5, **_OF_EXPORTS,
})  # fmt: skip
_KILL_HITS = hits({
    "plan": 1, "shard": 2, "shard, done": 0.5, "run": 0.5, "verify": 1, "stage": 1, "submit": 0.5,
    "report": 0.5, "blank": 0.12, "clean": 0.5, **_OF_EXPORTS,
})  # fmt: skip
_SHORT_HITS = hits({
    "plan": 1.5, "shard": 1.5, "verify": 1.5, "load": 1.5, "load tars": 1, "stage": 1.5, "status": 0.5,
})  # fmt: skip
# Of all formats: what differs there is how a worker reads.
_HITS_OF_FORMATS = hits({"formats that are cut": 0.5, "formats read whole": 0.5})


def _tried(
    campaign: str,
    data_sets: Sequence[SmallDataSet],
    of_campaign: Sequence[Hit],
    num_faults: int,
    faults_of: Callable[[list[Call], int], Iterator[OsFault]],
) -> Iterator[Outcome]:
    """Put the faults that follow from the calls of each command to it."""
    for data_set in data_sets:
        calls = OsCalls(data_set.place)
        for hit in _HITS_OF_FORMATS if data_set.form == "formats" else of_campaign:
            if hit.number(num_faults):
                expected, made = counted(data_set, calls, hit)
                for fault in faults_of(made, hit.number(num_faults)):
                    yield _struck(campaign, data_set, calls, hit, expected, fault)


def injected_errors(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Fail each call of each command once; in turn with its errors, every third one lasting from there on."""

    def faults(made: list[Call], number: int) -> Iterator[OsFault]:
        for count, at in enumerate(spread(len(made), number)):
            errors = ERRORS[made[at].op]
            error, is_lasting = errors[count % len(errors)], count % 3 == 2
            # An interrupted call cannot last, nor can O_DIRECT be refused to who left it.
            if is_lasting and error in (errno.EINTR, errno.EINVAL):
                error = errors[0]
            yield OsFault(at=at, mode="lasting" if is_lasting else "once", error=error)

    return _tried("injected_errors", data_sets, _ERROR_HITS, num_faults, faults)


def _signals(signals: Sequence[signal.Signals], made: list[Call], number: int) -> Iterator[OsFault]:
    for count, at in enumerate(spread(len(made), number)):
        yield OsFault(at=at, mode="signal", error=signals[count % len(signals)])


def kills(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Kill the commands that write, at each call."""
    return _tried("kills", data_sets, _KILL_HITS, num_faults, partial(_signals, (signal.SIGKILL,)))


def stop_signals(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Stop the commands that write, at each call, with the signals in turn."""
    return _tried("stop_signals", data_sets, _KILL_HITS, num_faults, partial(_signals, _STOP_SIGNALS))


def short_transfers(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Shorten all reads and writes of each command at once, then one by one."""

    def faults(made: list[Call], number: int) -> Iterator[OsFault]:
        moving = [at for at, call in enumerate(made) if call.op in ("read", "write")]
        yield OsFault(at=moving[0], mode="all short")
        yield from (OsFault(at=moving[place], mode="short") for place in spread(len(moving), number))

    return _tried("short_transfers", data_sets, _SHORT_HITS, num_faults, faults)


def counted(data_set: SmallDataSet, calls: OsCalls, hit: Hit) -> tuple[Undisturbed, list[Call]]:
    """Run a command undisturbed; return what it leaves and delivers, and its calls."""
    data_set.reset(hit.stage)
    with calls.ordered("count"):
        ended = data_set.run(hit.command, calls.arm)
    made = calls.calls()
    if ended.how != "ended" or ended.code or not made:
        message = f"{data_set.form}: {hit.name} failed undisturbed, with {len(made)} calls: {ended}"
        raise RuntimeError(message)
    return Undisturbed(ended.value, data_set.published()), made


def _struck(
    campaign: str, data_set: SmallDataSet, calls: OsCalls, hit: Hit, expected: Undisturbed, fault: OsFault
) -> Outcome:
    data_set.reset(hit.stage)
    with calls.ordered(fault.mode, at=fault.at, error=fault.error):
        ended = data_set.run(hit.command, calls.arm)
    kind, what = judged(data_set, hit, expected, ended, stop=fault.stop)
    if kind == "refused" and fault.is_short:
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
    """Return the outcome of a fault at one call; ``words``: the fault, where it is no error and no signal."""
    made = calls.calls()
    call = made[fault.at] if fault.at < len(made) else Call("none", "(fewer calls this time)")
    file = f"{call.op} {_named(call.path)}"
    fault_words = f"{words or fault.words}, at call {fault.at}: {call.op} {call.path}"
    return Outcome(campaign, data_set.form, file, hit.name, fault_words, *verdict)


def judged(
    data_set: SmallDataSet, hit: Hit, expected: Undisturbed, ended: Ended, *, stop: int = 0
) -> Verdict:
    """Judge how a run ended, what it left, and what comes of it when it is run again, undisturbed.

    ``stop``: the signal that should have ended it, if any.
    """
    if stop == signal.SIGKILL:
        # The kill itself must have happened, or the case shows nothing.
        verdict: Verdict = ("equal", "")
        if ended.how != "killed":
            verdict = ("wrong", f"it was not killed: {ended.how} {ended.code}")
    elif how := not_ended(ended):
        verdict = how
    elif stop and ended.code not in (0, Stopped.exit_code):
        verdict = ("wrong", f"a stop signal ends with {ended.code}: {shape(ended.text)}")
    elif stop and (left := _temporaries(data_set)):
        verdict = ("wrong", f"a stop signal leaves {', '.join(map(_named, left))}")
    elif ended.code:
        verdict = refusal(ended)
    else:
        verdict = ("equal", "") if ended.value == expected.value else ("wrong", "other batches")
    if verdict[0] in ("equal", "refused"):
        has_ended = ended.how == "ended" and not ended.code
        return wrong_state(data_set, hit, expected, has_ended=has_ended) or verdict
    return verdict


def _temporaries(data_set: SmallDataSet) -> list[str]:
    return [path.name for path in data_set.place.rglob(".*.tmp") if not fnmatch(path.name, _LITTER)]


def wrong_state(
    data_set: SmallDataSet, hit: Hit, expected: Undisturbed, *, has_ended: bool
) -> Verdict | None:
    """Say what is wrong with what a run left, or with a second run; None if nothing is.

    ``has_ended``: with 0, so that all must be there.
    """
    left = data_set.published()
    if wrong := wrong_that_counts(left, expected.files):
        return "wrong", f"what counts is not right: {', '.join(wrong)}"
    other = [name for name in different(left, expected.files, None) if not name.startswith("litter/")]
    if has_ended and other:
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
    """Return a path without what differs between runs: the random part of a temporary's name."""
    named = re.sub(r"/\.[^/]+", "/(temporary)", path)
    return re.sub(r"[-_.][a-z0-9_]{8}(?=/|$)", "-(random)", named)
