"""A mixture that changes during a run: every source goes on at its own place, on every world."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
from collections import defaultdict
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from loader.mixture import Mixture, make_stages

from loader import OtherRun, TokenLoader, get_llama3_dataloader
from shardprep.__main__ import main
from shardprep.errors import UsageError
from tests.external_tars import write_numbered_tars
from tests.word_tokenizers import save_word_tokenizer

# Random histories of each form, and resumes of each; ``make torture`` runs many, also on 8 ranks.
IS_CAMPAIGN = os.environ.get("HISTORIES") == "all"
HISTORIES, RESUMES = (25, 50) if IS_CAMPAIGN else (1, 4)
L = 24 if IS_CAMPAIGN else 12
EOS = 5999
SIZES = {"web": 700, "code": 130, "books": 90, "wiki": 60, "chat": 400}
if IS_CAMPAIGN:  # packed at load, the least has more rows than a global batch
    SIZES |= {"books": 240, "wiki": 200, "code": 260}
FORMS: dict[str, dict[str, Any]] = {
    "padded": {},
    "grouped": {"group_by_length": 2},
    "packed at load": {"seq_len": 16, "boundaries": "segment_ids"},
}
Steps = list[list[list[int]]]
LATER = ("books", "wiki")  # in some histories these come as folders of web


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All ids of source k lie from 1000 k on; the first id of a document says which one it is."""
    root = tmp_path_factory.mktemp("data")
    save_word_tokenizer(root, 6000)
    for number, (name, size) in enumerate(SIZES.items()):
        (root / name).mkdir()
        first = 1000 * number + 1
        write_numbered_tars(
            root / name,
            size,
            3,
            ids_of=lambda n, first=first: [first + n, *range(first + 900, first + 900 + n % 5)],  # type: ignore[misc]
        )
    return {name: root / name for name in SIZES}


def load(
    data: dict[str, Path], plan: dict[str, Any], world: int = 1, rank: int = 0, **options: Any
) -> TokenLoader:
    """A loader of the sources that a plan has weights for; ``folders``: those of web."""
    plan = dict(plan)
    if folders := plan.pop("folders", None):
        data = {**data, "web": [data[name] for name in folders]}  # type: ignore[dict-item]
    stages = [plan["weights"]] if "weights" in plan else [weights for _, weights in plan["weights_schedule"]]
    names = dict.fromkeys(chain(*stages))
    made = {"num_workers": 0, "global_batch_size": L, "seed": 3, "weights_in": "samples", **plan, **options}
    made = {name: value for name, value in made.items() if value is not None}
    model = data["chat"].parent
    batch_size = L // (world * made.get("group_by_length", 1)) * made.get("group_by_length", 1)
    return get_llama3_dataloader(
        {name: data[name] for name in names}, batch_size, model, rank=rank, world_size=world, **made
    )


def steps(loader: TokenLoader, num_steps: int) -> Steps:
    """Global batches of one rank from where it stands, through its epochs."""
    found: Steps = []
    while len(found) < num_steps:
        for batch in loader:
            pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
            found.append([ids[: mask.sum()].tolist() for ids, mask in pairs])
            if len(found) == num_steps:
                break
    return found


