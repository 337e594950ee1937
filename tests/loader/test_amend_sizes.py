"""Global batches and rows whose sizes are amended during a run: each sample once, on every world."""

from __future__ import annotations

import json
import os
import pickle
import random
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loader.amend
import pytest

from loader import OtherRun, TokenLoader, get_llama3_dataloader
from shardprep.__main__ import main
from shardprep.errors import BrokenShard, UsageError
from tests.external_tars import write_numbered_tars
from tests.word_tokenizers import save_word_tokenizer

# Random histories of each form, and resumes of each; ``make torture`` runs many, also on 8 ranks.
IS_CAMPAIGN = os.environ.get("HISTORIES") == "all"
HISTORIES, RESUMES = (20, 50) if IS_CAMPAIGN else (2, 4)
L = 24 if IS_CAMPAIGN else 12  # the run's first global batch: what its order is laid out in
NUM_SAMPLES = 17 * L - 1
ROW = 4
FORMS: dict[str, dict[str, Any]] = {
    "documents": {},
    "grouped": {"group_by_length": 2},
    "rows": {"seq_len": ROW, "boundaries": "segment_ids"},
    "shifted rows": {"seq_len": ROW, "targets": "shifted"},
    "mixture": {"weights": {"web": 2, "code": 1}, "weights_in": "samples"},
}
Step = list[list[int]]  # a row of ids after another


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 1 to 5 tokens; the first id says which one it is."""
    folder = tmp_path_factory.mktemp("data")
    save_word_tokenizer(folder, 3000)
    for name, size, first in (("web", NUM_SAMPLES, 1), ("code", 15 * L // 2, 1001)):
        (folder / name).mkdir()
        write_numbered_tars(
            folder / name,
            size,
            3,
            ids_of=lambda n, first=first: [first + n, *range(2900, 2900 + n % 5)],  # type: ignore[misc]
        )
    return folder


def load(data: Path, world: int = 1, rank: int = 0, **options: Any) -> TokenLoader:
    sources: Any = data / "web"
    if "weights" in options or "weights_schedule" in options:
        sources = {name: data / name for name in ("web", "code")}
    made = {"num_workers": 0, "seed": 3, "batch_size": L // world, **options}
    return get_llama3_dataloader(sources, model_id=data, rank=rank, world_size=world, **made)


def steps(loader: TokenLoader, num_steps: int) -> list[Step]:
    """The steps of one rank from where it stands, through its epochs, as ``ends_step`` tells them apart."""
    found: list[Step] = []
    held: Step = []
    while len(found) < num_steps:
        for batch in loader:
            pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
            held += [ids[: mask.sum()].tolist() for ids, mask in pairs]
            if loader.ends_step:
                found.append(held)
                held = []
                if len(found) == num_steps:
                    break
    return found


class Model:
    """What a run should deliver, told by a loader of equal global batches of L alone."""

    def __init__(self, data: Path, form: str, num_epochs: int) -> None:
        with load(data, global_batch_size=L, **FORMS[form]) as loader:
            self.epochs = [steps(loader, len(loader)) for _ in range(num_epochs)]
        self.epoch = self.taken = 0
        self.found: list[Step] = []

    def go(self, sizes: list[tuple[int, int]], num_steps: int) -> None:
        for _ in range(num_steps):
            self._begin_where_it_fits(sizes)
            size = self._size(sizes)
            self.found.append([*chain(*self.epochs[self.epoch][self.taken : self.taken + size])])
            self.taken += size
        self._begin_where_it_fits(sizes)  # an epoch that is over stays so

    def _size(self, sizes: list[tuple[int, int]]) -> int:
        return next(size // L for first, size in reversed(sizes) if first <= len(self.found))

    def _begin_where_it_fits(self, sizes: list[tuple[int, int]]) -> None:
        if self.taken + self._size(sizes) > len(self.epochs[self.epoch]):
            self.epoch, self.taken = self.epoch + 1, 0


class History:
    """A run whose sizes are amended at random steps: what it delivered, and a state of every step."""

    def __init__(self, data: Path, form: str, rng: random.Random) -> None:
        self.found: list[Step] = []
        self.states: list[tuple[dict[str, Any], dict[str, Any]]] = []  # the options, and the state
        self.ends: list[int] = []
        self.model = Model(data, form, 100 if IS_CAMPAIGN else 30)
        state: Any = None
        for _ in range(rng.randint(2, 6)):
            sizes = [(0, L * rng.choice([1, 1, 2, 3, 5]) if self.found else L)]
            if rng.random() < 0.4 and self.found:
                sizes.append((len(self.found) + rng.randint(1, 12), L * rng.choice([1, 2, 4, 7])))
            options = {**FORMS[form], "batch_size_schedule": sizes}
            if len(sizes) == 1:
                options = {**FORMS[form], "global_batch_size": sizes[0][1]}
            num_steps = rng.choice([1, 3, 8, 20])
            first = len(self.found)
            with load(data, amend=state is not None, **options) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                self.found += steps(loader, num_steps)
                self.states += [
                    (options, json.loads(json.dumps(loader.state_at(step))))
                    for step in range(first, first + num_steps)
                ]
                state = loader.state_dict()
                assert state == loader.state_at(len(self.found))
            self.model.go(sizes, num_steps)
            self.ends.append(len(self.found))


def tokens(step: Step) -> list[int]:
    return [*chain(*step)]


def check_history(data: Path, form: str, seed: int, num_resumes: int, workers: list[int]) -> None:
    rng = random.Random(f"{form} {seed}")
    history = History(data, form, rng)
    assert [tokens(step) for step in history.found] == [tokens(step) for step in history.model.found]
    if form != "mixture" and not form.endswith("rows"):
        check_each_sample_once(history)
    for _ in range(num_resumes):
        place = rng.randrange(len(history.found))
        options, state = history.states[place]
        num_steps = min(4, next(end for end in history.ends if place < end) - place)
        num_rows = L // FORMS[form].get("group_by_length", 1)
        world = rng.choice([world for world in (1, 2, 3, 4, 6, 8) if num_rows % world == 0])
        batch_size = rng.choice([n for n in range(1, L // world + 1) if L // world % n == 0])
        if form == "grouped":
            batch_size = L // world
        parts = []
        for rank in range(world):
            with load(
                data, world, rank, **{**options, "num_workers": rng.choice(workers), "batch_size": batch_size}
            ) as loader:
                loader.load_state_dict(state)
                parts.append(steps(loader, num_steps))
        for number, of_ranks in enumerate(zip(*parts, strict=True), start=place):
            share = L // world
            joined = [
                row
                for first in range(0, len(of_ranks[0]), share)
                for part in of_ranks
                for row in part[first : first + share]
            ]
            assert joined == history.found[number], (place, number, world)


def check_each_sample_once(history: History) -> None:
    """Of the documents' first ids, by the epochs of the states alone."""
    seen: dict[int, list[int]] = {}
    for (_, state), step in zip(history.states, history.found, strict=True):
        seen.setdefault(state["epoch"], []).extend(ids[0] for ids in step)
    for epoch, ids in seen.items():
        assert len(ids) == len({*ids}), epoch
        if epoch + 1 in seen:
            assert NUM_SAMPLES - len(ids) < 7 * L, "less than the largest global batch is left out"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(HISTORIES))
