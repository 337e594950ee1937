"""Whichever engine encodes, the ids are those of tokenizers and transformers; else it is not used.

By itself some lines of the corpora; ``LLAMA3_LINES=all`` (``make torture``) takes all.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import runpy
import sys
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gigatoken.gigatoken_rs
import pytest
import tokenizers
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.checkout import ROOT
from tests.forged import rewrite_plan
from tests.world import BOS, EOS, TURN, World, save_tokenizer

TAKES_ALL = os.environ.get("LLAMA3_LINES") == "all"
# What texts are made of: names of tokens, the separator between documents, code points of new Unicodes.
PARTS = [EOS, BOS, "\0\1document\2", "\0\1docu", "ment\2", "<|", "|>", "end_of_text", "\u088f", "\U000323b0"]
PARTS += ["a", " ", "가", "\n", "1", "'s", "\U0001f600", "é", "\u0301", "\r", "\u3000"]


def hostile_records(step: int) -> list[dict[str, str]]:
    """Code points in the contexts that patterns tell apart, names of tokens, long runs.

    Every code point up to U+0800, and one in ``step`` above.
    """
    points = [*range(0x800), *range(0x800, 0x110000, step)]
    texts = [f"a{c}b {c}가 {c}{c}1'{c}\n{c}" for c in map(chr, points) if not "\ud800" <= c <= "\udfff"]
    rng = random.Random(0)
    texts += ["".join(rng.choices(PARTS, k=rng.randrange(1, 12))) for _ in range(1000)]
    texts += [character * 4_000 for character in "a 가!9\n\t"]
    return [{"text": text} for text in texts]


def engine_of(world: World) -> str:
    return str(world.manifests()[0]["run"]["engine"]).split()[0]


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small tokenizer, and the real one where it is there."""
    if request.param == "small":
        return save_tokenizer(tmp_path / "small")
    return Path(request.getfixturevalue("shared_dir")) / "tokenizers" / "llama3"


BARE = {"allow_special_tokens": True, "add_special_tokens": False}
MODELS: list[tuple[str, dict[str, Any]]] = [("small", {}), ("small", BARE), ("llama3", {})]
MODELS += [("llama3", BARE)] * TAKES_ALL


@pytest.mark.slow
@pytest.mark.parametrize(("model", "options"), MODELS, indirect=["model"], ids=str)
def test_engines_agree_with_each_other_and_with_transformers_on_any_text(
    request: pytest.FixtureRequest, tmp_path: Path, model: Path, options: dict[str, Any]
) -> None:
    """Code points, names of tokens, long runs, and with Llama 3's tokenizer lines of the corpora."""
    world = World(tmp_path, tokenizer=model)
    world.raw({"a.jsonl": hostile_records(1 if TAKES_ALL and not options else 1021)})
    if model.name == "llama3":
        for path in request.getfixturevalue("corpora_dir").iterdir():
            with path.open("rb") as file:
                world.raw({path.name: b"".join(itertools.islice(file, 0, None, 1 if TAKES_ALL else 20))})
    world.plan(num_shards=2, **options)
    expected = world.copy(tmp_path / "reference").run(engine="tokenizers")
    for batch in ("", "7"):
        fast = world.copy(tmp_path / f"fast {batch}")
        for number in range(2):
            fast.try_shard(number, engine="gigatoken", environ={"DATASET_BATCH_SIZE": batch}).ends(0)
        assert engine_of(fast) == "gigatoken"
        assert fast.contents() == expected.contents()
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    end, documents = tokenizer.convert_tokens_to_ids(EOS), expected.documents()
    for _, text, ids in documents[:: 10 if TAKES_ALL else 20]:
        call = {"add_special_tokens": not options, "split_special_tokens": not options}
        assert ids == tokenizer.encode(text, **call)
    assert len(documents) > (10_000 if model.name == "llama3" else 3_000)
    named = [ids for _, text, ids in documents if EOS in text]
    assert named
    assert all((end in ids) == bool(options) for ids in named), "names of tokens stay text unless allowed"