def source_of(ids: list[int]) -> str:
    return [*SIZES][max(number for number in ids if number < 5000) // 1000]  # without EOS


def by_slot(found: Steps) -> dict[tuple[int, str], list[list[int]]]:
    """What each row of the global batch had of each source, one after another."""
    rows = defaultdict(list)
    for step in found:
        for row, ids in enumerate(step):
            rows[row, source_of(ids)].append(ids)
    return rows


def check_nothing_is_lost_or_repeated(found: Steps, whole: Steps) -> None:
    """Each slot goes through its part of each source as in a run that nobody amended."""
    expected = by_slot(whole)
    for key, rows in by_slot(found).items():
        assert len(rows) <= len(expected[key]), "the reference is too short"
        assert rows == expected[key][: len(rows)], key


class History:
    """A run with amendments at random steps: its plans, what it delivered and a state of every step."""

    def __init__(self, data: dict[str, Path], rng: random.Random, options: dict[str, Any]) -> None:
        self.found: Steps = []
        self.states: list[tuple[dict[str, Any], dict[str, Any]]] = []  # the plan, and the state
        self.names: list[str] = []  # in the order in which they came
        self.shares: list[tuple[int, int, dict[str, float]]] = []
        self.folders = ["web"]
        self.later = list(rng.sample(LATER, rng.randint(0, 2)))
        state = None
        for _ in range(rng.randint(2, 6)):
            plan = self._plan(rng)
            with load(data, plan, amend=state is not None, **options) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                first, num_steps = len(self.found), rng.choice([1, 5, 30, 64, 90])
                self.found += steps(loader, num_steps)
                self.states[first:] = [
                    (plan, json.loads(json.dumps(loader.state_at(step))))
                    for step in range(first, first + num_steps)
                ]
                self.shares.append((first, first + num_steps, plan["weights"]))
                state = loader.state_dict()
                assert state == loader.state_at(first + num_steps)
                assert sum(loader.source_samples.values()) == L * len(self.found)
                for part, count in loader.source_samples.items():
                    name, _, number = part.partition(" +")
                    name = self.folders[int(number)] if number else name
                    if not options:
                        assert count == sum(source_of(ids) == name for step in self.found for ids in step)

    def _plan(self, rng: random.Random) -> dict[str, Any]:
        sources = [name for name in SIZES if name not in (*self.folders[1:], *self.later)]
        names = rng.sample(sources, rng.randint(1, len(sources)))
        if "web" in names and "web" in self.names and self.later and rng.random() < 0.7:
            self.folders.append(self.later.pop())
        parts = [part for name in names for part in (self.folders if name == "web" else [name])]
        self.names += [name for name in parts if name not in self.names]
        weights = {name: rng.choice([1, 2, 7, 0.3]) for name in names}
        return {"weights": weights, "folders": [*self.folders]}

    def whole(self, data: dict[str, Path], options: dict[str, Any]) -> Steps:
        """As much of each source as the run may have had."""
        rest = [name for name in SIZES if name not in self.names]
        weights = dict.fromkeys([*self.names, *rest], 1)
        with load(data, {"weights": weights}, **options) as loader:
            return steps(loader, 5 * len(self.found) + 128)


def check_history(data: dict[str, Path], seed: int, form: str, num_resumes: int, workers: list[int]) -> None:
    rng, options = random.Random(f"{form} {seed}"), FORMS[form]
    history = History(data, rng, options)
    check_nothing_is_lost_or_repeated(history.found, history.whole(data, options))
    for first, end, weights in history.shares:
        for name, weight in weights.items():
            parts = history.folders if name == "web" else [name]
            count = sum(source_of(ids) in parts for step in history.found[first:end] for ids in step)
            expected = weight / sum(weights.values()) * L * (end - first)
            assert abs(count - expected) <= 4 * np.sqrt(L * min(end - first, 64)) + L, (first, end, name)
    for _ in range(num_resumes):
        place = rng.randrange(len(history.found))
        plan, state = history.states[place]
        num_steps = min(3, next(end for first, end, _ in history.shares if first <= place < end) - place)
        rows = L // options.get("group_by_length", 1)
        world, found = rng.choice([world for world in (1, 2, 3, 4, 6, 8) if rows % world == 0]), []
        for rank in range(world):
            with load(data, plan, world, rank, **{**options, "num_workers": rng.choice(workers)}) as loader:
                loader.load_state_dict(state)
                found.append(steps(loader, num_steps))
        joined = [[*chain(*step)] for step in zip(*found, strict=True)]
        assert joined == history.found[place : place + num_steps], (place, world)


@pytest.mark.parametrize("form", FORMS)
def test_random_histories_repeat_nothing_and_lose_nothing(data: dict[str, Path], form: str) -> None:
    for seed in range(1, HISTORIES + 1):
        check_history(data, seed, form, RESUMES, workers=[*[0] * 300, 1, 2, 3] if IS_CAMPAIGN else [0])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("seed", "form"), [(100, "padded"), (101, "packed at load")])
