"""Several sources in one run, by weights that a schedule may change; the same batches on every world."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loader.mixture import CYCLE_STEPS, ROUND_STEPS, Mixture, Stage, make_stages

from loader import OtherRun, TokenLoader, get_llama3_dataloader
from loader.order import Order
from loader.samples import WholeSamples
from shardprep.errors import UsageError
from tests.external_tars import write_numbered_tars
from tests.word_tokenizers import save_word_tokenizer

SIZES = {"web": 700, "code": 230, "books": 90}
FIRST_ID = {"web": 0, "code": 1000, "books": 2000}
SCHEDULE: list[tuple[int, dict[str, float]]] = [
    (0, {"web": 0.7, "code": 0.3}),
    (70, {"web": 0.2, "code": 0.5, "books": 0.3}),
    (150, {"web": 1}),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Documents of 1 to 5 tokens, of books of 11; the first id says which document it is."""
    root = tmp_path_factory.mktemp("data")
    save_word_tokenizer(root, 3000)
    for name, size in SIZES.items():
        (root / name).mkdir()
        first, rest = FIRST_ID[name], range(2900, 2910) if name == "books" else None
        write_numbered_tars(
            root / name,
            size,
            3,
            ids_of=lambda n, first=first, rest=rest: [first + n, *(rest or range(2900, 2900 + n % 5))],  # type: ignore[misc]
        )
    return {name: root / name for name in SIZES}


