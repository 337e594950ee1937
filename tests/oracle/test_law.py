"""The loader delivers exactly the samples that tests/oracle/law.py specifies, whatever happens to a run.

The first id of a document is its number, so a batch shows which samples it has. A state machine of hypothesis
drives the loader and the law in parallel: it continues, resumes on other ranks, jumps to earlier and later
steps, and amends the run at any point: before its first step, several times at one step, before an earlier
amendment has taken effect, and to what is planned. ``LAW=all`` runs many more histories, and at the end of
each compares ``where`` and ``state_at`` with the law for all steps that it took.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import pytest
import webdataset
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.oracle.law import Run, Sample, Source, Weights
from tests.word_tokenizers import save_word_tokenizer
from tests.world import Ranks, World, call_main

pytestmark = pytest.mark.long

IS_CAMPAIGN = os.environ.get("LAW") == "all"
NUM_HISTORIES = {"plain": 40, "mixed": 95} if IS_CAMPAIGN else {"plain": 2, "mixed": 2}
NUM_RULES = 12 if IS_CAMPAIGN else 6  # per history
EOS, FILLER, NUM_WORDS = 9999, 9900, 10_000
ROW = 4  # tokens
SIZES = {
    "web": 700, "code": 130, "books": 90, "wiki": 60, "rows": 500, "rows b": 110, "large": 200, "many": 9600,
    "two": 2,  # the smallest number with an order
}  # fmt: skip
FIRST_ID = {name: 1 + 1000 * number for number, name in enumerate(SIZES)}
LARGE_BYTES = 400_000  # per sample of ``large``, so that bytes limit blocks and windows


@dataclass(frozen=True, kw_only=True)
class Form:
    """The initial settings of a run."""

    sources: Sequence[str]
    size: int = 12  # L
    options: Mapping[str, Any] = field(default_factory=dict)
    sizes: Sequence[tuple[int, int]] = ()  # schedule of global_batch_size
    weights: Sequence[tuple[int, Weights]] = ()
    in_tokens: bool = False  # whether weights are shares of tokens
    later_ticks: Sequence[int] = (1, 2, 3, 4)  # ticks per step that an amendment may choose


FORMS = {
    "documents": Form(sources=["web"]),
    "in order": Form(sources=["web"], options={"shuffle": False}),
    "grouped": Form(sources=["web"], options={"group_by_length": 3}),
    "rows": Form(sources=["rows"], options={"boundaries": "segment_ids"}),
    "joined": Form(sources=["web"], options={"seq_len": ROW}),
    "sizes by step": Form(sources=["web"], sizes=[(0, 24), (9, 12), (70, 36)]),
    "large": Form(sources=["large"], size=2),
    "large, grouped": Form(sources=["large"], size=2, options={"group_by_length": 2}),
    "one": Form(sources=["wiki"], size=1),
    "two": Form(sources=["two"], size=1, later_ticks=(1, 2)),
    "many": Form(sources=["many"], size=512, later_ticks=(1, 2)),
    "fewer": Form(sources=["many"], size=128, later_ticks=(1, 2)),
    "long windows": Form(sources=["many"], size=3, options={"group_by_length": 3}),
    "mixture": Form(sources=["web", "code"], weights=[(0, {"web": 2, "code": 1})]),
    "mixture by step": Form(sources=["code", "web", "books"], weights=[
        (0, {"code": 1}), (5, {"web": 3, "code": 1}), (75, {"web": 1, "books": 0.3}),
    ]),
    "mixture by tokens": Form(sources=["books", "code"], weights=[(0, {"books": 0.7, "code": 0.3})],
                              in_tokens=True),
    "mixture of groups": Form(sources=["web", "wiki"], weights=[(0, {"web": 1, "wiki": 1})],
                              options={"group_by_length": 2}),
    "mixture joined": Form(sources=["code", "wiki"], weights=[(0, {"code": 1, "wiki": 2})],
                           options={"seq_len": ROW}),
    "mixture of rows": Form(sources=["rows", "rows b"], weights=[(0, {"rows": 3, "rows b": 1})],
                            options={"boundaries": "segment_ids"}),
    "mixture of sizes by step": Form(sources=["code", "books"], weights=[(0, {"code": 3, "books": 2})],
                                     sizes=[(0, 12), (3, 24)]),
}  # fmt: skip
MIXED = ("web", "code", "books", "wiki")


def ids_of(source: str, number: int) -> list[int]:
    """Return the ids of a document: its number, then up to four fillers. Rows of ``rows`` are full."""
    first = FIRST_ID[source] + number
    if source == "many":  # two ids encode the number
        return [FIRST_ID[source] + number // 100, FIRST_ID[source] + 500 + number % 100]
    if source.startswith("rows"):
        return [first, FILLER, FILLER, EOS]
    return [first, *range(FILLER, FILLER + number * number % 5)]


@functools.cache
def joined(source: str) -> list[int]:
    """Return the stream of tokens that ``seq_len`` cuts into rows."""
    return [token for number in range(SIZES[source]) for token in [*ids_of(source, number), EOS]]


def mean_tokens(source: str) -> Fraction:
    return Fraction(len(joined(source)) / SIZES[source] - 1)  # EOS is not stored


@functools.cache
def first_samples(folder: Path) -> list[int]:
    """Return the number of the first sample of each shard of a data set."""
    manifests = [json.loads(path.read_text()) for path in sorted(folder.glob("shard-*.json"))]
    return [*accumulate((each["counts"]["num_samples"] for each in manifests), initial=0)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("law")
    save_word_tokenizer(root / "words", NUM_WORDS, splits=True)
    for name, size in SIZES.items():
        documents = [ids_of(name, number) for number in range(size)]
        if name == "large":  # as users of webdataset write them, with large members that are not ids
            (root / name / "data").mkdir(parents=True)
            with webdataset.TarWriter(str(root / name / "data" / "pictures.tar")) as writer:
                for number, ids in enumerate(documents):
                    picture = {"picture.bin": bytes(LARGE_BYTES)}
                    writer.write({"__key__": f"s{number}", "token_ids.json": ids, **picture})
            continue
        lines = [" ".join(f"w{token}" for token in ids if token != EOS) + "\n" for ids in documents]
        World(root / name, tokenizer=root / "words").raw({"lines.txt": "".join(lines)}).make(
            # The idx of ``many`` is large enough for the loader to read it in parts.
            num_shards=1 if name == "many" else 3,
            **({"record": "packed", "seq_len": ROW} if name.startswith("rows") else {}),
        )
    return root


class Pair:
    """The loaders of all ranks of a run, and the same run by the law."""

    def __init__(self, data: Path, form: Form, seed: int) -> None:
        self.data, self.form, self.seed = data, form, seed
        # The arguments of the loaders.
        self.sizes, self.weights = form.sizes or [(0, form.size)], form.weights
        self.law = Run(
            {name: self.source(name) for name in form.sources},
            sizes=self.sizes,
            weights=self.of_law(form.weights),
            seed=seed,
            group=form.options.get("group_by_length", 1),
            shuffle=form.options.get("shuffle", True),
        )
        self.step = 0
        self.taken: set[int] = set()  # all steps
        self.ranks = self.load(None, form.sources)

    def source(self, name: str) -> Source:
        lengths = [len(ids_of(name, number)) for number in range(SIZES[name])]
        if "seq_len" in self.form.options:
            lengths = [ROW] * (len(joined(name)) // ROW)
        return Source(lengths, sum(tar.stat().st_size for tar in (self.data / name / "data").glob("*.tar")))

    def load(
        self,
        state: Mapping[str, Any] | None,
        sources: Sequence[str],
        *,
        world_size: int = 1,
        batch_size: int | None = None,
        **options: Any,
    ) -> Ranks:
        self.layout: dict[str, Any] = {"world_size": world_size, "batch_size": batch_size}
        arguments: dict[str, Any] = {"seed": self.seed, "state": state, "global_batch_size": self.sizes}
        folders: Any = {name: self.data / name / "data" for name in sources}
        if self.weights:
            arguments["weights_in"] = "tokens" if self.form.in_tokens else "samples"
            arguments["weights"] = self.weights
        else:
            (folders,) = folders.values()
        arguments |= {"batch_size": batch_size or self.law.size // world_size, "world_size": world_size}
        arguments |= {"model_id": self.data / "words", **self.form.options, **options}
        return Ranks(folders, order_batch_size=self.law.size, **arguments)

    def sources_from(self, step: int) -> list[str]:
        """Return the sources that a loader needs to continue from a step."""
        named = chain(*(held for _, held in self.weights))
        return [*dict.fromkeys([*self.law.names_from(step), *named])]

    def check(self, num_steps: int) -> None:
        """Take steps and compare each with the law."""
        for _ in range(num_steps):
            delivered, samples = self.ranks.step(), chain(*self.law.step(self.step))
            expected = [self.ids(sample) for sample in samples]
            assert [sample["input_ids"] for sample in delivered] == expected, f"step {self.step}"
            self.taken.add(self.step)
            self.step += 1
        state = self.ranks.state()
        for loader in self.ranks.loaders:
            assert loader.state_at(self.step) == state
            assert loader.num_steps_delivered == self.step
            assert loader.metrics.num_cut_tokens == 0

    def ids(self, sample: Sample) -> list[int]:
        if "seq_len" not in self.form.options:
            return ids_of(sample.source, sample.number)
        tokens = joined(sample.source)
        first = self.law.orders[sample.source].offset(sample.epoch, len(tokens)) + sample.number * ROW
        return [tokens[place % len(tokens)] for place in range(first, first + ROW)]

    def resume(self, step: int, **options: Any) -> None:
        """Continue from the state after ``step`` steps, with new loaders.

        They get the arguments of the last ones. If an amendment was replaced before it took effect, these no
        longer describe the run; then they get the stages that the run has.
        """
        state = self.ranks.loaders[0].state_at(step)
        self.ranks.close()
        if not self.law.holds(step, self.sizes, self.of_law(self.weights)):
            self.sizes = self.law.sizes
            if self.weights:
                given = [(first, self.weighed(held, mean_tokens)) for first, held in self.law.weights]
                self.weights = [(first, {name: float(held[name]) for name in held}) for first, held in given]
        self.ranks, self.step = self.load(state, self.sources_from(step), **options), step

    def of_law(self, weights: Sequence[tuple[int, Weights]]) -> list[tuple[int, Weights]]:
        """Convert weights of a loader to shares of samples."""
        return [(step, self.weighed(held, lambda name: 1 / mean_tokens(name))) for step, held in weights]

    def weighed(self, weights: Weights, times: Callable[[str], Fraction]) -> Mapping[str, Any]:
        """Multiply weights by a factor per source, if they are shares of tokens."""
        if not self.form.in_tokens:
            return weights
        return {name: Fraction(str(share)) * times(name) for name, share in weights.items()}

    def look_back(self, steps: Sequence[int]) -> None:
        """Compare what ``where`` says about earlier steps with the law, and what the loaders deliver."""
        state = self.ranks.state()
        path = self.data / "state.json"
        path.write_text(json.dumps(state))
        for step in steps:
            expected = [(sample.source, sample.number) for sample in chain(*self.law.step(step))]
            assert sorted(self.told_by_where(path, step)) == sorted(expected), f"where of step {step}"
        delivered = self.ranks
        for step in steps:
            self.ranks = self.load(state, self.sources_from(step), **self.layout)
            for loader in self.ranks.loaders:
                loader.load_state_dict(loader.state_at(step))
            assert [sample["input_ids"] for sample in self.ranks.step()] == [
                self.ids(sample) for sample in chain(*self.law.step(step))
            ], f"state_at({step})"
            self.ranks.close()
        self.ranks = delivered

    def told_by_where(self, path: Path, step: int) -> list[tuple[str, int]]:
        """Return (source, number) of the samples of a step, as the command ``where`` says."""
        names = self.sources_from(step)
        folders = [f"{name}={self.data / name / 'data'}" for name in names]
        if not self.weights:
            folders = [folder.partition("=")[2] for folder in folders]
        shown = call_main("where", *folders, "--state", path, "--step", step, "--json").ends(0)
        told = []
        for each in json.loads(shown.out.splitlines()[-1])["documents"]:
            shard, sample, *_ = map(int, each["address"].split(":"))
            name = each["source"] if self.weights else names[0]
            told.append((name, first_samples(self.data / name / "data")[shard] + sample))
        return told

    def first_of_epoch(self, epoch: int) -> int:
        return next(step for step in range(10**6) if self.law.position(step)[0] == epoch)

    def amend(
        self, *, sizes: Sequence[tuple[int, int]] = (), weights: Sequence[tuple[int, Weights]] = ()
    ) -> int:
        """Amend the run at its current step and return the border. Both schedules count from step 0."""
        self.sizes, self.weights = sizes or self.sizes, weights or self.weights
        sources, of_law = self.sources_from(self.step), self.of_law(self.weights)
        state = self.ranks.loaders[0].state_at(self.step)
        border = self.step
        if self.law.holds(self.step, self.sizes, of_law):
            self.law = self.law.confirmed(self.step, self.sizes, of_law)
        else:
            of_sources = {name: self.source(name) for name in sources}
            self.law, border = self.law.amended(self.step, of_sources, self.sizes, of_law)
        self.ranks.close()
        self.ranks = self.load(state, sources, amend=True)
        return border


def mixtures(form: Form) -> st.SearchStrategy[Weights]:
    names = form.sources if "boundaries" in form.options else MIXED  # rows can only be mixed with rows
    return st.dictionaries(st.sampled_from(names), st.sampled_from([1, 2, 7, 0.3]), min_size=1)


def schedules(values: st.SearchStrategy[Any], step: int) -> st.SearchStrategy[Any]:
    """Return schedules with one value, or with a second one that takes effect after ``step``."""
    later = st.tuples(st.integers(step + 1, step + 70), values)
    return st.tuples(st.tuples(st.just(0), values), later) | st.tuples(st.tuples(st.just(0), values))


def machine(data: Path, form: Form, workers: Sequence[int]) -> type[RuleBasedStateMachine]:
    """Return a state machine that drives runs of one form."""
    group = form.options.get("group_by_length", 1)
    can_look_back = "seq_len" not in form.options and "large" not in form.sources

    class Histories(RuleBasedStateMachine):
        @initialize(seed=st.integers(0, 2**63))
        def begin(self, seed: int) -> None:
            self.pair = Pair(data, form, seed)

        @rule(drawn=st.data(), num_steps=st.integers(1, 4), loaders=st.sampled_from(["old", "new", "new"]))
        def go_on(self, drawn: st.DataObject, num_steps: int, loaders: str) -> None:
            """New loaders have other ranks and batches, and start anywhere in the run's past or future."""
            if loaders == "new":
                size = self.pair.law.size
                worlds = [world for world in (1, 2, 3, 4, 6) if size // group % world == 0]
                world = drawn.draw(st.sampled_from(worlds))
                share = size // world
                batch_sizes = [number for number in range(1, share + 1) if share % number == 0]
                self.pair.resume(
                    drawn.draw(st.just(self.pair.step) | st.integers(0, 400)),
                    world_size=world,
                    batch_size=drawn.draw(st.sampled_from(batch_sizes[-3:])),
                    num_workers=drawn.draw(st.sampled_from(workers)),
                )
            self.pair.check(num_steps)

        @rule(
            drawn=st.data(), what=st.sampled_from(["sizes", "weights", "both"]), num_steps=st.integers(0, 2)
        )
        def amend(self, drawn: st.DataObject, what: str, num_steps: int) -> None:
            """Amend the run at its current step; the next rule may amend it again at the same step."""
            pair = self.pair
            sizes: Any = ()
            weights: Any = ()
            largest = max(form.later_ticks) * form.size
            if what != "weights" or not form.weights:
                ticks = [n for n in form.later_ticks if n * pair.law.size <= largest]
                drawn_sizes = drawn.draw(schedules(st.sampled_from(ticks), pair.step))
                sizes = [(first, num_ticks * pair.law.size) for first, num_ticks in drawn_sizes]
            if what != "sizes" and form.weights:
                weights = drawn.draw(schedules(mixtures(form), pair.step))
            before = pair.step
            border = pair.amend(sizes=sizes, weights=weights)
            assert before <= border <= before + 66 or border == 0
            pair.check(num_steps)
            if num_steps == 2:  # check across the border, where the steps before it must not change
                pair.resume(max(border - 1, 0))
                pair.check(2)

        @rule(num_steps=st.integers(0, 2))
        def amend_to_what_is_planned(self, num_steps: int) -> None:
            pair = self.pair
            assert pair.amend() == pair.step
            pair.check(num_steps)

        @rule(drawn=st.data())
        def look_back(self, drawn: st.DataObject) -> None:
            """``where`` names the samples of an earlier step, and state_at moves these loaders there."""
            pair = self.pair
            if pair.step and can_look_back:
                # A round's first step shows whether where has read the round's own shares.
                steps = st.integers(0, pair.step - 1)
                pair.look_back([drawn.draw(steps | steps.map(lambda step: step - step % 64))])

        def teardown(self) -> None:
            if not hasattr(self, "pair"):
                return
            pair = self.pair
            past = sorted(step for step in pair.taken if step < pair.step)
            if IS_CAMPAIGN and past and can_look_back:
                pair.look_back(past)
            pair.ranks.close()

    return Histories


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_first_epoch_follows_the_law_and_has_each_sample_once(data: Path, form: str) -> None:
    """An epoch drops fewer samples than a step takes. In a mixture each source has its own epochs.

    The ends of windows and stages are compared after a resume, too.
    """
    pair = Pair(data, FORMS[form], seed=11)
    of_epoch = pair.first_of_epoch(1)
    num_steps = min(of_epoch + 2, 150)
    pair.check(num_steps)
    counts = Counter(chain(*(chain(*pair.law.step(step)) for step in range(num_steps))))
    assert max(counts.values()) == 1
    epochs = Counter((sample.source, sample.epoch) for sample in counts)
    for (source, epoch), count in epochs.items():
        if (source, epoch + 1) in epochs and not form.startswith("mix"):
            assert len(pair.law.orders[source].lengths) - count < max(size for _, size in pair.law.sizes)
    of_sources = Counter("all" if not FORMS[form].weights else sample.source for sample in counts)
    (loader,) = pair.ranks.loaders
    assert loader.source_samples == {**dict.fromkeys(loader.source_names, 0), **of_sources}
    (of_window, *_) = [order.window_ticks for order in pair.law.orders.values()]
    for end in sorted({min(of_window, of_epoch), of_epoch, *(step for step, _ in pair.law.weights[1:])}):
        pair.resume(end - 1)
        pair.check(3)
    pair.ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "workers"),
    [
        *((form, [0]) for form in FORMS),
        *(pytest.param(form, [0, 1, 2], marks=pytest.mark.processes) for form in ("grouped", "mixture")),
    ],
)
def test_a_run_follows_the_law_through_resumes_on_other_ranks_jumps_and_amendments(
    data: Path, form: str, workers: list[int]
) -> None:
    num_histories = NUM_HISTORIES["mixed" if FORMS[form].weights else "plain"]
    histories = settings(
        max_examples=num_histories if workers == [0] else 1,
        stateful_step_count=NUM_RULES,
        derandomize=not IS_CAMPAIGN,
        database=None,
    )
    run_state_machine_as_test(machine(data, FORMS[form], workers), settings=histories)


