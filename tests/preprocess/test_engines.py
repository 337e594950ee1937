"""Whichever engine encodes, the ids are those of tokenizers; where they would not be, it is not used."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gigatoken.gigatoken_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from preprocess.make import engines
from preprocess.make.engines import (
    Engine,
    TokenBatch,
    gate_texts,
    gigatoken_engine,
    probe_texts,
    tokenizers_engine,
)
from preprocess.make.worker import load_engine
from shardprep.errors import OtherTokenizer, UsageError
from shardprep.format.options import EngineName
from shardprep.format.plan import Plan, need_plan
from tests.word_tokenizers import save_word_tokenizer

# One in so many code points above U+2000 stands for its kind; planning tries all, `make torture` too.
FEW, SOME = 400, 41
EVERY = 1 if os.environ.get("LLAMA3_LINES") == "all" else SOME


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
        gigatoken_engine(path, allow_special_tokens=allow),
        tokenizers_engine(path, allow_special_tokens=allow),
    )


def assert_equal_ids(one: Engine, other: Engine, texts: list[str]) -> None:
    for first in range(0, len(texts), 2000):
        some = texts[first : first + 2000]
        left, right = one.encode_texts(some), other.encode_texts(some)
        assert np.array_equal(left.offsets, right.offsets)
        assert np.array_equal(left.ids, right.ids)


@pytest.fixture(params=["small", "llama3"])
def any_tokenizer(request: pytest.FixtureRequest, prep: Any) -> Path:
    """A small tokenizer, and the real one where it is there."""
    if request.param == "small":
        return Path(prep.model_dir) / "tokenizer.json"
    return Path(request.getfixturevalue("shared_dir")) / "tokenizers/llama3/tokenizer.json"


@pytest.mark.slow
@pytest.mark.parametrize("allow_special_tokens", [False, True])
def test_engines_agree_on_code_points_special_tokens_and_long_runs(
    any_tokenizer: Path, allow_special_tokens: bool
) -> None:
    added = json.loads(any_tokenizer.read_bytes())["added_tokens"]
    step = EVERY if "llama3" in any_tokenizer.parts else SOME
    texts = [
        *code_point_texts(FEW if allow_special_tokens else step)[
            : 0x20000 - 0x800
        ],  # they hold no token's name
        *special_token_texts([token["content"] for token in added[:3]]),
        *(character * 20_000 for character in "a 가!9\n\t"),
        *probe_texts({"added_tokens": added}),
    ]
    assert len(texts) > (10_000 if allow_special_tokens else 35_000)
    assert_equal_ids(*both_engines(any_tokenizer, allow_special_tokens), texts)


def test_control_tokens_in_a_text_are_text_unless_they_are_allowed(prep: Any) -> None:
    path = prep.model_dir / "tokenizer.json"
    end_of_text = Tokenizer.from_file(str(path)).token_to_id("<|end_of_text|>")
    for make in (gigatoken_engine, tokenizers_engine):
        text = ["a<|end_of_text|>b"]
        assert end_of_text not in make(path, allow_special_tokens=False).encode_texts(text).ids
        assert end_of_text in make(path, allow_special_tokens=True).encode_texts(text).ids


class TokenizerOfVersion1:
    """A tokenizer behind the calls of tokenizers 1.0: no settings, and no ``encode_batch_fast``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode_batch(
        self,
        inputs: Any,
        *,
        add_special_tokens: bool,
        encode_special_tokens: bool,
        padding: None,
        truncation: None,
    ) -> Any:
        self._tokenizer.encode_special_tokens = encode_special_tokens
        return self._tokenizer.encode_batch(inputs, add_special_tokens=add_special_tokens)


