"""Data sets and forms of batches whose streams are frozen.

A form is a data set with arguments of ``get_llama3_dataloader``. Everything is small and the same on every
machine: the texts come from ``hostile_texts``, the ids from a hard-coded vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import webdataset
from tokenizers import Tokenizer

from tests.world import TURN, Ranks, World, hostile_text, hostile_texts, save_tokenizer, tokenizer_dir

NUM_STEPS = 50
RESUME_AT = 23  # step at which a run resumes on another number of ranks
WORLD_SIZES = (1, 2, 3, 8)
GLOBAL_BATCH = 24  # divisible by every world size
SEQ_LEN = 48
# The generation block has the whole answer with its end, so no token has characters from both sides of an
# edge of transformers' mask.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|eot_id|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|eot_id|>{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Form:
    """A data set and how a loader makes batches from it."""

    data: str | tuple[str, ...]  # names of data sets; a tuple is a mixture
    global_batch_size: int | list[tuple[int, int]] = GLOBAL_BATCH
    accumulates: bool = False  # whether a rank has two or three batches per step
    arguments: dict[str, Any] = field(default_factory=dict)

    def batch_size(self, world_size: int) -> int | None:
        """Return the samples per batch on one rank, or None for all samples of its step."""
        if not self.accumulates or isinstance(self.global_batch_size, list):
            return None
        of_rank = self.global_batch_size // world_size
        return of_rank // 3 if of_rank % 3 == 0 else of_rank // 2


FORMS = {
    "documents": Form("documents", accumulates=True),
    "grouped": Form("documents", 48, arguments={"group_by_length": 2}),
    "packed_concat": Form("concat", arguments={"boundaries": "transformers"}),
    "packed_best_fit": Form("best_fit", arguments={"boundaries": ["segment_ids", "position_ids"]}),
    "packed_at_load": Form("documents", arguments={"seq_len": SEQ_LEN}),
    "chat": Form("chat", accumulates=True, arguments={"boundaries": "segment_ids"}),
    "mixture": Form(("korean", "english", "documents"), arguments={"weights": [
        (0, {"korean": 0.5, "english": 0.3, "documents": 0.2}),
        (20, {"korean": 0.1, "english": 0.2, "documents": 0.7}),
        (37, {"korean": 0.6, "english": 0.4, "documents": 0.0}),
    ]}),
    "batch_size_schedule": Form("concat", [(0, 24), (10, 48), (30, 72)]),
    "training_side": Form("split", arguments={"split": "train"}),
    "validation_side": Form("split", arguments={"split": "validation"}),
    "external_tars": Form("external", arguments={"model_id": tokenizer_dir, "shuffle": False}),
    "first_script": Form("first_script", arguments={"model_id": tokenizer_dir, "seed": 5}),
    "boundaries": Form("documents", arguments={
        "seq_len": SEQ_LEN, "boundaries": ["position_ids", "segment_ids", "cu_seqlens"],
    }),
    "shifted_targets": Form("concat", arguments={
        "targets": "shifted", "boundaries": ["position_ids", "segment_ids"],
    }),
    "origins": Form("documents", arguments={"seq_len": SEQ_LEN, "origins": True}),
    "max_length": Form("documents", arguments={"max_length": 20, "padding": "max_length"}),
}  # fmt: skip


class DataSets:
    """The data sets of all forms, below one folder. Each is made on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Return an input of ``get_llama3_dataloader``: a folder, or a pattern or list of tars."""
        if name not in self._made:
            self._made[name] = _MAKERS[name](self._folder / name)
        return self._made[name]

    def ranks(self, name: str, world_size: int, **more: Any) -> Ranks:
        """Return the loaders of a form on ``world_size`` ranks."""
        form = FORMS[name]
        data = self[form.data] if isinstance(form.data, str) else {each: self[each] for each in form.data}
        more["global_batch_size"] = form.global_batch_size
        for key, value in form.arguments.items():
            more[key] = value() if value is tokenizer_dir else value
        return Ranks(data, world_size=world_size, batch_size=form.batch_size(world_size), **more)


def hostile_world(folder: Path) -> World:
    """Write three raw files with all line ends, bad bytes, empty lines and broken records."""
    records = [json.dumps({"text": text}, ensure_ascii=False) for text in hostile_texts(150, seed=2)]
    records[7:7] = ["", "  ", "{", '{"text": null}', '{"other": 1}', '{"text": "\\ud800"}', '{"text": ""}']
    bad = b"\nbad \xff byte\n\n \t \r\nlast line, without an end"
    mark = "\ufeffa mark stands before the first line\r\n"
    return World(folder).raw({
        "a.txt": hostile_text(180, seed=1).encode() + bad,
        "b.jsonl": "\n".join(records) + "\n",
        "c.txt": mark + hostile_text(90, seed=3) + "\n",
    })  # fmt: skip


def _shardprep(**options: Any) -> Callable[[Path], Path]:
    return lambda folder: hostile_world(folder).make(num_shards=3, max_bad_fraction=1, **options).data_dir


def _source(*of_text: int) -> Callable[[Path], Path]:
    return lambda folder: World(folder).raw({"a.txt": hostile_text(*of_text)}).make(num_shards=2).data_dir


def conversations() -> list[list[dict[str, str]]]:
    """Return conversations of one to three questions with answers. ``plan`` leaves one of them out."""
    # A message with a control token would be left out.
    every = hostile_texts(1500, seed=6, most_words=6)
    texts = iter([text for text in every if len(text) < 200 and "<|" not in text])
    chats = []
    for number in range(130):
        chat = [{"role": "system", "content": next(texts)}] if number % 3 == 0 else []
        for _ in range(1 + number % 3):
            chat += [{"role": "user", "content": next(texts)}, {"role": "assistant", "content": next(texts)}]
        chats.append(chat)
    chats[40][-1]["content"] += TURN
    return chats


def _chat(folder: Path) -> Path:
    model = save_tokenizer(folder / "model", CHAT_TEMPLATE)
    world = World(folder, tokenizer=model)
    world.raw({"chats.jsonl": [{"messages": chat} for chat in conversations()]})
    return world.make(record="chat", seq_len=SEQ_LEN, num_shards=3, max_bad_fraction=0.1).data_dir


def _external(folder: Path) -> list[str]:
    """Write tars with webdataset, with ids as lists and as arrays, and other members between them."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.from_file(str(tokenizer_dir() / "tokenizer.json"))
    documents = [tokenizer.encode(text).ids for text in hostile_texts(110, seed=7)]
    for number in range(3):
        with webdataset.TarWriter(str(folder / f"part-{number}.tar")) as writer:
            for place, ids in enumerate(documents[number::3]):
                member: dict[str, Any] = {"token_ids.json": ids}
                if (number + place) % 2:
                    member = {"token_ids.npy": np.array(ids, np.int64)}
                writer.write({"__key__": f"d{number}_{place}", **member, "url.txt": f"u{place}"})
    return [str(folder / "part-{0..1}.tar"), str(folder / "part-2.tar")]