def test_random_histories_of_sizes_are_one_order_on_every_world(data: Path, form: str, seed: int) -> None:
    check_history(data, form, seed, RESUMES, workers=[*[0] * 300, 1, 2, 3] if IS_CAMPAIGN else [0])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("form", FORMS)
def test_workers_of_a_rank_agree_on_histories_of_sizes(data: Path, form: str) -> None:
    check_history(data, form, 100, num_resumes=3, workers=[0, 1, 2])


def test_a_law_that_forgets_the_sizes_of_the_past_is_noticed(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    amended = loader.amend._amended_run

    def forgetful(*args: Any) -> Any:
        run = amended(*args)
        return replace(run, sizes=[(0, run.sizes[-1][1])], amended=())

    monkeypatch.setattr(loader.amend, "_amended_run", forgetful)
    with pytest.raises(AssertionError):
        check_history(data, "documents", 2, num_resumes=0, workers=[0])


def at_step(data: Path, step: int, **options: Any) -> dict[str, Any]:
    with load(data, **options) as loader:
        return loader.state_at(step)


def test_the_state_keeps_the_sizes_as_a_text_under_names_that_all_states_have(data: Path) -> None:
    state = at_step(data, 9, global_batch_size=L)
    names = {*state["fingerprint"]}
    with load(data, global_batch_size=2 * L, amend=True) as loader:
        loader.load_state_dict(state)
        again = loader.state_dict()
        assert again["fingerprint"]["global_batch_size"] == "12; 0: 12; 9/0: 24"
        assert "from step 9 (amended): 24 samples" in loader.describe()
        copy = pickle.loads(pickle.dumps(loader))
        assert copy.state_dict() == again
        assert steps(copy, 5) == steps(loader, 5)
        assert loader.num_accumulated == 2
    with load(data, global_batch_size=2 * L) as same:  # torch.distributed.checkpoint reads the names of this
        assert {*same.state_dict()["fingerprint"]} == {*again["fingerprint"]} == names
        same.load_state_dict(again)  # and needs no word
        assert same.state_dict() == again
    planned: dict[str, Any] = {"batch_size_schedule": [(0, L), (9, 2 * L)]}
    with load(data, **planned) as ramped:
        assert {*ramped.state_dict()["fingerprint"]} == names
        ramped.load_state_dict(again)
        assert ramped.state_dict() == again


def test_an_amendment_to_equal_sizes_is_none(data: Path) -> None:
    state = at_step(data, 9, global_batch_size=L)
    for options in ({"global_batch_size": L}, {"batch_size_schedule": [(0, L), (5, L)]}):
        with load(data, amend=True, **options) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state


def test_an_epoch_that_was_over_stays_so_and_one_whose_rest_is_too_small_ends(data: Path) -> None:
    # 16 steps of L an epoch: after 3 steps of 5 L no other fits, and one of L would.
    state = at_step(data, 3, batch_size_schedule=[(0, 5 * L), (90, L)])
    assert (state["epoch"], state["step"]) == (1, 0)
    with load(data, global_batch_size=L, amend=True) as loader:
        loader.load_state_dict(state)
        assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (1, 0)
        assert loader.state_dict()["fingerprint"]["global_batch_size"] == "12; 0: 60; 3/1: 12"
        assert len([*loader]) == 16
    state = at_step(data, 14, global_batch_size=L)
    with load(data, global_batch_size=3 * L, amend=True) as loader:
        loader.load_state_dict(state)
        assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (1, 0)


def test_a_state_of_before_an_amendment_goes_on_as_the_run_did(data: Path) -> None:
    with load(data, global_batch_size=2 * L, amend=True) as loader:
        loader.load_state_dict(at_step(data, 9, global_batch_size=L))
        early = loader.state_at(5)
        loader.load_state_dict(early)
        assert [len(step) for step in steps(loader, 6)] == [L] * 4 + [2 * L] * 2


def test_sizes_and_weights_are_amended_together(data: Path) -> None:
    """The order's steps are those of a run whose weights alone change, at the same place of the order."""
    first, other = {"web": 2, "code": 1}, {"web": 1, "code": 4}
    samples: dict[str, Any] = {"weights_in": "samples"}
    state = at_step(data, 6, global_batch_size=L, weights=first, **samples)
    with load(data, global_batch_size=L, weights=other, amend=True, **samples) as loader:
        loader.load_state_dict(state)
        expected = steps(loader, 15)
        assert loader.order.amended_at == 6
    with load(data, global_batch_size=3 * L, weights=other, amend=True, **samples) as loader:
        loader.load_state_dict(state)
        assert tokens(list(chain(*steps(loader, 5)))) == tokens(list(chain(*expected)))


def test_a_schedule_of_weights_counts_steps_of_training_whatever_their_sizes(data: Path) -> None:
    options: dict[str, Any] = {
        "weights_schedule": [(0, {"web": 1}), (10, {"code": 1})],
        "weights_in": "samples",
    }
    state = at_step(data, 6, global_batch_size=L, **options)
    with load(data, global_batch_size=2 * L, amend=True, **options) as loader:
        loader.load_state_dict(state)
        found = steps(loader, 7)
        state = loader.state_dict()
    sources = [{"code" if 1000 < ids[0] < 2900 else "web" for ids in step} for step in found]
    assert sources == [{"web"}] * 4 + [{"code"}] * 3
    with load(data, global_batch_size=2 * L, **options) as loader:
        loader.load_state_dict(state)  # the same plan needs no word


def test_more_workers_than_slots_of_the_first_global_batch_are_not_started(data: Path) -> None:
    state = at_step(data, 3, global_batch_size=2, batch_size=1)
    with load(data, batch_size=1, global_batch_size=8, amend=True, num_workers=4) as loader:
        loader.load_state_dict(state)
        assert loader._stream._num_workers == 2


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"global_batch_size": 2 * L},
            OtherRun,
            "global_batch_size 12 in the state, 24 here; pass amend=True",
        ),
        (
            {"global_batch_size": 30, "batch_size": 6, "amend": True},
            OtherRun,
            r"global batch is 30 .*multiple of 12, such as 24 or 36",
        ),
        (
            {"global_batch_size": 24, "batch_size": 24, "amend": True},
            OtherRun,
            r"global_batch_size 12 in the state, 24 here; .* batch_size can be \[1, 2, 3, 4, 6, 12\]",
        ),
        (
            {"global_batch_size": 2 * L, "seed": 4, "amend": True},
            OtherRun,
            "^the state is of .*seed 3 in the",
        ),
        (
            {"batch_size_schedule": [(0, 2 * L), (5, L), (20, 3 * L)], "amend": True},
            OtherRun,
            r"batch_size_schedule has other stages in the steps 0 to 5 .*: 24 here, 12 there",
        ),
    ],
)
def test_sizes_that_do_not_go_on_are_refused(
    data: Path, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    state = at_step(data, 9, global_batch_size=L)
    with load(data, **options) as loader, pytest.raises(error, match=said):
        loader.load_state_dict(state)


def test_sizes_are_amended_between_two_steps_alone(data: Path) -> None:
    with load(data, global_batch_size=2 * L) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with (
        load(data, global_batch_size=4 * L, amend=True) as other,
        pytest.raises(UsageError, match="inside of a step, after 1 batches"),
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12",
        "12;",
        "12; 0: 24; 0: 12",
        "12; 1: 12",
        "12; 0: 30",
        "0; 0: 12",
        "12; 0: 12; 9/7: 24",
        "12; 0: x",
    ],
)
def test_a_damaged_history_of_sizes_is_refused(data: Path, text: str) -> None:
    state = at_step(data, 3, global_batch_size=L)
    state["fingerprint"]["global_batch_size"] = text
    with load(data, global_batch_size=L) as loader, pytest.raises((BrokenShard, OtherRun), match="the state"):
        loader.load_state_dict(state)