def test_tokenizers_of_version_1_give_the_same_ids(prep: Any) -> None:
    path = prep.model_dir / "tokenizer.json"
    for allow in (False, True):
        newer: Any = TokenizerOfVersion1(Tokenizer.from_file(str(path)))
        texts = ["a <|end_of_text|> 가", "", "x"]
        engine = engines.engine_of_tokenizer(newer, allow_special_tokens=allow, name="newer")
        reference = tokenizers_engine(path, allow_special_tokens=allow)
        assert_equal_ids(engine, reference, texts)
        assert_equal_ids(engine.bare(), reference.bare(), texts)


def load(plan: Plan, path: Path, wanted: EngineName, warnings: list[str], **changes: Any) -> Engine:
    plan = dataclasses.replace(plan, **changes)
    return load_engine(plan, path.parents[1], wanted, warnings.append)


@pytest.fixture
def json_path(data_dir: Path) -> Path:
    return data_dir / "tokenizer" / "tokenizer.json"


def wrong_engine(path: Path, *, allow_special_tokens: bool) -> Engine:
    """gigatoken, but for a last id that is one too large."""
    right = gigatoken_engine(path, allow_special_tokens=allow_special_tokens)

    def encode(texts: Any) -> TokenBatch:
        batch = right.encode(texts)
        ids = batch.ids.copy()
        ids[-1] += 1
        return TokenBatch(ids=ids, offsets=batch.offsets)

    return dataclasses.replace(right, encode_with=lambda texts, _: encode(texts))


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
    assert load(plan, json_path, "auto", warnings).name == "gigatoken"
    assert not warnings
    monkeypatch.setattr(engines, "gigatoken_engine", make)
    assert load(plan, json_path, "auto", warnings).name == "tokenizers"
    assert len(warnings) == 1
    assert why in warnings[0]
    with pytest.raises(UsageError, match=why):
        load(plan, json_path, "gigatoken", warnings)


def test_a_plan_that_saw_the_fast_engine_differ_never_uses_it(data_dir: Path, json_path: Path) -> None:
    plan = need_plan(data_dir)
    assert load(plan, json_path, "auto", [], fast_engine_is_equal=False).name == "tokenizers"


def test_a_reference_that_gives_other_ids_than_at_planning_is_refused(
    data_dir: Path, json_path: Path
) -> None:
    for wanted in ("auto", "tokenizers"):
        with pytest.raises(OtherTokenizer, match="install the version that planned"):
            load(need_plan(data_dir), json_path, wanted, [], probe_sha256="0" * 64)


@pytest.mark.slow
def test_a_tokenizer_that_gigatoken_does_not_know_is_encoded_by_the_reference(
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
    prep.make(tmp_path / "data", 0)
    text = min(sample_dir.glob("*.txt")).read_text(encoding="utf-8").split("\n")[0].strip()
    (_, written), (_, ids), *_ = prep.members(tmp_path / "data" / "shard-00000.tar")
    assert written.decode() == text
    assert json.loads(ids) == tokenizer.encode(text).ids
    run = json.loads((tmp_path / "data" / "shard-00000.json").read_bytes())["run"]
    assert run["engine"].startswith("tokenizers") or plan.fast_engine_is_equal


@pytest.fixture
def cpus_of_a_process() -> Iterator[list[set[int]]]:
    """One CPU, then all: gigatoken is called in two ways."""
    before = os.sched_getaffinity(0)
    yield [{min(before)}, before]
    os.sched_setaffinity(0, before)


# What a text is made of: names of tokens, the separator between documents, code points of new Unicodes.
PARTS = [
    "<|end_of_text|>",
    "<|begin_of_text|>",
    engines._SEPARATOR.decode(),
    "\0\1docu",
    "ment\2",
    "<|",
    "\u088f",
    "\U000323b0",
]
PARTS += ["a", " ", "가", "\n", "1", "'s", "\U0001f600", "é", "\u0301", "\r", "\u3000"]
TEXTS = st.lists(
    st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=3)), max_size=8).map("".join), max_size=6
)