def _first_script(folder: Path) -> str:
    """Write tars as the script did that this project replaces: a line is a document, and a file is a tar."""
    tokenizer = Tokenizer.from_file(str(tokenizer_dir() / "tokenizer.json"))
    folder.mkdir(parents=True)
    for shard in range(2):
        lines = [line.strip() for line in hostile_texts(120, seed=8 + shard) if line.strip()]
        with webdataset.TarWriter(str(folder / f"shard-{shard:05d}.tar")) as writer:
            for number, line in enumerate(lines):
                sample = {"__key__": f"sample_{shard}_{number:08d}", "text.txt": line}
                writer.write({**sample, "token_ids.json": tokenizer.encode(line).ids})
    return str(folder / "shard-{00000..00001}.tar")


SHARDPREP_SETS: dict[str, Callable[[Path], Path]] = {
    "documents": _shardprep(),
    "documents_npy": _shardprep(token_format="npy", keep_text=False, append_eos=True),
    "documents_as_files": _shardprep(doc="file", allow_special_tokens=True, add_special_tokens=False),
    "concat": _shardprep(record="packed", seq_len=SEQ_LEN),
    "best_fit": _shardprep(record="packed", seq_len=SEQ_LEN, pack="best_fit"),
    "chat": _chat,
    "split": _shardprep(validation_fraction=0.3),
    "split_packed": _shardprep(record="packed", seq_len=SEQ_LEN, validation_fraction=0.3),
    "korean": _source(90, 4, 10),
    "english": _source(130, 5, 5),
}
_MAKERS: dict[str, Callable[[Path], Any]] = {
    **SHARDPREP_SETS,
    "external": _external,
    "first_script": _first_script,
}
