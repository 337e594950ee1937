"""Drive the product from raw text to batches, through ``main()`` of the commands and ``loader`` only.

    world = World(tmp_path).raw({"ko.txt": hostile_text(200), "en.jsonl": [{"text": "a"}, {"text": "b"}]})
    world.plan(num_shards=3).run().verify()                  # a failing step shows the command's message
    ended = world.main("peek", world.data_dir, "00000:3")    # exit code and output
    samples = world.samples(boundaries="segment_ids")

This module does not depend on how the packages are structured, so tests that use only it survive refactoring.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

import loader as shards_to_batches  # torch is imported when the first loader is made
from shardprep.__main__ import main
from shardprep.errors import ShardprepError

if TYPE_CHECKING:
    from loader import TokenLoader

BOS, EOS, PAD, START, END, TURN = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
)  # fmt: skip
_MERGED = (
    "the", " the", " and", " of", " to", "ing", " kettle", "er", "on", "th", "re", "st", "0", "12", " a",
    "도서관", " 겨울은", " 바닷가", "니다", "하는", " 창가", "에서", "이", "가", "은", "는", "다", "🙂",
)  # fmt: skip
_WORDS = (
    "the", "kettle", "sings", "and", "nobody's", "listening", "12345", "to", "a", "store", "of", "Red",
    "도서관", "겨울은", "바닷가", "마을의", "창가", "자리에서", "읽는다", "합니다", "🙂",
    "👩\u200d👩\u200d👧", "☕️", "é", "e\u0301",
    "\u1112\u1161\u11ab\u1100\u1173\u11af",  # Hangul in NFD
    "\x00", "\x1b[2J", "\x85", "\u2028", "\u200b", "\ufeff", "\t", "\u3000", '"\\', "</s>",
    EOS, BOS, "<|pad", TURN, "<|reserved_special_token_0|>", "한<|end_of_text|>글",
)  # fmt: skip
_LINE_ENDS = ("\n", "\n", "\n", "\r\n", "\r")

Sample = dict[str, list[int]]
"""Fields of one sample of a batch, without padding if the batch has an attention_mask."""
GlobalBatch = list[Sample]


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str  # standard output
    err: str  # standard error
    error: ShardprepError | None = None  # the first error that it reported

    @property
    def text(self) -> str:
        """Standard output, then standard error."""
        return self.out + self.err

    def ends(self, code: int, *named: object) -> Ended:
        """Assert the exit code and that the output contains ``named``, and return self.

        If ``code`` is not 0, only standard error is searched.
        """
        __tracebackhide__ = True
        assert self.code == code, f"exit code {self.code}: {self.text}"
        for each in named:
            assert str(each) in (self.err if code else self.text), f"{each} is not in: {self.text}"
        return self


@functools.cache
def tokenizer_dir() -> Path:
    """Return this process's folder with a small byte-level BPE tokenizer like Llama 3's. Never write to it.

    The vocabulary is hard-coded, not trained, so that all versions of ``tokenizers`` give the same ids.
    """
    folder = Path(tempfile.mkdtemp(prefix="shardprep-world-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path, chat_template: str | None = None, *, without: str = "") -> Path:
    """Create a folder with tokenizer.json and tokenizer_config.json, and return it.

    ``without``: a special token to leave out of the configuration, such as "eos_token".
    """
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in _MERGED:
        # Each merge appends one letter: "t" + "h", "th" + "e".
        spelled = letters.pre_tokenize_str(word)[0][0]
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in vocab:
                vocab[spelled[:end]] = len(vocab)
                merges.append((spelled[: end - 1], spelled[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in (BOS, EOS, PAD, START, END, TURN)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        f"{BOS} $A", f"{BOS} $A {BOS} $B", [(BOS, tokenizer.token_to_id(BOS))]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    config.pop(without, None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return folder


def hostile_texts(num_texts: int, seed: int = 0, most_words: int = 12) -> list[str]:
    """Return texts with Korean, English, emoji, decomposed Hangul, control characters and special tokens.

    Some are empty or blank, and one is 50 times as long as the others. No text contains a line end.
    """
    chooser = random.Random(seed)

    def below(number: int) -> int:
        return int(chooser.random() * number)  # Python guarantees the same sequence for random() only

    texts = []
    for number in range(num_texts):
        num_words = below(most_words + 1)
        if number == num_texts // 2:
            num_words = 50 * most_words
        texts.append(" ".join(_WORDS[below(len(_WORDS))] for _ in range(num_words)))
    return texts


def hostile_text(num_lines: int, seed: int = 0, most_words: int = 12) -> str:
    """Return ``hostile_texts`` as lines with all kinds of line ends; the last line has none."""
    texts = hostile_texts(num_lines, seed, most_words)
    ends = [_LINE_ENDS[number % len(_LINE_ENDS)] for number in range(num_lines - 1)]
    return "".join(text + end for text, end in zip(texts, [*ends, ""], strict=True))


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Convert ``{"record": "packed", "keep_text": False}`` to ``--record=packed --no-keep_text``."""
    flags = []
    for name, value in options.items():
        if value is True or value is False:
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            flags.append(f"--{name}={value}")
    return flags