@pytest.mark.slow
def test_merges_that_no_text_needs_are_left_out_for_the_fast_engine_and_ids_stay(tmp_path: Path) -> None:
    rng, model = random.Random(0), save_tokenizer(tmp_path / "model")
    data = json.loads((model / "tokenizer.json").read_bytes())
    words = ["".join(letters) for size in range(2, 9) for letters in itertools.product("ab", repeat=size)]
    tokens = rng.sample(words, 100)  # some of them no merges will ever join
    tokens += sorted({word[:end] for word in tokens for end in range(2, len(word))} - {*tokens})
    # In front of the special tokens; as a tokenizer that was converted from ranks: a merge for each way to
    # cut a token in two.
    vocab = [*(token for token in data["model"]["vocab"] if len(token) == 1), *tokens]
    cuts = [[token[:end], token[end:]] for token in tokens for end in range(1, len(token))]
    merges = [cut for cut in cuts if {*cut} <= {*vocab}]
    rng.shuffle(merges)
    data["model"] |= {"vocab": {token: number for number, token in enumerate(vocab)}, "merges": merges}
    for number, token in enumerate(data["added_tokens"], len(vocab)):
        token["id"] = number
        if token["content"] == BOS:
            data["post_processor"]["special_tokens"][BOS]["ids"] = [number]
    (model / "tokenizer.json").write_text(json.dumps(data))
    texts = ["a", *("".join(rng.choices("aaabbb ", k=rng.randrange(1, 30))) for _ in range(3000))]
    world = World(tmp_path, tokenizer=model).raw({"a.jsonl": [{"text": text} for text in texts]})
    expected = world.plan(num_shards=1, engine="gigatoken").copy(tmp_path / "reference")
    files = {path.name: json.loads(path.read_bytes()) for path in (world.data_dir / "tokenizer").iterdir()}
    kept = files["fast_tokenizer.json"]["model"].pop("merges")
    assert len(kept) < len(files["tokenizer.json"]["model"].pop("merges"))
    assert files["fast_tokenizer.json"] == files["tokenizer.json"]
    world.try_shard(0, engine="gigatoken").ends(0)
    assert world.contents() == expected.run(engine="tokenizers").contents()


class PanicException(BaseException):
    """What a panic in Rust arrives as."""


SOURCES: list[bytes] = []  # texts that gigatoken was given


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """See what gigatoken is given."""
    rust, real = gigatoken.gigatoken_rs, gigatoken.gigatoken_rs.BytesSource
    monkeypatch.setattr(rust, "BytesSource", lambda data: SOURCES.append(data) or real(data))
    SOURCES.clear()


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> World:
    """More text than planning takes for too little to compare the engines on."""
    world = World(tmp_path_factory.mktemp("planned"))
    return world.raw({"a.txt": "the kettle sings, and nobody's listening 12345\n" * 8000}).plan(num_shards=1)


def load_another(patch: pytest.MonkeyPatch, folder: Path, kind: str) -> None:
    """Let gigatoken load something else: a last id may be one too large, of all texts or of some."""
    load = gigatoken.gigatoken_rs.load_hf_json

    def load_hf_json(raw: bytes) -> Any:
        if kind == "panics":
            raise PanicException("index out of bounds")
        if kind == "refuses":
            raise ValueError("unsupported pre-tokenizer")
        backend = load(raw)

        def encode(*args: Any, **options: Any) -> Any:
            rows, more = backend.encode_batch_padded(*args, **options)
            if kind == "wrong" or (kind == "wrong on an ideograph" and "\u3404".encode() in SOURCES[-1]):
                rows[0][-1] += 1
            return rows, more

        return SimpleNamespace(encode_batch_padded=encode)

    forget_engines(folder)
    patch.setattr(gigatoken.gigatoken_rs, "load_hf_json", load_hf_json)


def forget_engines(folder: Path) -> None:
    """A process keeps the tokenizer that it loaded last: let that be another one."""
    other = World(folder, tokenizer=save_tokenizer(folder / "model")).raw({"a.txt": "a\n"})
    path = other.tokenizer / "tokenizer.json"
    data = json.loads(path.read_bytes())
    data["model"]["merges"].pop()
    path.write_text(json.dumps(data))
    other.plan(num_shards=1).try_shard(0, engine="gigatoken")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["right", "wrong", "panics", "refuses"])