def test_workers_of_a_rank_agree_on_more_random_histories(
    data: dict[str, Path], form: str, seed: int
) -> None:
    check_history(data, seed, form, num_resumes=4, workers=[0, 0, 1, 3])


@pytest.mark.parametrize("form", FORMS)
def test_where_names_what_each_step_of_an_amended_run_saw(
    data: dict[str, Path], tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the tars' own numbers, as webdataset reads them, asked of the run's last state."""
    rng = random.Random(f"where {form}")
    history = History(data, rng, FORMS[form])
    ids_of: dict[str, list[list[int]]] = {}
    added = {name: f"web +{number}" for number, name in enumerate(history.folders) if number}
    state = tmp_path / "state.json"
    state.write_text(json.dumps(history.states[-1][1]))
    words = [f"{name}={data[name]}" for name in history.names if name not in added]
    words += [f"web={data[name]}" for name in history.folders[1:]]
    words += ["--model_id", str(data["web"].parent), "--state", str(state), "--json"]
    for step in rng.sample(range(len(history.found) - 1), 6):  # the last state is of before the last step
        assert main(["where", *words, "--step", str(step)]) == 0
        documents: dict[tuple[int, int, int], list[dict[str, Any]]] = defaultdict(list)
        for each in json.loads(capsys.readouterr().out)["documents"]:
            documents[each["rank"], each["batch"], each["row"]].append(each)
        for row, ids in zip(sorted(documents), history.found[step], strict=True):
            ends = [*(each["token"] for each in documents[row][1:]), len(ids)]
            for each, end in zip(documents[row], ends, strict=True):
                if each["tar"] not in ids_of:
                    samples = webdataset.WebDataset(each["tar"], shardshuffle=False)
                    ids_of[each["tar"]] = [json.loads(sample["token_ids.json"]) for sample in samples]
                whole = ids_of[each["tar"]][each["sample"]]
                assert each["source"] == added.get(source_of(whole), source_of(whole))
                piece = [number for number in ids[each["token"] : end] if number != EOS]
                assert str(piece)[1:-1] in str(whole)[1:-1], (step, each)


@pytest.mark.parametrize("form", FORMS)
def test_folders_added_to_a_source_are_mixed_in_by_their_share(data: dict[str, Path], form: str) -> None:
    """The source's own folders go on at their place; what is added is a source by itself, NAME +1."""
    options, weights = FORMS[form], {"web": 3, "chat": 1}
    found, states, state, folders = list[Any](), list[Any](), None, ["web"]
    ends = {"web": 40, "code": 75, "books": 200}
    for added, end in ends.items():
        folders = [*dict.fromkeys([*folders, added])]
        many: Any = {**data, "web": [data[name] for name in folders]}
        if state is not None and added != "web":
            with (
                load(many, {"weights": weights}, **options) as loader,
                pytest.raises(OtherRun, match="amend=True"),
            ):
                loader.load_state_dict(state)
        with load(many, {"weights": weights}, amend=state is not None, **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            first = len(found)
            found += steps(loader, end - first)
            states += [(many, json.loads(json.dumps(loader.state_at(step)))) for step in range(first, end)]
            state = loader.state_dict()
            names = set(loader.source_samples)
            sizes = {order.num_samples for order in loader.order.orders}
    assert names == {"web", "chat", "web +1", "web +2"}
    assert len(sizes) == 4
    with load(data, {"weights": {"web": 1, "chat": 1, "code": 1, "books": 1}}, **options) as loader:
        check_nothing_is_lost_or_repeated(found, steps(loader, 900))
        of_web = dict(
            zip(loader.order.names, (order.num_samples for order in loader.order.orders), strict=True)
        )
    del of_web["chat"]
    counts = {
        name: sum(source_of(ids) == name for step in found[ends["code"] :] for ids in step) for name in of_web
    }
    for name, count in counts.items():
        expected = of_web[name] / sum(of_web.values()) * 3 / 4 * L * (ends["books"] - ends["code"])
        assert abs(count - expected) <= 4 * np.sqrt(L * 64) + L, name
    for place in (0, 39, 40, 74, 75, 120):
        many, state = states[place]
        for world in (2, 3):
            parts = []
            for rank in range(world):
                with load(many, {"weights": weights}, world, rank, **options) as loader:
                    loader.load_state_dict(state)
                    parts.append(steps(loader, 1))
            assert [*chain(*(part[0] for part in parts))] == found[place], (place, world)


def test_a_folder_in_the_place_of_another_is_refused_and_one_may_be_dropped_again(
    data: dict[str, Path],
) -> None:
    weights = {"weights": {"web": 1, "chat": 1}}
    folders: list[list[str]] = [["web", "code"], ["web", "code", "books"], ["web", "code"], ["code", "web"]]
    state = None
    for number, names in enumerate(folders):
        many: Any = {**data, "web": [data[name] for name in names]}
        with load(many, weights, amend=True) as loader:
            if number == 3:
                with pytest.raises(OtherRun, match="put added folders behind those that it had"):
                    loader.load_state_dict(state)  # type: ignore[arg-type]
                return
            if state is not None:
                loader.load_state_dict(state)
            last = steps(loader, 40)
            state = loader.state_dict()
            assert any(source_of(ids) == "books" for step in last for ids in step) == ("books" in names)
        if number == 0:
            rare = {"weights": {"web": 1, "chat": 30_000}, "folders": [*names, "books"]}
            with (
                load(data, rare, amend=True) as loader,
                pytest.raises(UsageError, match=r"web \+1 would be less"),
            ):
                loader.load_state_dict(state)


def test_a_law_that_forgets_what_slots_had_of_a_cut_round_is_noticed(
    data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Mixture._before.func  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Mixture, "_before", property(lambda mixture: [(taken, 0 * ahead) for taken, ahead in before(mixture)])
    )
    plans = [{"weights": {"web": 1, "code": 1}}, {"weights": {"web": 2, "code": 1}}]
    with load(data, plans[0]) as loader:
        found = steps(loader, 30)
        whole = found + steps_from(loader, 30, 300)
        state = loader.state_at(30)
    with load(data, plans[1], amend=True) as loader:
        loader.load_state_dict(state)
        found += steps(loader, 100)
    with pytest.raises(AssertionError, match=r"web|code"):
        check_nothing_is_lost_or_repeated(found, whole)


def steps_from(loader: TokenLoader, step: int, num_steps: int) -> Steps:
    loader.load_state_dict(loader.state_at(step))
    return steps(loader, num_steps)


def test_the_past_of_an_amended_run_comes_again_across_its_amendments(data: dict[str, Path]) -> None:
    weights: list[dict[str, float]] = [
        {"web": 1, "code": 1},
        {"web": 3, "code": 1},
        {"code": 1, "web": 9, "wiki": 2},
    ]
    found: Steps = []
    state: Any = None
    for plan in weights:
        with load(data, {"weights": plan}, amend=state is not None) as loader:
            if state is not None:
                loader.load_state_dict(state)
            found += steps(loader, 40)
            state = loader.state_dict()
    with load(data, {"weights": weights[-1]}) as loader:
        loader.load_state_dict(state)
        for place in (0, 35, 40, 41, 79, 100):
            found_again = steps_from(loader, place, min(60, 120 - place))
            assert found_again == found[place : place + 60], place
        again = pickle.loads(pickle.dumps(loader))
        assert again.state_dict() == loader.state_dict()
        assert shown_first(again) == shown_first(loader)
        other = loader.state_at(5)
    with load(
        data, {"weights": weights[-1]}
    ) as fresh:  # torch.distributed.checkpoint reads the keys of this one
        assert {*fresh.state_dict()["fingerprint"]} == {*other["fingerprint"]}
    with load(data, {"weights": weights[1]}, amend=True) as back:  # to an earlier step, and on from there
        back.load_state_dict(other)
        assert back.order.amended_at == 5
        check_nothing_is_lost_or_repeated(
            [*found[:5], *steps(back, 60)], [*found, *steps_from(loader, 120, 200)]
        )


def shown_first(loader: TokenLoader) -> list[list[int]]:
    ids: list[list[int]] = loader.peek()["input_ids"].tolist()
    return ids


def test_without_the_word_a_state_of_another_mixture_is_refused_and_says_what_differs(
    data: dict[str, Path],
) -> None:
    with load(data, {"weights": {"web": 1, "code": 1}}) as loader:
        state = loader.state_at(70)
    with (
        load(data, {"weights": {"web": 3, "books": 1}}) as other,
        pytest.raises(
            OtherRun, match=r"from step 70 on web 0\.5, code 0\.5; .* web 0\.75, books 0\.25; .* amend=True"
        ),
    ):
        other.load_state_dict(state)


def test_stages_that_are_over_must_be_the_runs(data: dict[str, Path]) -> None:
    mixed: dict[str, float] = {"web": 1, "code": 1}
    with load(data, {"weights_schedule": [(0, mixed), (60, {"web": 1})]}) as loader:
        state = loader.state_at(70)
    longer = {"weights_schedule": [(0, mixed), (60, {"web": 1}), (90, {"code": 1})]}
    with load(data, longer, amend=True) as loader:
        loader.load_state_dict(state)
        found = steps(loader, 30)
        assert {source_of(ids) for step in found[:20] for ids in step} == {"web"}
        assert {source_of(ids) for step in found[20:] for ids in step} == {"code"}
        state = loader.state_dict()
    with load(data, longer) as loader:
        loader.load_state_dict(state)  # it is the plan that holds, and needs no word
    other = {"weights_schedule": [(0, {"code": 1}), (80, mixed)]}
    with (
        load(data, other, amend=True) as loader,
        pytest.raises(OtherRun, match="stages in the steps 70 to 80"),
    ):
        loader.load_state_dict(state)


def test_a_source_whose_data_changed_is_refused_by_its_name(data: dict[str, Path]) -> None:
    with load(data, {"weights": {"web": 1, "code": 1}}) as loader:
        state = loader.state_at(5)
    with (
        load({**data, "code": data["wiki"]}, {"weights": {"web": 1, "code": 2}}, amend=True) as other,
        pytest.raises(OtherRun, match="the source code is other data"),
    ):
        other.load_state_dict(state)


def test_another_seed_or_row_length_is_refused_also_with_the_word(data: dict[str, Path]) -> None:
    with load(data, {"weights": {"web": 1, "code": 1}}) as loader:
        state = loader.state_at(5)
    changes: list[tuple[str, dict[str, Any]]] = [
        ("seed", {"seed": 4}),
        ("seq_len", {"seq_len": 16}),
    ]
    for name, changed in changes:
        with (
            load(data, {"weights": {"web": 2, "code": 1}}, amend=True, **changed) as other,
            pytest.raises(OtherRun, match=f"{name} .* in the state"),
        ):
            other.load_state_dict(state)


def test_sources_keep_the_blocks_that_they_began_with(data: dict[str, Path]) -> None:
    """Another version may choose others. A source that is added later has those of this version."""
    plan = {"weights": {"web": 1, "code": 1}}
    with load(data, plan) as loader:
        usual, state = steps(loader, 8), loader.state_at(0)
    sources = re.sub(r"\[\d+, \d+\]", "[2, 6]", state["fingerprint"]["sources"])
    assert sources != state["fingerprint"]["sources"]
    state["fingerprint"]["sources"] = sources
    with load(data, plan) as loader:
        loader.load_state_dict(state)
        whole = steps(loader, 8)
        assert whole != usual
        state = loader.state_at(5)
        assert state["fingerprint"]["sources"] == sources
    with load(data, plan) as loader:
        loader.load_state_dict(state)
        assert steps(loader, 3) == whole[5:]
    with load(data, {"weights": {"web": 1, "code": 1, "chat": 1}}, amend=True) as loader:
        loader.load_state_dict(state)
        assert {source_of(ids) for step in steps(loader, 3) for ids in step} == {"web", "code", "chat"}
        kept, added = loader.state_dict()["fingerprint"]["sources"].rsplit("; ", 1)
        assert (kept, "[2, 6]" in added) == (sources, False)


def test_the_state_of_fifty_amendments_is_below_ten_kilobytes(data: dict[str, Path]) -> None:
    rng = random.Random(0)
    with load(data, {"weights": dict.fromkeys(SIZES, 1)}) as loader:
        state = loader.state_dict()
        stages = [loader.order.stages[0]]
        for number in range(1, 51):
            weights = {name: rng.uniform(1, 9) for name in rng.sample([*SIZES], 4)}
            (stage,) = make_stages([*SIZES], weights, None, None)
            stages.append(replace(stage, first_step=2 * number, cut_end=2 * number + 62))
        amended = replace(loader.order, stages=tuple(stages), num_first=4)
    state["fingerprint"] |= amended.sizes
    assert len(json.dumps(state)) < 10_000
    assert Mixture.of_sizes(state["fingerprint"], loader.order).sizes == amended.sizes  # type: ignore[union-attr]
    assert sum(amended.num_delivered(102).values()) == 102 * L


def test_a_loader_describes_its_sources_and_what_held(data: dict[str, Path]) -> None:
    with load(data, {"weights": {"web": 1, "code": 1}}) as loader:
        state = loader.state_at(70)
    with load(data, {"weights": {"web": 3, "books": 1}}, amend=True) as loader:
        loader.load_state_dict(state)
        lines = loader.describe(until_step=170).splitlines()
        assert [line.split()[0] for line in lines[1:4]] == ["web", "code", "books"]
        assert "75.0% of samples" in lines[1]
        assert f"{loader.source_epochs['web']:.2f} epochs" in lines[1]
        assert loader.order.data[0] in lines[1]
        assert "dropped" in lines[2]
        assert lines[5:] == [
            "  from step 0: web 50.0%, code 50.0%",
            "  from step 70 (amended): web 75.0%, books 25.0%",
        ]
        steps(loader, 100)
        epochs = [f"{epochs:.2f} at step 170" for epochs in loader.source_epochs.values()]
        assert all(text in line for text, line in zip(epochs, lines[1:4], strict=True))
    with get_llama3_dataloader(data["web"], 7, data["web"].parent, num_workers=0) as one:
        assert "700 samples" in one.describe(until_step=50)
        assert "0.00 epochs, 0.50 at step 50" in one.describe(until_step=50)


def test_the_command_where_answers_of_a_mixture_by_its_state(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with load(data, {"weights": {"web": 2, "code": 1}}) as loader:
        found = steps(loader, 20)
        state = loader.state_dict()
    sizes: Any = {"global_batch_size": None, "batch_size_schedule": [(0, L), (30, 2 * L)]}
    with load(data, {"weights": {"web": 1, "books": 1}}, amend=True, **sizes) as loader:
        loader.load_state_dict(state)
        found += steps(loader, 60)
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    words = [f"{name}={data[name]}" for name in ("web", "code", "books")]
    words = ["where", *words, "--model_id", str(data["web"].parent), "--state", str(tmp_path / "state.json")]
    assert main([*words, "--step", "7", "--json"]) == 0
    documents = json.loads(capsys.readouterr().out)["documents"]
    assert [each["source"] for each in documents] == [*map(source_of, found[7])]
    assert main([*words, "--json"]) == 0
    last = json.loads(capsys.readouterr().out)["documents"]
    assert sorted(each["source"] for each in last) == sorted(map(source_of, chain(*found[-2:])))
    assert main([*words, "--step", "70"]) == 2
    assert "take a later checkpoint" in capsys.readouterr().err
    assert main([*words[:2], *words[3:], "--step", "7"]) == 78
    assert "samples of code, which this loader has not" in capsys.readouterr().err
    assert main([*words[:2], str(data["code"]), *words[4:]]) == 2
    assert "names no source, as web=" in capsys.readouterr().err