def call_main(*words: object, environ: Mapping[str, str] | None = None) -> Ended:
    """Run ``shardprep WORDS`` in this process, outside Slurm, and restore what the command changed in it.

    ``environ``: more environment variables.
    """
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    cpus = os.sched_getaffinity(0)
    created: list[ShardprepError] = []
    init = ShardprepError.__init__

    def record(self: ShardprepError, *args: Any, **fields: Any) -> None:
        init(self, *args, **fields)
        created.append(self)

    with mock.patch.dict(os.environ), mock.patch.object(ShardprepError, "__init__", record):
        for name in [name for name in os.environ if name.startswith(("SLURM_", "DATASET_"))]:
            del os.environ[name]
        os.environ.update(environ or {})
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code: Any = main([str(word) for word in words])
        except SystemExit as ending:
            code = ending.code
        finally:
            os.sched_setaffinity(0, cpus)
            for number, handler in handlers.items():
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)
    # main() prints an error and returns its exit code. Of the errors in the output, keep the first one.
    printed = [error for error in created if str(error) in err.getvalue()]
    printed.sort(key=lambda error: (err.getvalue().index(str(error)), -len(str(error))))
    return Ended(code or 0, out.getvalue(), err.getvalue(), printed[0] if printed else None)


@contextlib.contextmanager
def refuses(kind: type[ShardprepError], **fields: object) -> Iterator[None]:
    """Expect an error of exactly this class. ``path`` must be equal; other fields must contain the text."""
    raised = None
    try:
        yield
    except ShardprepError as error:
        raised = error
    assert type(raised) is kind, f"no {kind.__name__}, but {raised!r}"
    for name, text in fields.items():
        found = str(getattr(raised, name))
        assert found == str(text) if name == "path" else str(text) in found, f"{name} is {found}: {raised}"


def type_in(line: str) -> Ended:
    """Run a command that a message advises as a shell would, but in this process. Return how it ended."""
    ended = Ended(0, "", "")
    for part in line.split(" && "):
        match shlex.split(part):
            case ["mkdir", "-p", folder]:
                Path(folder).mkdir()
            case ["mv", pattern, folder]:
                for path in Path(pattern).parent.glob(Path(pattern).name):
                    shutil.move(path, folder)
            case ["shardprep", *words]:
                ended = call_main(*words)
            case words:
                raise AssertionError(f"no command of ours: {words}")
    return ended


def open_loader(data: Any, batch_size: int = 4, **arguments: Any) -> TokenLoader:
    """Return a loader, by default without workers."""
    return shards_to_batches.get_llama3_dataloader(data, batch_size, **{"num_workers": 0, **arguments})


def epoch_of(data: Any, batch_size: int = 4, **arguments: Any) -> list[list[Sample]]:
    """Return the samples of each batch of one epoch."""
    with open_loader(data, batch_size, **arguments) as loader:
        return [samples_of(batch) for batch in loader]


