"""``loader.forecast`` and ``shardprep forecast``, beside what a loader delivers and opens."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest

from loader import TokenLoader
from tests.oracle.forms import DataSets
from tests.world import call_main, flags_of, open_loader

SVG = "{http://www.w3.org/2000/svg}"


def deliver(loader: TokenLoader, num_steps: int) -> dict[str, Counter[tuple[int, int]]]:
    """Iterate some steps. Returns how often each sample of each source was delivered, by shard and number."""
    seen = {name: Counter[tuple[int, int]]() for name in loader.source_names}
    for batch in chain.from_iterable(repeat(loader)):
        origins = batch["origins"]
        if loader.run.is_validation:  # rows that fill up the last step have no labels
            has_label = (batch["labels"] != -100).any(dim=1)
            origins = origins[has_label[origins[:, 0]]]
        of_batch = {tuple(row[[0, 2, 3, 4]].tolist()) for row in origins}  # rows have documents
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
    kind = drawn.choice(["documents", "best_fit", "mixture", "amended", "grouped", "joined", "validation"])
    data: Any = {"best_fit": rows, "joined": sets["documents"], "validation": sets["split"]}.get(
        kind, numbered
    )
    sizes = [(0, drawn.choice([2, 4])), (drawn.randint(2, 9), 4)]
    options["global_batch_size"] = sizes if drawn.random() < 0.5 else 4
    if kind == "joined":
        options["seq_len"] = drawn.choice([16, 64])
    if kind == "validation":
        options |= {"split": "validation", "global_batch_size": 4}
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


@pytest.mark.parametrize("most_open", [1, 128])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["documents", "mixture", "grouped", "joined"])
def test_the_command_counts_the_shards_that_readers_of_a_node_open(
    numbered: Path, sets: DataSets, kind: str, world_size: int, most_open: int
) -> None:
    tars = [numbered / f"part-0{number}.tar" for number in range(3)]
    data: Any = tars
    options: dict[str, Any] = {"model_id": numbered, "global_batch_size": 8}
    if kind == "mixture":
        data = {"a": tars[:1], "b": tars[1:]}
        options |= {"weights": {"a": 1, "b": 2}, "weights_in": "samples"}
    if kind == "grouped":
        options["group_by_length"] = 2
    if kind == "joined":
        data = [sets["documents"]]
        options = {"seq_len": 16, "global_batch_size": 8}
    words = [f"{name}={tar}" for name in data for tar in data[name]] if kind == "mixture" else data
    flags = options | ({"weights": json.dumps(options["weights"])} if kind == "mixture" else {})
    flags |= {"num_workers": 1, "world_size": world_size, "num_steps": 9, "step_s": 6}
    reading = "loader.read.reading"
    with (
        mock.patch(f"{reading}.MAX_OPEN_SHARDS", most_open),
        mock.patch("loader.batch.reads_forecast.MAX_OPEN_SHARDS", most_open),
    ):
        ended = call_main("forecast", *words, *flags_of(flags), "--json")
        (reads,) = json.loads(ended.ends(0).out)["reads"]
        opened_in = Counter[int]()  # by step
        for rank in range(world_size):
            real = __import__(reading, fromlist=["x"]).OpenShard
            batch_size = 8 // world_size
            with (
                open_loader(data, batch_size, rank=rank, world_size=world_size, **options) as loader,
                mock.patch(f"{reading}.OpenShard", wraps=real) as opened,
            ):
                num_opened = 0
                for step, _ in enumerate(islice(loader, reads["num_steps"])):
                    opened_in[step] += opened.call_count - num_opened
                    num_opened = opened.call_count
    assert reads["num_opened"] == opened_in.total() > 0
    assert reads["most_opened"] == max(opened_in.values())
    if most_open == 128 and kind != "joined":
        assert reads["num_files"] == opened_in.total()  # a tar of another tool has no idx


def test_a_copy_by_stage_has_the_bytes_of_the_forecast(sets: DataSets, tmp_path: Path) -> None:
    words = [sets["concat"], "--num_steps", 1, "--json"]
    num_bytes = json.loads(call_main("forecast", *words, "--disk", "1K").out)["staged_bytes"]
    call_main("stage", sets["concat"], "--to", tmp_path / "copy")
    copied = [path for suffix in ("tar", "idx") for path in (tmp_path / "copy").glob(f"shard-*.{suffix}")]
    assert num_bytes == sum(path.stat().st_size for path in copied) > 1024
    for size, fits in (("1K", False), (str(num_bytes), True)):
        assert json.loads(call_main("forecast", *words, "--disk", size).out)["fits_disk"] is fits


@pytest.mark.parametrize("step_samples", [None, 4])
def test_a_proxy_repeats_each_source_as_often_as_its_run(
    numbered: Path, tmp_path: Path, step_samples: int | None
) -> None:
    """Of "a" a third is one shard of three, of "b" one of three, too; they are not equally large."""
    tars = [numbered / f"part-0{number}.tar" for number in range(3)]
    words = [f"{name}={tar}" for name in "ab" for tar in tars] + ["--model_id", numbered]
    weights = [[0, {"a": 1, "b": 3}], [320, {"a": 2, "b": 1}]]
    shape = ["--weights", json.dumps(weights), "--weights_in", "samples", "--global_batch_size", 8]
    large = call_main("forecast", *words, *shape, "--num_steps", 1000, "--json").out
    (tmp_path / "run.json").write_text(large)
    call_main("forecast", *words[1:], "--like", tmp_path / "run.json").ends(2, "--like")  # other data
    (tmp_path / "cut.json").write_text(json.dumps({**json.loads(large), "stages": []}))
    call_main("forecast", *words, "--like", tmp_path / "cut.json").ends(2, "cut.json")
    smaller = [] if step_samples is None else ["--global_batch_size", step_samples]
    words += ["--like", tmp_path / "run.json", "--scale", "0.34", *smaller]
    found = json.loads(call_main("forecast", *words, "--json").out)
    proxy = found["proxy"]
    assert proxy["input_shards"] == {"a": [str(tars[0])], "b": [str(tars[0])]}
    assert proxy["num_steps"] == 1000 * 0.34 * 8 / (step_samples or 8)
    options: dict[str, Any] = {name: proxy[name] for name in ("weights", "global_batch_size")}
    options |= {"model_id": numbered, "num_workers": 0, "batch_size": 1, "weights_in": "samples"}
    with open_loader(proxy["input_shards"], **options, origins=True) as loader:
        deliver(loader, proxy["num_steps"])
        epochs = loader.source_epochs
    assert {each["name"]: each["epochs"] for each in found["sources"]} == epochs
    # An epoch leaves out what fills no step: 4 of 36 samples in a proxy this small, so compare samples.
    for each, of_proxy in zip(json.loads(large)["sources"], found["sources"], strict=True):
        repeats = each["num_delivered"] / each["num_samples"]
        assert of_proxy["num_delivered"] / of_proxy["num_samples"] == pytest.approx(repeats, rel=0.03)


def test_a_picture_shows_the_epochs_of_each_source(numbered: Path, tmp_path: Path) -> None:
    tar = numbered / "part-00.tar"
    words = [f"<a={tar}", f"b={tar}", "--weights", '[[0, {"<a": 1, "b": 3}], [64, {"<a": 1, "b": 1}]]']
    words += ["--model_id", str(numbered), "--num_steps", "100", "--picture", str(tmp_path / "run.svg")]
    found = json.loads(call_main("forecast", *words, "--json").out)["sources"]
    drawn = ElementTree.parse(tmp_path / "run.svg").getroot()
    texts = [each.text or "" for each in drawn.iter(f"{SVG}text")]
    for source in found:
        assert any(text.startswith(source["name"]) and f"{source['epochs']:.3f}" in text for text in texts)
    lines = [each.attrib["points"].split() for each in drawn.iter(f"{SVG}polyline")]
    assert len(lines) == len(found)
    for points in lines:
        heights = [float(point.split(",")[1]) for point in points]
        assert heights == sorted(heights, reverse=True)  # the page begins at the top
    (tmp_path / "other.svg").write_text("<svg>mine</svg>")
    call_main("forecast", *words[:-1], tmp_path / "other.svg").ends(78)
    assert (tmp_path / "other.svg").read_text() == "<svg>mine</svg>"


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
    call_main("forecast", *words, "--world_size", 3).ends(2, "--world_size")  # 8 samples a step


def test_a_state_needs_the_data_of_all_its_sources(numbered: Path, tmp_path: Path) -> None:
    data = {name: numbered / f"part-0{number}.tar" for number, name in enumerate("ab")}
    options: dict[str, Any] = {"model_id": numbered, "weights_in": "samples"}
    with open_loader(data, weights={"a": 1, "b": 1}, **options) as loader:
        state = loader.state_at(10)
    with open_loader(data, weights={"a": 1}, amend=True, **options) as loader:
        loader.load_state_dict(state)
        path = tmp_path / "state.json"
        path.write_text(json.dumps(loader.state_at(80)))
    words = ["--state", path, "--model_id", numbered, "--num_steps", 90]
    call_main("forecast", *(f"{name}={tar}" for name, tar in data.items()), *words).ends(0)
    call_main("forecast", f"a={data['a']}", *words).ends(2, "b=PATH")


# Flags that describe a run, with a value of each.
OF_RUN = {
    "weights": '{"a": 1}',
    "weights_in": "samples",
    "global_batch_size": "8",
    "batch_size": "2",
    "seq_len": "64",
    "max_length": "64",
    "group_by_length": "2",
    "seed": "5",
}
OF_PROXY = {"like": "run.json", "scale": "0.2"}


@pytest.mark.parametrize(
    ("given", "without_effect"),
    [
        ({"state": "state.pt"}, OF_RUN | OF_PROXY),
        (
            {"like": "run.json"},
            {"num_steps": "9"} | {name: OF_RUN[name] for name in ("weights", "weights_in")},
        ),
    ],
)
def test_flags_without_effect_are_refused_before_anything_is_read(
    given: dict[str, str], without_effect: dict[str, str]
) -> None:
    (flag,) = given
    for name, value in without_effect.items():
        call_main("forecast", "DATA", *flags_of(given | {name: value})).ends(
            2, f"--{flag}", f"leave out --{name}"
        )
    ended = call_main("forecast", "DATA", *flags_of(given | without_effect))
    ended.ends(2, *(f"--{name}" for name in without_effect))


@pytest.mark.parametrize(("flag", "needed"), [("weights_in", "weights"), ("scale", "like")])
def test_a_flag_that_needs_another_one_is_refused_without_it(flag: str, needed: str) -> None:
    given = (OF_RUN | OF_PROXY)[flag]
    ended = call_main("forecast", "DATA", "--num_steps", 9, f"--{flag}", given)
    ended.ends(2, f"leave out --{flag}", f"add --{needed}")


def test_named_sources_need_weights(numbered: Path) -> None:
    words = [f"a={numbered / 'part-00.tar'}", "--model_id", numbered, "--num_steps", 9]
    call_main("forecast", *words).ends(2, "--weights")