@pytest.mark.slow
@pytest.mark.parametrize("allow_special_tokens", [False, True])
def test_any_texts_have_the_ids_of_tokenizers(
    any_tokenizer: Path, cpus_of_a_process: list[set[int]], allow_special_tokens: bool
) -> None:
    fast, reference = both_engines(any_tokenizer, allow_special_tokens)

    @settings(max_examples=150)
    @given(TEXTS)
    def are_equal(texts: list[str]) -> None:
        for cpus in cpus_of_a_process:
            os.sched_setaffinity(0, cpus)
            assert_equal_ids(fast, reference, texts)
            assert_equal_ids(fast.bare(), reference.bare(), texts)

    are_equal()


@pytest.mark.slow
def test_planning_tries_all_code_points_that_gigatoken_gets_and_keeps_the_verdict(
    prep: Any, sample_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert prep.plan(sample_dir, tmp_path / "data").fast_engine_is_equal
    texts = gate_texts((prep.model_dir / "tokenizer.json").read_bytes())
    missing = {*range(0xD800), *range(0xE000, 0xF0000)} - set(map(ord, "".join(texts)))
    assert len(engines.texts_with_new_code_points([chr(point).encode() for point in missing])) == len(missing)
    monkeypatch.setattr(engines, "gate_texts", lambda _: pytest.fail("the verdict was kept"))
    prep.plan(sample_dir, tmp_path / "again")


def test_what_newer_unicodes_assign_is_the_same_for_every_python() -> None:
    known = tuple(map(int, unicodedata.unidata_version.split(".")))
    assert known < (19,), "write down what this Unicode assigned"
    num_new = int(engines.is_new_code_point()[:0x10000].sum())
    assert num_new == 1421 if known >= (14,) else num_new > 1421


@pytest.mark.slow
def test_an_engine_that_fails_the_gate_alone_is_not_used(
    prep: Any, sample_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong_on_an_ideograph(path: Path, *, allow_special_tokens: bool) -> Engine:
        right = gigatoken_engine(path, allow_special_tokens=allow_special_tokens)
        wrong = wrong_engine(path, allow_special_tokens=allow_special_tokens)
        return dataclasses.replace(
            right,
            encode_with=lambda texts, _: (wrong if "\u3404".encode() in b"".join(texts) else right).encode(
                texts
            ),
        )

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(engines, "gigatoken_engine", wrong_on_an_ideograph)
    assert not prep.plan(sample_dir, tmp_path / "data").fast_engine_is_equal


def test_what_gigatoken_remembers_is_bounded(prep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.FastTokenizer, "_LEAST_TEXT", 100)
    monkeypatch.setattr(engines.FastTokenizer, "_MOST_REMEMBERED", -1 << 40)
    loads: list[int] = []
    load_json = gigatoken.gigatoken_rs.load_hf_json
    monkeypatch.setattr(gigatoken.gigatoken_rs, "load_hf_json", lambda raw: loads.append(1) or load_json(raw))
    engines._fast_tokenizer.cache_clear()
    fast, reference = both_engines(prep.model_dir / "tokenizer.json", False)
    assert_equal_ids(fast, reference, ["a word"])
    assert len(loads) == 1
    for _ in range(2):
        assert_equal_ids(fast, reference, ["words " * 30])
    assert len(loads) == 3
    engines._fast_tokenizer.cache_clear()


def test_a_process_that_plans_and_works_loads_gigatoken_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, copy, other = tmp_path / "first.json", tmp_path / "copy.json", tmp_path / "other.json"
    save_word_tokenizer(tmp_path / "words", 50)
    written = (tmp_path / "words" / "tokenizer.json").read_bytes()
    first.write_bytes(written)
    copy.write_bytes(written)
    other.write_bytes(written + b"\n")
    loads: list[bytes] = []
    monkeypatch.setattr(gigatoken.gigatoken_rs, "load_hf_json", loads.append)
    engines._fast_tokenizer.cache_clear()
    for path in (first, copy, other, copy):
        gigatoken_engine(path, allow_special_tokens=True)
    engines._fast_tokenizer.cache_clear()  # of the stub
    assert len(loads) == 3
