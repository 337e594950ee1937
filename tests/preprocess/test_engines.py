"""Whichever engine encodes, the ids are those of tokenizers; where they would not be, it is not used."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastokens
import numpy as np
import pytest
from tokenizers import Tokenizer

from preprocess.make import engines
from preprocess.make.engines import (
    FEW_BYTES,
    Engine,
    TokenBatch,
    fastokens_engine,
    ids_sha256,
    load_engine,
    probe_texts,
    tokenizers_engine,
)
from preprocess.options import EngineName
from preprocess.plan.plan_file import Plan, need_plan
from shardprep.errors import NotFound, OtherTokenizer, UsageError
from tests.word_tokenizers import save_word_tokenizer

# One in so many code points above U+2000 stands for its kind; EVERY is for the real tokenizer.
FEW, SOME, EVERY = 400, 13, 1


def code_point_texts(step: int) -> list[str]:
    """Every code point up to U+2000, and one in ``step`` above, in the contexts that patterns tell apart."""
    points = [*range(0x2000), *range(0x2000, 0x110000, step)]
    return [f"a{c}b {c}가 {c}{c}1'{c}\n{c}" for c in map(chr, points) if not "\ud800" <= c <= "\udfff"]


def special_token_texts(contents: list[str]) -> list[str]:
    rng = random.Random(0)
    parts = [*contents, "<|", "|>", "a", " ", "가", "\n", "end_of_text", "1", "'s"]
    return ["".join(rng.choices(parts, k=rng.randrange(1, 12))) for _ in range(2000)]


def both_engines(path: Path, allow: bool) -> tuple[Engine, Engine]:
    return (
        fastokens_engine(path, allow_special_tokens=allow),
        tokenizers_engine(path, allow_special_tokens=allow),
    )


def assert_equal_ids(one: Engine, other: Engine, texts: list[str]) -> None:
    for first in range(0, len(texts), 2000):
        some = texts[first : first + 2000]
        left, right = one.encode(some), other.encode(some)
        assert np.array_equal(left.offsets, right.offsets)
        assert np.array_equal(left.ids, right.ids)


@pytest.mark.slow
@pytest.mark.parametrize("allow_special_tokens", [False, True])
def test_engines_agree_on_code_points_special_tokens_and_long_runs(
    prep: Any, allow_special_tokens: bool
) -> None:
    path = prep.model_dir / "tokenizer.json"
    engines = [
        make(path, allow_special_tokens=allow_special_tokens)
        for make in (fastokens_engine, tokenizers_engine)
    ]
    contents = ["<|end_of_text|>", "<|begin_of_text|>", "<|eot_id|>"]
    runs = [character * 20_000 for character in "a 가!9\n\t"]
    texts = [
        *code_point_texts(FEW if allow_special_tokens else SOME),  # they hold no token's name
        *special_token_texts(contents),
        *runs,
        *probe_texts(json.loads(path.read_bytes())),
    ]
    assert len(texts) > (10_000 if allow_special_tokens else 80_000)
    assert_equal_ids(engines[0], engines[1], texts)


@pytest.mark.slow
@pytest.mark.parametrize("allow_special_tokens", [False, True])
def test_engines_agree_on_llama_3_and_every_code_point(shared_dir: Path, allow_special_tokens: bool) -> None:
    path = shared_dir / "tokenizers/llama3/tokenizer.json"
    engines = [
        make(path, allow_special_tokens=allow_special_tokens)
        for make in (fastokens_engine, tokenizers_engine)
    ]
    contents = ["<|end_of_text|>", "<|begin_of_text|>", "<|finetune_right_pad_id|>"]
    runs = [character * 200_000 for character in "a 가!9\n\t"]
    step = FEW if allow_special_tokens else EVERY
    texts = [*code_point_texts(step)[: 0x20000 - 0x800], *special_token_texts(contents), *runs]
    assert_equal_ids(engines[0], engines[1], texts)


def test_control_tokens_in_a_text_are_text_unless_they_are_allowed(prep: Any) -> None:
    path = prep.model_dir / "tokenizer.json"
    end_of_text = Tokenizer.from_file(str(path)).token_to_id("<|end_of_text|>")
    for make in (fastokens_engine, tokenizers_engine):
        text = ["a<|end_of_text|>b"]
        assert end_of_text not in make(path, allow_special_tokens=False).encode(text).ids
        assert end_of_text in make(path, allow_special_tokens=True).encode(text).ids


def load(plan: Plan, path: Path, wanted: EngineName, warnings: list[str], **changes: Any) -> Engine:
    plan = dataclasses.replace(plan, **changes)
    return load_engine(
        path,
        wanted=wanted,
        allow_special_tokens=False,
        probe=plan.probe,
        probe_sha256=plan.probe_sha256,
        fast_is_equal=plan.fast_engine_is_equal,
        num_bytes=sum(plan.shard_bytes()),
        warn=warnings.append,
    )


@pytest.fixture
def json_path(data_dir: Path) -> Path:
    return data_dir / "tokenizer" / "tokenizer.json"


def wrong_engine(path: Path, *, allow_special_tokens: bool) -> Engine:
    """fastokens, but for a last id that is one too large."""
    right = fastokens_engine(path, allow_special_tokens=allow_special_tokens)

    def encode(texts: Any) -> TokenBatch:
        batch = right.encode(texts)
        ids = batch.ids.copy()
        ids[-1] += 1
        return TokenBatch(ids=ids, offsets=batch.offsets)

    return dataclasses.replace(right, encode=encode)


class PanicException(BaseException):
    """What a panic in Rust arrives as."""


def panicking_engine(path: Path, *, allow_special_tokens: bool) -> Engine:
    raise PanicException("index out of bounds")


def refusing_engine(path: Path, *, allow_special_tokens: bool) -> Engine:
    raise ValueError("unsupported pre-tokenizer")


@pytest.mark.parametrize(
    ("make", "why"),
    [(wrong_engine, "ids differ"), (panicking_engine, "panicked"), (refusing_engine, "unsupported")],
)
def test_a_fast_engine_that_is_wrong_or_fails_gives_way_to_the_reference(
    data_dir: Path, json_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, why: str
) -> None:
    plan = need_plan(data_dir)
    assert plan.fast_engine_is_equal
    warnings: list[str] = []
    assert load(plan, json_path, "auto", warnings).name == "fastokens"
    assert not warnings
    monkeypatch.setattr(engines, "fastokens_engine", make)
    assert load(plan, json_path, "auto", warnings).name == "tokenizers"
    assert len(warnings) == 1
    assert why in warnings[0]
    with pytest.raises(UsageError, match=why):
        load(plan, json_path, "fastokens", warnings)


def test_a_little_text_is_encoded_by_the_reference_which_loads_sooner(
    data_dir: Path, json_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = need_plan(data_dir)
    for num_bytes, name in ((FEW_BYTES - 1, "tokenizers"), (FEW_BYTES, "fastokens")):
        monkeypatch.setattr(Plan, "shard_bytes", lambda _, size=num_bytes: [size])
        assert load(plan, json_path, "auto", []).name == name
        assert load(plan, json_path, "fastokens", []).name == "fastokens"


def test_a_plan_that_saw_the_fast_engine_differ_never_uses_it(data_dir: Path, json_path: Path) -> None:
    plan = need_plan(data_dir)
    assert load(plan, json_path, "auto", [], fast_engine_is_equal=False).name == "tokenizers"


def test_a_reference_that_gives_other_ids_than_at_planning_is_refused(
    data_dir: Path, json_path: Path
) -> None:
    for wanted in ("auto", "tokenizers"):
        with pytest.raises(OtherTokenizer, match="install the version that planned"):
            load(need_plan(data_dir), json_path, wanted, [], probe_sha256="0" * 64)


def test_missing_tokenizer_files_are_named(data_dir: Path, json_path: Path) -> None:
    json_path.unlink()
    with pytest.raises(NotFound, match=r"tokenizer\.json is missing; run the plan command again"):
        load(need_plan(data_dir), json_path, "auto", [])


@pytest.mark.slow
def test_a_tokenizer_that_fastokens_gets_wrong_falls_back_at_planning(
    prep: Any, sample_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "fastokens_engine", wrong_engine)
    assert not prep.plan(sample_dir, tmp_path / "data").fast_engine_is_equal


@pytest.mark.slow
def test_a_tokenizer_that_fastokens_does_not_know_is_encoded_by_the_reference(
    prep: Any, sample_dir: Path, tmp_path: Path
) -> None:
    """A WordLevel model: real, trained here, and none of byte-level BPE."""
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=500, special_tokens=["[UNK]"])
    tokenizer.train([str(path) for path in sample_dir.glob("*.txt")], trainer)
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    tokenizer.save(str(model_dir / "tokenizer.json"))
    (model_dir / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"})
    )
    plan = prep.plan(sample_dir, tmp_path / "data", model_id=str(model_dir))
    assert not plan.can_be_cut
    prep.make(tmp_path / "data", 0)
    text = min(sample_dir.glob("*.txt")).read_text(encoding="utf-8").split("\n")[0].strip()
    (_, written), (_, ids), *_ = prep.members(tmp_path / "data" / "shard-00000.tar")
    assert written.decode() == text
    assert json.loads(ids) == tokenizer.encode(text).ids
    run = json.loads((tmp_path / "data" / "shard-00000.json").read_bytes())["run"]
    assert run["engine"].startswith("tokenizers") or plan.fast_engine_is_equal


def test_the_sha256_of_ids_tells_documents_apart() -> None:
    ids = np.array([1, 2, 3], np.uint32)
    one = ids_sha256([TokenBatch(ids=ids, offsets=np.array([0, 1, 3]))])
    assert one != ids_sha256([TokenBatch(ids=ids, offsets=np.array([0, 2, 3]))])


def test_a_process_that_plans_and_works_loads_fastokens_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, copy, other = tmp_path / "first.json", tmp_path / "copy.json", tmp_path / "other.json"
    save_word_tokenizer(tmp_path / "words", 50)
    written = (tmp_path / "words" / "tokenizer.json").read_bytes()
    first.write_bytes(written)
    copy.write_bytes(written)
    other.write_bytes(written + b"\n")
    loads: list[str] = []
    stub = SimpleNamespace(no_truncation=lambda: None, no_padding=lambda: None)
    load = SimpleNamespace(from_json_str=lambda text: loads.append(text) or stub)
    monkeypatch.setattr(fastokens, "Tokenizer", load)
    engines._fast_tokenizer.cache_clear()
    for path in (first, copy, other, copy):
        fastokens_engine(path, allow_special_tokens=True)
    engines._fast_tokenizer.cache_clear()  # of the stub
    assert loads == [written.decode(), written.decode() + "\n", written.decode()]