def test_the_state_of_fifty_amendments_of_sizes_is_small(data: Path) -> None:
    state: Any = at_step(data, 0, global_batch_size=L)
    for number in range(50):
        with load(data, global_batch_size=(2 - number % 2) * L, amend=True) as loader:
            loader.load_state_dict(state)
            steps(loader, 1)
            state = loader.state_dict()
    assert state["fingerprint"]["global_batch_size"].count("/") == 50
    assert len(json.dumps(state)) < 2000


def test_where_tells_the_steps_of_a_run_whose_sizes_changed(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with load(data, global_batch_size=2 * L, amend=True) as loader:
        loader.load_state_dict(at_step(data, 9, global_batch_size=L))
        found = steps(loader, 12)  # past the epoch's end, where one of its batches is left out
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    words = ["where", str(data / "web"), "--model_id", str(data), "--state", str(tmp_path / "state.json")]
    for step in (9, 12, 13, 14, 20):
        assert main([*words, "--step", str(step), "--json"]) == 0
        documents = json.loads(capsys.readouterr().out)["documents"]
        firsts = [68 * int(each["tar"][-5]) + each["sample"] + 1 for each in documents]
        assert firsts == [ids[0] for ids in found[step - 9]]
    assert main([*words, "--step", "21"]) == 2
    assert "take a later checkpoint" in capsys.readouterr().err


def test_a_trainer_accumulates_by_the_global_batches_that_come(data: Path) -> None:
    from loader.trainer import check_trainer_arguments

    with load(data, global_batch_size=2 * L, amend=True) as loader:
        loader.load_state_dict(at_step(data, 9, global_batch_size=L))
        arguments = [
            SimpleNamespace(train_batch_size=L, gradient_accumulation_steps=number) for number in (1, 2)
        ]
        check_trainer_arguments(arguments[1], loader)
        with pytest.raises(UsageError, match="the loader's global batch is 24"):
            check_trainer_arguments(arguments[0], loader)