def test_a_fast_engine_that_is_wrong_or_fails_gives_way_to_the_reference(
    planned: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    load_another(monkeypatch, tmp_path / "other", kind)
    world = planned.copy(tmp_path)
    ended = world.try_shard(0).ends(0)
    assert engine_of(world) == ("gigatoken" if kind == "right" else "tokenizers")
    assert ("gigatoken cannot" in ended.text) == (kind != "right")
    (world.data_dir / "shard-00000.json").unlink()
    assert world.try_shard(0, engine="gigatoken").code == (0 if kind == "right" else 2)


@pytest.mark.slow
def test_planning_tries_all_code_points_and_keeps_the_verdict_and_one_wrong_id_is_enough(
    planned: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        load_another(patch, tmp_path / "other", "wrong on an ideograph")
        doubted = World(tmp_path / "doubted", raw_dir=planned.raw_dir).plan(num_shards=1)
        assert not doubted.plan_json()["fast_engine_is_equal"]
    assert engine_of(doubted.run()) == "tokenizers"
    forget_engines(tmp_path / "another")
    SOURCES.clear()
    sure = World(tmp_path / "sure", raw_dir=planned.raw_dir).plan(num_shards=1)
    assert sure.plan_json()["fast_engine_is_equal"]
    seen = set(b"".join(SOURCES).decode())
    old = unicodedata.ucd_3_2_0
    points = (chr(point) for point in range(0x10000) if old.category(chr(point)) not in ("Cn", "Cs"))
    assert {point for point in points if point not in seen} == set()
    SOURCES.clear()
    World(tmp_path / "again", raw_dir=planned.raw_dir).plan(num_shards=1)
    assert sum(map(len, SOURCES)) < 1 << 20, "the verdict was kept"


def of_version_1(data: bytes) -> Any:
    """A tokenizer behind the calls of tokenizers 1.0: all settings come with each call."""
    tokenizer = Tokenizer.from_buffer(data)

    def encode_batch(
        inputs: Any, *, encode_special_tokens: bool, padding: None, truncation: None, **options: Any
    ) -> Any:
        tokenizer.encode_special_tokens = encode_special_tokens
        return tokenizer.encode_batch(inputs, **options)

    return SimpleNamespace(encode_batch=encode_batch)


def test_tokenizers_of_version_1_give_the_same_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, options in enumerate(({"allow_special_tokens": True}, {"add_special_tokens": False})):
        world = World(tmp_path / str(number)).raw({"a.txt": f"a {EOS} 가\nx\n"})
        newer = world.plan(num_shards=1, **options).copy(tmp_path / f"newer {number}")
        with monkeypatch.context() as patch:
            patch.setattr(tokenizers, "Tokenizer", SimpleNamespace(from_buffer=of_version_1))
            newer.run(engine="tokenizers")
        assert newer.documents() == world.run(engine="tokenizers").documents()


@pytest.mark.slow
def test_a_reference_that_gives_other_ids_than_at_planning_is_refused(planned: World, tmp_path: Path) -> None:
    """The probe's hash in plan.json is of other ids: another version of tokenizers planned."""
    world = planned.copy(tmp_path)
    probe = world.plan_json()["probe_sha256"]
    rewrite_plan(world.data_dir / "plan.json", f'"{probe}"', f'"{"0" * 64}"')
    for engine in ("auto", "tokenizers"):
        world.try_shard(0, engine=engine).ends(78, "tokenizers")


SCRIPT = ROOT / "benchmarks" / "baseline.py"


@pytest.mark.parametrize("flags", [["--shard_id"], ["--shard-id", "--allow-special-tokens"]], ids=str)
def test_the_plain_form_gives_the_baselines_members_but_for_control_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    """Of empty lines, every line end, blanks, a mark, and names of control tokens."""
    odd = ["", "  \t ", "\u3000둘러싸인 \x0b", "a\u2028b\x85c", "\ufeff표", "끝 \\ \" ' {}", "the kettle"] * 9
    ends = itertools.cycle(["\n", "\r\n", "\n", "\r"])
    text = "\ufeff" + "".join(line + next(ends) for line in odd) + "no line end"
    control = "".join(f"text {token} more{token}\n plain {token[2:4]}\n" for token in (EOS, BOS, TURN))
    ours = World(tmp_path).raw({"a.txt": control, "b.txt": text, "c.md": "no .txt"})
    first = World(tmp_path, data_dir=tmp_path / "first")
    folders = ["--input_dir", ours.raw_dir, "--model_id", ours.tokenizer, "--output_dir"]
    for shard_id in (0, 1):
        words = [SCRIPT, "--shard_id", shard_id, *folders, first.data_dir]
        monkeypatch.setattr(sys, "argv", [*map(str, words)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        ours.main(flags[0], shard_id, *folders, ours.data_dir, *flags[1:]).ends(0)
    expected, found = dict(first.members()), dict(ours.members())
    assert list(found) == list(expected)
    assert len(found) > 20
    other = {name for name in found if found[name] != expected[name]}
    assert len(other) == (3 if flags == ["--shard_id"] else 0)
    assert all(name.endswith(".token_ids.json") for name in other)


def test_ids_of_json_are_written_as_json_dumps_does_for_vocabularies_of_any_size(tmp_path: Path) -> None:
    """Ids of one to seven digits."""
    for size in (10, 856, 128_256, 1_000_002):
        numbers = [n for n in (0, 9, 10, 99, 100, 9_999, 99_999, 100_000, 999_999, 10**6) if n < size - 2]
        words = Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in [*numbers, size - 1]}, "w0"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        model = tmp_path / str(size)
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(model)
        expected = [numbers, numbers[::-1], [size - 1], [0]]
        texts = "\n".join(" ".join(f"w{number}" for number in some) for some in expected)
        world = World(model, tokenizer=model).raw({"a.txt": texts}).plan(num_shards=1).run()
        ids = [data.decode() for name, data in world.members() if name.endswith(".json")]
        assert ids == [json.dumps(some) for some in expected]