LARGER = {"sizes": [(0, 24)]}
# One source is added, then another, then the first one is dropped.
OTHER_SOURCES = [
    {"weights": [(0, {"web": 2, "code": 1, "books": 1})]},
    {"weights": [(0, {"web": 1, "code": 1, "books": 2, "wiki": 0.7})]},
    {"weights": [(0, {"code": 1, "books": 1, "wiki": 3})]},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "amendments"),
    [
        ("documents", [LARGER]),
        # A source joins while the global batch grows: its order uses the tick size of the run.
        ("mixture", [{**LARGER, "weights": [(0, {"code": 1, "books": 3})]}]),
        ("mixture", OTHER_SOURCES),
        ("mixture by tokens", OTHER_SOURCES),
    ],
)
def test_an_amended_run_follows_the_law_from_every_state(
    data: Path, form: str, amendments: list[dict[str, Any]]
) -> None:
    """On other ranks, from states after the border of each amendment and from states before it."""
    pair = Pair(data, FORMS[form], seed=3)
    for amendment in amendments:
        pair.resume(pair.step + 30)
        step = pair.step
        border = pair.amend(**amendment)
        assert step < border <= step + 64
        pair.check(2)
        for place in (border + 70, border - 1, border, step):
            pair.resume(place, world_size=3)
            pair.check(2)
        pair.resume(border + 1)
    pair.ranks.close()