class World:
    """A folder of raw files and the data set that is made from them, both below ``folder``.

    Args:
        tokenizer: folder of the tokenizer. Default: ``tokenizer_dir()``.
        raw_dir: folder of the raw files. Default: ``folder/raw``.
        data_dir: folder of the data set. Default: ``folder/data``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tokenizer: Path | None = None,
        raw_dir: Path | None = None,
        data_dir: Path | None = None,
    ) -> None:
        self.raw_dir = raw_dir or folder / "raw"
        self.data_dir = data_dir or folder / "data"
        self.tokenizer = tokenizer or tokenizer_dir()
        self.num_shards = 0  # as planned
        self.raw_dir.mkdir(parents=True, exist_ok=True)

    def raw(self, files: Mapping[str, str | bytes | Iterable[Any]]) -> World:
        """Write raw files from text, bytes, or records (written as JSON lines)."""
        for name, content in files.items():
            path = self.raw_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                content = content.encode()
            elif not isinstance(content, bytes):
                lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in content]
                content = "".join(lines).encode()
            path.write_bytes(content)
        return self

    def main(self, *words: object, environ: Any = None, **options: Any) -> Ended:
        """Run ``shardprep WORDS --OPTIONS`` in this process, whatever its exit code."""
        return call_main(*words, *flags_of(options), environ=environ)

    def words_of_plan(self, **options: Any) -> list[str]:
        """Return the flags of ``plan`` that plan ``data_dir`` from ``raw_dir``."""
        folders = {"input_dir": self.raw_dir, "output_dir": self.data_dir, "model_id": self.tokenizer}
        return flags_of({**folders, **options})

    def try_plan(self, **options: Any) -> Ended:
        """Plan ``data_dir`` from ``raw_dir``, whatever the exit code."""
        return self.main("plan", *self.words_of_plan(**options))

    def try_shard(self, shard_id: int = 0, **options: Any) -> Ended:
        """Make a shard as an array task does, whatever the exit code."""
        return self.main("shard", shard_id=shard_id, output_dir=self.data_dir, **options)

    def plan(self, *, num_shards: int | None = 2, **options: Any) -> World:
        """Plan ``data_dir`` from ``raw_dir``. Raises AssertionError unless the exit code is 0."""
        self.try_plan(num_shards=num_shards, **options).ends(0)
        self.num_shards = len(self.plan_json()["cuts"]) - 1
        return self

    def run(self, *shard_ids: int, **options: Any) -> World:
        """Make these shards (default: all) in this process, each with the command of an array task."""
        for shard_id in shard_ids or range(self.num_shards):
            self.try_shard(shard_id, planned=True, **options).ends(0)
        return self

    def verify(self, **options: Any) -> World:
        """Verify the data set. Raises AssertionError unless the exit code is 0."""
        self.main("verify", self.data_dir, **options).ends(0)
        return self

    def make(self, **options: Any) -> World:
        """Plan with these options, make all shards and verify them."""
        return self.plan(**options).run().verify()

    def blanked(self, ids: Path, folder: Path, **options: Any) -> World:
        """Return a world with the data set that ``blank`` makes in ``folder``.

        To stay in this process, a first call of ``blank`` cannot start workers and fails. Then tasks make the
        shards, and a second call finishes. Raises AssertionError unless the exit code is 0.
        """
        new = World(folder.parent, tokenizer=self.tokenizer, raw_dir=self.raw_dir, data_dir=folder)
        words = ["blank", self.data_dir, "--ids", ids, "--output", folder, *flags_of(options)]
        with mock.patch.object(subprocess, "Popen", side_effect=BlockingIOError):
            call_main(*words)
        new.run(*(int(path.stem[6:]) for path in (folder / "blanked").iterdir()), **options)
        call_main(*words).ends(0)
        return new

    def copy(self, folder: Path, *, but: Sequence[str] = ()) -> World:
        """Return a world with a copy of this data set in ``folder``, without files that match ``but``."""
        ignored = shutil.ignore_patterns(*but)
        shutil.copytree(self.data_dir, folder / "data", dirs_exist_ok=True, ignore=ignored)
        other = World(folder, tokenizer=self.tokenizer, raw_dir=self.raw_dir)
        other.num_shards = self.num_shards
        return other

    def members(self) -> list[tuple[str, bytes]]:
        """Return (name, bytes) of the members of all tars, in order."""
        found = []
        for path in sorted(self.data_dir.glob("shard-*.tar")):
            with tarfile.open(path) as tar:
                found += [(item.name, tar.extractfile(item).read()) for item in tar]  # type: ignore[union-attr]
        return found

    def documents(self) -> list[tuple[str, str, list[int]]]:
        """Return (key, text, ids) of each document. Needs the default form: JSON ids and texts."""
        members = self.members()
        texts = {name.partition(".")[0]: data.decode() for name, data in members if name.endswith(".txt")}
        ids = {name.partition(".")[0]: data for name, data in members if name.endswith(".token_ids.json")}
        return [(key, text, json.loads(ids[key])) for key, text in texts.items()]

    def texts(self) -> list[str]:
        """Return the texts of all documents, in order."""
        return [text for _, text, _ in self.documents()]

    def lines(self, folder: str) -> list[Any]:
        """Return the parsed lines of a side folder, "quarantine" or "ids"."""
        paths = sorted((self.data_dir / folder).glob("shard-*.jsonl"))
        return [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]

    def digests(self) -> list[bytes]:
        """Return the digests of all documents, in the order of the digest files."""
        raw = b"".join(path.read_bytes() for path in sorted((self.data_dir / "digests").glob("shard-*")))
        return [raw[place : place + 16] for place in range(0, len(raw), 16)]

    def manifests(self) -> list[dict[str, Any]]:
        """Return the manifests of all shards made so far."""
        return [json.loads(path.read_bytes()) for path in sorted(self.data_dir.glob("shard-*.json"))]

    def left_out(self) -> dict[str, int]:
        """Return the number of documents that were left out, by reason."""
        counts = Counter[str]()
        for manifest in self.manifests():
            counts.update(manifest["counts"]["quarantined"])
        return dict(counts)

    def plan_json(self) -> dict[str, Any]:
        """Return the contents of plan.json."""
        return dict(json.loads((self.data_dir / "plan.json").read_bytes()))

    def inputs(self) -> list[str]:
        """Return the paths of the planned inputs, in order."""
        return [row[0] for row in self.plan_json()["inputs"]]

    def contents(self) -> dict[str, bytes]:
        """Return the files that equal data sets have equal: those of shards, with manifests without "run"."""
        found = {}
        for path in sorted(self.data_dir.rglob("shard-*")):
            data, name = path.read_bytes(), path.relative_to(self.data_dir).as_posix()
            found[name] = data.partition(b'\n "run": ')[0] if path.suffix == ".json" else data
        return found

    def temporaries(self) -> list[str]:
        """Return the temporary files in the data set's folder."""
        return sorted(path.relative_to(self.data_dir).as_posix() for path in self.data_dir.rglob(".*"))

    def loader(self, *, rank: int = 0, world_size: int = 1, **arguments: Any) -> TokenLoader:
        """Return the loader of one rank, by default without workers."""
        return open_loader(self.data_dir, rank=rank, world_size=world_size, **arguments)

    def samples(self, **arguments: Any) -> list[Sample]:
        """Return the samples of an epoch, unshuffled."""
        return [*chain(*epoch_of(self.data_dir, 1, shuffle=False, **arguments))]


