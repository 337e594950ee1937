"""``loader.forecast`` and ``shardprep forecast``, beside what a loader delivers and opens."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from loader import TokenLoader
from tests.oracle.forms import DataSets
from tests.world import call_main, open_loader


def deliver(loader: TokenLoader, num_steps: int) -> dict[str, Counter[tuple[int, int]]]:
    """Iterate some steps. Returns how often each sample of each source was delivered, by shard and number."""
    seen = {name: Counter[tuple[int, int]]() for name in loader.source_names}
    for batch in chain.from_iterable(repeat(loader)):
        of_batch = {tuple(row[[0, 2, 3, 4]].tolist()) for row in batch["origins"]}  # rows have documents
        for _, source, shard, sample in of_batch:
            seen[loader.source_names[source]][shard, sample] += 1
        if loader.num_steps_delivered == num_steps:
            return seen
    raise AssertionError


@pytest.mark.parametrize("seed", range(40))
def test_a_forecast_equals_what_a_loader_delivers(
    seed: int, numbered: Path, rows: Path, sets: DataSets
) -> None:
    drawn = random.Random(seed)
    options: dict[str, Any] = {"batch_size": 2, "seed": seed, "origins": True, "num_workers": 0}
    kind = drawn.choice(["documents", "rows", "mixture", "amended", "grouped", "joined"])
    data: Any = {"rows": rows, "joined": sets["documents"]}.get(kind, numbered)
    sizes = [(0, drawn.choice([2, 4])), (drawn.randint(2, 9), 4)]
    options["global_batch_size"] = sizes if drawn.random() < 0.5 else 4
    if kind == "joined":
        options["seq_len"] = drawn.choice([16, 64])
    if kind == "grouped":
        options |= {"group_by_length": 2, "global_batch_size": 4}
    if kind in ("mixture", "amended"):
        data = {"a": numbered / "part-00.tar", "b": [numbered / f"part-0{n}.tar" for n in (1, 2)]}
        options |= {"weights": {"a": drawn.random(), "b": 1}, "weights_in": "samples"}
    if data is numbered or isinstance(data, dict):
        options["model_id"] = numbered
    num_steps = drawn.randint(1, 90)
    state: Any = None
    if kind == "amended":
        with open_loader(data, **options) as first:
            state = first.state_at(drawn.randint(1, 40))
        options |= {"weights": {"a": 1, "b": drawn.random()}, "amend": True}
    with open_loader(data, **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
            loader.load_run(loader.state_at(0))
        forecast = loader.forecast(num_steps)
        seen = deliver(loader, num_steps)
        assert {each.name: each.num_delivered for each in forecast.sources} == loader.source_samples
        assert {each.name: each.epochs for each in forecast.sources} == loader.source_epochs
        if loader.run.row_tokens:
            num_tokens = loader.metrics.num_tokens + loader.metrics.num_padding
            assert forecast.sources[0].num_tokens == num_tokens
    if kind == "joined":  # a row begins elsewhere in each epoch
        return
    for each in forecast.sources:
        times = Counter(seen[each.name].values())
        times[0] = each.num_samples - len(seen[each.name])
        assert {number: count for number, count in enumerate(each.times_seen) if count} == +times


@pytest.mark.parametrize("mixed", [False, True])
def test_the_command_counts_the_shards_that_a_reader_opens(numbered: Path, mixed: bool) -> None:
    tars = [numbered / f"part-0{number}.tar" for number in range(3)]
    data: Any = {"a": tars[:1], "b": tars[1:]} if mixed else tars
    words = [f"a={tars[0]}", f"b={tars[1]}", f"b={tars[2]}"] if mixed else [str(tar) for tar in tars]
    options: dict[str, Any] = {"model_id": numbered, "num_workers": 0, "batch_size": 8}
    if mixed:
        words += ["--weights", '{"a": 1, "b": 2}', "--weights_in", "samples"]
        options |= {"weights": {"a": 1, "b": 2}, "weights_in": "samples"}
    words += ["--global_batch_size", "8", "--num_workers", "1", "--model_id", str(numbered)]
    ended = call_main("forecast", *words, "--num_steps", 9, "--first_steps", 6, "--json")
    (reads,) = json.loads(ended.out)["reads"]
    with open_loader(data, **options) as loader:
        module = "loader.read.reading.OpenShard"
        with mock.patch(module, wraps=__import__("loader.read.reading", fromlist=["x"]).OpenShard) as opened:
            for _ in islice(loader, 6):
                pass
    assert reads["num_opened"] == opened.call_count > 0


def test_a_forecast_of_a_state_is_that_of_its_run(numbered: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model_id": numbered, "num_workers": 0, "batch_size": 4, "seed": 5}
    with open_loader(numbered, global_batch_size=8, **options) as loader:
        state = tmp_path / "state.json"
        state.write_text(json.dumps(loader.state_at(3)))
        expected = loader.forecast(40)
    words = [numbered, "--state", state, "--model_id", numbered, "--num_steps", 40]
    found = json.loads(call_main("forecast", *words, "--json").out)["sources"][0]
    assert found["times_seen"] == list(expected.sources[0].times_seen)
    assert found["second_epoch_step"] == expected.sources[0].second_epoch_step
    call_main("forecast", *words[:-1], 0).ends(2, "--num_steps")