def load(data: dict[str, Path], world: int = 1, rank: int = 0, **options: Any) -> TokenLoader:
    made = {
        "num_workers": 0,
        "global_batch_size": 8,
        "seed": 3,
        "weights_schedule": SCHEDULE,
        "weights_in": "samples",
    }
    batch_size = options.pop("batch_size", 8 // world)
    model = data["web"].parent
    return get_llama3_dataloader(data, batch_size, model, rank=rank, world_size=world, **{**made, **options})


def shown(batch: Any) -> list[list[int]]:
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [ids[: mask.sum()].tolist() for ids, mask in pairs]


def steps(loader: TokenLoader, num_steps: int) -> list[list[list[int]]]:
    """Global batches of one rank from where it stands, through its epochs."""
    found: list[list[list[int]]] = []
    micro = len(loader) // loader.order.steps_per_epoch
    while len(found) < num_steps * micro:
        for batch in loader:
            found.append(shown(batch))
            if len(found) == num_steps * micro:
                break
    return [[*chain(*found[first : first + micro])] for first in range(0, len(found), micro)]


def source_of(ids: list[int]) -> str:
    return next(name for name in reversed(SIZES) if ids[0] >= FIRST_ID[name])


FORMS: dict[str, dict[str, Any]] = {
    "padded": {},
    "grouped": {"group_by_length": 2},
    "packed at load": {"seq_len": 16, "boundaries": "segment_ids"},
    "truncated": {"max_length": 3},
}


@pytest.mark.processes
@pytest.mark.parametrize("form", FORMS)
def test_mixed_global_batches_are_the_same_on_every_world_and_after_every_resume(
    data: dict[str, Path], form: str
) -> None:
    options, rng = FORMS[form], random.Random(form)
    with load(data, **options) as loader:
        end = max(loader.order.steps_per_epoch, 120) + 40
        whole = steps(loader, end)
        places = [0, 69, 70, 71, 150, loader.order.steps_per_epoch - 1, loader.order.steps_per_epoch]
        for place in [*places, *(rng.randrange(end - 1) for _ in range(6))]:
            loader.load_state_dict(json.loads(json.dumps(loader.state_at(place))))
            assert steps(loader, 1) == whole[place : place + 1], place
    worlds = {"padded": (8, 1), "grouped": (4, 2), "packed at load": (2, 2), "truncated": (4, 0)}
    world, workers = worlds[form]
    place, parts = rng.randrange(end - 4), []
    for rank in range(world):
        with load(data, world, rank, num_workers=workers if rank == 0 else 0, **options) as loader:
            loader.load_state_dict(loader.state_at(place))
            parts.append(steps(loader, 4))
    assert [[*chain(*step)] for step in zip(*parts, strict=True)] == whole[place : place + 4]


def test_a_schedule_changes_the_shares_at_its_exact_step(data: dict[str, Path]) -> None:
    with load(data) as loader:
        found = [Counter(map(source_of, step)) for step in steps(loader, 170)]
    assert all(counts["books"] == 0 for counts in found[:70])
    assert all(counts == {"web": 8} for counts in found[150:])
    for first, end, weights in ((0, 70, SCHEDULE[0][1]), (70, 150, SCHEDULE[1][1])):
        total = sum(found[first:end], Counter[str]())
        for name, weight in weights.items():
            assert total[name] == pytest.approx(weight * 8 * (end - first), abs=8)
    assert found[70]["books"] + found[71]["books"] > 0
    assert len({tuple(sorted(counts.items())) for counts in found[:70]}) > 2, "shares vary as in a shuffle"


def test_each_source_goes_through_its_own_order_epoch_after_epoch(data: dict[str, Path]) -> None:
    weights, num_steps = {"web": 0.1, "code": 0.3, "books": 0.6}, 5 * ROUND_STEPS
    with load(data, weights_schedule=None, weights=weights) as loader:
        found = [ids for step in steps(loader, num_steps) for ids in step]
        counts = Counter(map(source_of, found))
        assert loader.source_samples == counts
        for name, order in zip(SIZES, loader.order.orders, strict=True):
            numbers = Counter(ids[0] - FIRST_ID[name] for ids in found if source_of(ids) == name)
            expected: Counter[int] = Counter()
            for step in range(counts[name] // 8):
                expected.update(order.step_samples(*divmod(step, order.steps_per_epoch)).tolist())
            assert numbers == expected
            assert loader.source_epochs[name] == pytest.approx(counts[name] / (SIZES[name] // 8 * 8))
        assert loader.source_epochs["books"] > 2


def test_weights_in_tokens_are_kept_within_one_percent(data: dict[str, Path]) -> None:
    weights = {"web": 0.6, "books": 0.4}
    pair = {name: data[name] for name in ("web", "books")}
    with load(pair, weights_schedule=None, weights=weights, weights_in="tokens") as loader:
        tokens: Counter[str] = Counter()
        for step in steps(loader, 600):
            for ids in step:
                tokens[source_of(ids)] += len(ids)
    share = tokens["books"] / tokens.total()
    assert share == pytest.approx(0.4, abs=0.01)


def mixture(weights: list[float], num_slots: int = 64) -> Mixture:
    order = Order(
        num_samples=10**6, global_batch_size=num_slots, block_samples=10, window_samples=100, seed=1
    )
    names = tuple(f"s{number}" for number in range(len(weights)))
    return Mixture(
        names=names,
        orders=(order,) * len(weights),
        stages=make_stages(names, dict(zip(names, weights, strict=True)), None, None),
        global_batch_size=num_slots,
        seed=5,
    )


def test_the_counts_of_a_stage_are_those_of_its_steps_one_by_one() -> None:
    stage = Stage(first_step=0, weights=(0.5, 0.3, 0.2 - 1e-4, 1e-4))
    taken = np.zeros(4, np.int64)
    for step in range(3000):
        assert (stage.counts(step) == taken).all()
        assert np.abs(taken - np.array(stage.weights) * step).max() < 2
        taken[stage.cycle[step]] += 1
    assert (stage.counts(5 * CYCLE_STEPS + 7) == 5 * stage.counts(CYCLE_STEPS) + stage.counts(7)).all()


def test_a_sources_share_of_a_batch_varies_as_in_a_full_shuffle() -> None:
    mixed, num_slots = mixture([0.7, 0.3]), 64
    shares = []
    for first in range(0, 400 * ROUND_STEPS, ROUND_STEPS):
        pattern = mixed.pattern(mixed.round_at(first), range(num_slots))
        shares.append((pattern == 1).sum(axis=0))
    counts = np.concatenate(shares)
    binomial = num_slots * 0.7 * 0.3
    assert counts.mean() == pytest.approx(0.3 * num_slots, rel=0.01)
    assert 0.8 < counts.var() / binomial < 1.05


def test_a_mixed_loader_can_be_copied_and_looked_into(data: dict[str, Path]) -> None:
    with load(data) as loader:
        found = steps(loader, 3)
        again = pickle.loads(pickle.dumps(loader))
        assert again.state_dict() == loader.state_dict()
        loader.load_state_dict(loader.state_at(2))
        assert shown(loader.peek()) == found[2]


@pytest.mark.parametrize(
    "changed",
    [
        {"weights_schedule": [(0, {"web": 0.7, "code": 0.3})]},
        {"weights_schedule": None, "weights": {"web": 1, "code": 1, "books": 1}},
        {"weights_in": "tokens"},
    ],
)
def test_a_state_of_another_mixture_is_refused(data: dict[str, Path], changed: dict[str, Any]) -> None:
    with load(data) as loader:
        state = loader.state_at(5)
    with (
        load(data, **changed) as other,
        pytest.raises(OtherRun, match="another mixture: it has from step 5 on"),
    ):
        other.load_state_dict(state)


RATIOS: list[tuple[tuple[float, ...], tuple[float, ...]]] = [
    ((0.5, 0.5, 0), (5, 5, 0)),
    ((0.1, 0.2, 0.7), (1, 2, 7)),
    ((1, 2, 3), (1 / 6, 2 / 6, 3 / 6)),
    ((0.3, 0.6, 0.1), (3e-9, 6e-9, 1e-9)),
    ((0.3, 13106.9, 0), (3, 131069, 0)),
    *(((a, 10 - a, b), (a / 10, (10 - a) / 10, b / 10)) for a in range(1, 10) for b in (1, 3, 7)),
]


@pytest.mark.parametrize("mean_tokens", [None, [3.0, 2.9, 11.0]])
def test_weights_in_the_same_proportions_are_the_same_run(mean_tokens: list[float] | None) -> None:
    for pair in RATIOS:
        one, other = (
            make_stages([*SIZES], dict(zip(SIZES, weights, strict=True)), None, mean_tokens)[0]
            for weights in pair
        )
        assert (one.cycle == other.cycle).all(), pair


def test_states_of_weights_in_the_same_proportions_are_exchanged(data: dict[str, Path]) -> None:
    stages = [[(0, {"web": a, "code": b}), (70, {"web": 1})] for a, b in ((0.1, 0.2), (1, 2))]
    with load(data, weights_schedule=stages[0]) as one, load(data, weights_schedule=stages[1]) as other:
        other.load_state_dict(one.state_at(3))
        one.load_state_dict(other.state_at(3))
        assert steps(one, 1) == steps(other, 1)


def test_a_state_with_a_damaged_schedule_is_refused(data: dict[str, Path]) -> None:
    with load(data) as loader:
        state = loader.state_at(5)
        for damaged in ("0: [", "0: 1", "", None, "1: [0.2, 0.3, 0.5]"):
            with pytest.raises(OtherRun, match="schedule"):
                loader.load_state_dict(
                    {**state, "fingerprint": {**state["fingerprint"], "schedule": damaged}}
                )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights_schedule": None}, "pass either weights= or weights_schedule="),
        ({"weights": {"web": 1}}, "pass either weights= or weights_schedule="),
        (
            {"weights_schedule": None, "weights": {"wbe": 1}},
            r"non-negative numbers for web, code, books, not all zero \(got \{'wbe': 1\}\)",
        ),
        (
            {"weights_schedule": None, "weights": {"web": -1}},
            "a dict of non-negative numbers for web, code, books",
        ),
        ({"weights_schedule": None, "weights": {"web": 0}}, "not all zero"),
        ({"weights_schedule": None, "weights": "1,1,1"}, r"not all zero \(got '1,1,1'\)"),
        (
            {"weights_schedule": None, "weights": {"web": 1, "code": 1e-9}},
            "code would be less than one of 65536",
        ),
        (
            {"weights_schedule": [(5, {"web": 1})]},
            r"stages from the steps \[5\], expected whole numbers from 0",
        ),
        ({"weights_schedule": [(0, {"web": 1}), (0, {"code": 1})]}, r"from the steps \[0, 0\]"),
        ({"weights_in": "bytes"}, "weights_in is 'bytes'"),
        ({"split": "validation"}, "for each source"),
        ({"batch_size": 128, "global_batch_size": 128}, "the data set has 90 samples"),
    ],
)
def test_what_makes_no_mixture_is_refused(data: dict[str, Path], options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load(data, **options)


def test_weights_without_named_sources_are_refused(data: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="weights and weights_schedule are for named sources"):
        get_llama3_dataloader(data["web"], 8, data["web"].parent, weights={"web": 1})


def test_an_epoch_that_ends_within_a_round_leaves_the_next_one_nothing_to_read_again(
    data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads = WholeSamples.read, []

    def counted(self: WholeSamples, *args: Any) -> Any:
        reads.append(args)
        return read(self, *args)

    monkeypatch.setattr(WholeSamples, "read", counted)
    with load(data, weights_schedule=None, weights={"web": 0.7, "code": 0.3}) as loader:
        assert loader.order.steps_per_epoch % ROUND_STEPS
        for _ in loader:
            pass
        num_reads = len(reads)
        next(iter(loader))
    assert 0 < len(reads) == num_reads
