"""Global batches that grow with the steps of a run: nothing lost or twice, elastic as all else."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loader import OtherRun, TokenLoader, get_llama3_dataloader
from loader.state import Position, RunSteps
from shardprep.errors import UsageError
from tests.external_tars import write_numbered_tars
from tests.word_tokenizers import save_word_tokenizer

NUM_SAMPLES = 203
SIZES = [(0, 8), (5, 24), (9, 16), (30, 32)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 1 to 5 tokens; the first id says which document it is."""
    folder = tmp_path_factory.mktemp("data")
    save_word_tokenizer(folder, 3000)
    write_numbered_tars(folder, NUM_SAMPLES, 3, ids_of=lambda n: [n, *range(2900, 2900 + n % 5)])
    return folder


def load(data: Any, world: int = 1, rank: int = 0, **options: Any) -> TokenLoader:
    model = (
        (next(iter(data.values())) if isinstance(data, dict) else data) if "model" not in options else None
    )
    made = {"num_workers": 0, "seed": 3, "batch_size_schedule": SIZES}
    batch_size = 8 // world
    return get_llama3_dataloader(data, batch_size, model, rank=rank, world_size=world, **{**made, **options})


def documents_of(batch: Any) -> list[list[int]]:
    return [
        ids[: mask.sum()].tolist()
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def steps(loader: TokenLoader, num_steps: int) -> list[list[list[int]]]:
    """The steps of one rank from where it stands, through its epochs, as ``ends_step`` tells them apart."""
    found: list[list[list[int]]] = []
    held: list[list[int]] = []
    num_batches = 0
    while True:
        for batch in loader:
            held += documents_of(batch)
            num_batches += 1
            if loader.ends_step:
                assert num_batches == loader.num_accumulated
                found.append(held)
                held, num_batches = [], 0
                if len(found) == num_steps:
                    return found


def size_at(step: int) -> int:
    return next(size for first, size in reversed(SIZES) if first <= step)


def test_each_step_has_the_size_of_its_stage_and_an_epoch_has_no_sample_twice(data: Path) -> None:
    with load(data) as loader:
        whole = steps(loader, 45)
        assert [len(step) for step in whole] == [size_at(step) for step in range(45)]
        firsts = [loader.run.first_step(epoch) for epoch in range(6)]
        assert firsts[-1] <= 45
    for first, end in pairwise(firsts):
        of_epoch = Counter(ids[0] for step in whole[first:end] for ids in step)
        assert set(of_epoch.values()) == {1}
        assert NUM_SAMPLES - len(of_epoch) < size_at(end), "less than a global batch is left out"


def test_the_samples_are_those_of_the_order_one_after_another(data: Path) -> None:
    with load(data) as ramped, load(data, batch_size_schedule=None) as plain:
        end = ramped.run.steps_in(0)
        found = [ids for step in steps(ramped, end) for ids in step]
        expected = [ids for batch in plain for ids in documents_of(batch)]
    assert found == expected[: len(found)]


@pytest.mark.processes
@pytest.mark.parametrize(("world", "workers"), [(2, 2), (4, 0), (8, 0)])
def test_a_ramped_run_is_the_same_on_every_world_and_resumes_on_another(
    data: Path, world: int, workers: int
) -> None:
    with load(data) as loader:
        whole = steps(loader, 45)
        place = random.Random(world).randrange(2, 34)
        for at in (0, 4, 5, 9, 30, loader.run.first_step(1), loader.run.first_step(2) - 1, place):
            loader.load_state_dict(json.loads(json.dumps(loader.state_at(at))))
            assert loader.num_steps_delivered == at
            assert steps(loader, 2) == whole[at : at + 2]
        state = loader.state_at(place)
    parts = []
    for rank in range(world):
        with load(data, world, rank, num_workers=workers) as loader:
            loader.load_state_dict(state)
            batches = steps(loader, 10)
            parts.append(batches)
            assert loader.num_steps_delivered == place + 10
            assert loader.state_dict() == {**loader.state_at(place + 10)}
    # Accumulated batches come a step of the order after another: 8 samples of all ranks together.
    for number, of_ranks in enumerate(zip(*parts, strict=True)):
        share = 8 // world
        rows = [
            ids
            for first in range(0, len(of_ranks[0]), share)
            for part in of_ranks
            for ids in part[first : first + share]
        ]
        assert rows == whole[place + number]


def test_a_state_inside_of_a_grown_step_resumes_there(data: Path) -> None:
    with load(data) as loader:
        whole = steps(loader, 8)
        loader.load_state_dict(loader.state_at(6))
        batches = iter(loader)
        seen = documents_of(next(batches)) + documents_of(next(batches))
        assert not loader.ends_step
        state = loader.state_dict()
        assert (state["step"], state["num_micro"]) == (6, 2)
        loader.load_state_dict(state)
        assert documents_of(loader.peek()) == whole[6][16:]
        seen += steps_of_rest(loader)
        assert seen == whole[6]
        assert loader.num_steps_delivered == 7


def steps_of_rest(loader: TokenLoader) -> list[list[int]]:
    found: list[list[int]] = []
    for batch in loader:
        found += documents_of(batch)
        if loader.ends_step:
            break
    return found


def test_positions_and_steps_are_counted_alike_by_the_law_and_one_by_one() -> None:
    draw = random.Random(0)
    for _ in range(60):
        firsts = [0, *sorted(draw.sample(range(1, 60), draw.randrange(4)))]
        sizes = tuple((first, draw.randint(1, 6)) for first in firsts)
        run = RunSteps(order_steps_per_epoch=draw.randint(6, 25), num_batches=2, sizes=sizes)
        epoch = step = taken = 0
        for number in range(150):
            if taken + run.order_steps_in(number) > run.order_steps_per_epoch:
                assert (run.steps_in(epoch), run.order_steps_of(epoch)) == (step, taken)
                epoch, step, taken = epoch + 1, 0, 0
            assert run.position(number) == Position(epoch=epoch, step=step)
            assert run.step_of(run.position(number)) == number
            assert run.order_step(Position(epoch=epoch, step=step)) == taken
            step, taken = step + 1, taken + run.order_steps_in(number)
        again = RunSteps(order_steps_per_epoch=run.order_steps_per_epoch, num_batches=2, sizes=sizes)
        assert again.position(149) == run.position(149), "asked for at once"


def test_a_mixture_changes_its_weights_at_the_steps_of_training(data: Path, tmp_path: Path) -> None:
    write_numbered_tars(tmp_path, 150, 2, ids_of=lambda n: [1000 + n])
    sources = {"one": data, "other": tmp_path}
    schedule = [(0, {"one": 1}), (7, {"other": 1}), (20, {"one": 1, "other": 1})]
    with load(sources, weights_schedule=schedule, weights_in="samples") as loader:
        found = steps(loader, 24)
    assert [len(step) for step in found] == [size_at(step) for step in range(24)]
    of_other = [sum(ids[0] >= 1000 for ids in step) for step in found]
    assert of_other[:20] == [0] * 7 + [size_at(step) for step in range(7, 20)]
    assert 0 < sum(of_other[20:]) < sum(map(size_at, range(20, 24)))


def test_a_state_of_another_ramp_is_refused(data: Path) -> None:
    with load(data) as loader:
        state = loader.state_at(5)
    with (
        load(data, batch_size_schedule=[(0, 8), (5, 24)]) as other,
        pytest.raises(OtherRun, match="32 from step 30 on in the state, 24 here; pass amend=True"),
    ):
        other.load_state_dict(state)
    with (
        load(data, batch_size_schedule=None) as other,
        pytest.raises(
            OtherRun, match=r"global_batch_size 24 from step 5 on, 16 from step 9 on, .* in the state, 8 here"
        ),
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"global_batch_size": 8}, "pass one of them"),
        ({"batch_size_schedule": [(0, 8), (5, 12)]}, "global_batch_size 4 is no multiple of batch_size 8"),
        ({"batch_size_schedule": [(1, 8)]}, r"batch_size_schedule has stages from the steps \[1\]"),
        ({"batch_size_schedule": [(0, 8), (True, 16)]}, "expected whole numbers from 0 on"),
        ({"batch_size_schedule": [(0, 0)]}, "has 0, expected whole numbers from 1 on"),
        ({"batch_size_schedule": 8}, r"expected pairs such as \[\(0, 256\)"),
        ({"batch_size_schedule": [(0, 8), (5, 8 * 26)]}, "26 x the least, and an epoch has 25"),
        ({"split": "validation"}, "batch_size_schedule is for training"),
    ],
)
def test_what_makes_no_ramp_is_refused(data: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load(data, **options)