class Ranks(contextlib.AbstractContextManager["Ranks"]):
    """The loaders of all ranks of a training run, in this process.

    Args:
        data: input of ``get_llama3_dataloader``; ``{name: world.data_dir}`` for a mixture.
        global_batch_size: samples per step over all ranks, or a schedule of (first step, size).
        batch_size: samples per batch on one rank. Default: one batch in the smallest step.
        order_batch_size: if ``global_batch_size`` was amended, the size that the run began with.
        state: return value of ``state()``, on any number of ranks.
        arguments: other arguments of ``get_llama3_dataloader``. ``num_workers`` is 0 by default.
    """

    def __init__(
        self,
        data: Any,
        *,
        world_size: int = 1,
        global_batch_size: int | Sequence[tuple[int, int]],
        batch_size: int | None = None,
        order_batch_size: int | None = None,
        state: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        sizes = [(0, global_batch_size)] if isinstance(global_batch_size, int) else global_batch_size
        least = order_batch_size or math.gcd(*(size for _, size in sizes))
        batch_size = batch_size or least // world_size
        # A training step may take several ticks of the order.
        self._num_batches_of_tick = least // (world_size * batch_size)
        self.loaders: list[TokenLoader] = []
        for rank in range(world_size):
            options = {"global_batch_size": global_batch_size, "rank": rank, "world_size": world_size}
            self.loaders.append(open_loader(data, batch_size, **options, **arguments))
            if state is not None:
                self.loaders[-1].load_state_dict(json.loads(json.dumps(state)))
        self._streams = [chain.from_iterable(repeat(loader)) for loader in self.loaders]  # all epochs

    def step(self) -> GlobalBatch:
        """Return the samples of the next global batch, in an order that does not depend on the ranks."""
        return self.join([self.batches_of_step(rank) for rank in range(len(self.loaders))])

    def batches_of_step(self, rank: int, most: int | None = None) -> list[Mapping[str, Any]]:
        """Return the remaining batches of one rank's step, at most ``most`` of them."""
        batches: list[Mapping[str, Any]] = [next(self._streams[rank])]
        while not self.loaders[rank].ends_step and len(batches) != most:
            batches.append(next(self._streams[rank]))
        return batches

    def join(self, batches: list[list[Mapping[str, Any]]]) -> GlobalBatch:
        """Join the batches of all ranks to the samples of one step."""
        counts = [len(of_rank) for of_rank in batches]
        assert len(set(counts)) == 1, f"the ranks have different numbers of batches in a step: {counts}"
        samples: GlobalBatch = []
        for first in range(0, counts[0], self._num_batches_of_tick):
            for of_rank in batches:
                for batch in of_rank[first : first + self._num_batches_of_tick]:
                    samples += samples_of(batch)
        return samples

    def take(self, num_steps: int) -> list[GlobalBatch]:
        """Return the next global batches, across epochs."""
        return [self.step() for _ in range(num_steps)]

    def state(self) -> dict[str, Any]:
        """Return the state, after a round trip through JSON. It must be equal on all ranks."""
        states = {json.dumps(loader.state_dict()) for loader in self.loaders}
        assert len(states) == 1, f"the states of ranks differ: {states}"
        return dict(json.loads(states.pop()))

    def close(self) -> None:
        """Stop the workers of all ranks."""
        for loader in self.loaders:
            loader.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def ids_of(batch: Mapping[str, Any]) -> list[list[int]]:
    """Return the ids of each sample of a batch, without padding."""
    return [sample["input_ids"] for sample in samples_of(batch)]


def samples_of(batch: Mapping[str, Any]) -> GlobalBatch:
    """Split a batch of tensors into samples, and check and remove the padding.

    Each sample gets its ``origins`` as one flat list: place, source, shard, sample and document, repeated.
    Fields of the whole batch, such as ``cu_seqlens``, must agree with ``position_ids`` and are left out.
    """
    fields = ("input_ids", "labels", "attention_mask", "position_ids", "segment_ids")
    rows = {name: batch[name].tolist() for name in fields if name in batch}
    if "position_ids" in rows:
        _check_document_edges(batch, rows["position_ids"])
    samples = [dict(zip(rows, of_sample, strict=True)) for of_sample in zip(*rows.values(), strict=True)]
    for sample in samples:
        if "attention_mask" in sample:
            _cut_padding(sample)
    for row, *origin in batch["origins"].tolist() if "origins" in batch else ():
        samples[row].setdefault("origins", []).extend(origin)
    return samples


def _cut_padding(sample: Sample) -> None:
    mask, width = sample["attention_mask"], len(sample["attention_mask"])
    num_tokens = sum(mask)
    assert mask == [1] * num_tokens + [0] * (width - num_tokens), f"the mask of a sample has holes: {mask}"
    padding = sample["labels"][num_tokens:]
    assert set(padding) <= {-100}, f"padding has labels: {padding}"
    assert len(set(sample["input_ids"][num_tokens:])) <= 1, "padding has several ids"
    for name, values in sample.items():
        sample[name] = values[:num_tokens]


def _check_document_edges(batch: Mapping[str, Any], positions: list[list[int]]) -> None:
    flat = [*chain(*positions)]
    edges = [place for place, position in enumerate(flat) if position == 0] + [len(flat)]
    for name, value in batch.items():
        if name.startswith("cu_seq"):
            assert value.tolist() == edges, f"{name} and position_ids describe different documents"
        elif name.startswith("max_"):
            assert value == max(flat) + 1, f"{name} and position_ids describe different documents"
