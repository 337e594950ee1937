"""Check that a run that blanks the hits of ``shardprep overlap`` at step 500 goes on exactly, for 500 steps.

    PYTHONPATH=. python benchmarks/overlap_run.py [STEPS]

All batches are compared with those of a run on the original data, with the hits replaced by padding. The
steps that ``where --blanked`` lists are compared with the batches, too.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from measured_run import machine_line

from loader import TokenLoader
from tests.word_tokenizers import save_word_tokenizer
from tests.world import World, open_loader

# The words of the evaluation, which no other text has, and the id of padding, out of 200.
FIRST, LAST, PADDING = 100, 197, 198


def endless(loader: TokenLoader) -> Iterator[Any]:
    while True:
        yield from loader


def as_padding(batch: Any) -> dict[str, torch.Tensor]:
    """Return a batch with padding in place of words of the evaluation, and without labels there."""
    is_gone = (batch["input_ids"] >= FIRST) & (batch["input_ids"] <= LAST)
    is_behind = torch.zeros_like(is_gone)  # tokens predicted from a removed one
    is_behind[:, 1:] = is_gone[:, :-1]
    labels = batch["labels"].masked_fill(is_gone | is_behind, -100)
    return {"input_ids": batch["input_ids"].masked_fill(is_gone, PADDING), "labels": labels}


def go_on_without_hits(folder: Path, num_steps: int, **form: Any) -> dict[str, int]:
    """Blank the hits of ``overlap`` after some steps of a run, go on for as many steps, and compare.

    The evaluation's places in a batch are recognized by its words. Returns counts.
    """
    chooser, num_evals = random.Random(5), num_steps // 2

    def text(first: int, end: int, num_words: int) -> str:
        return " ".join(f"w{chooser.randrange(first, end)}" for _ in range(num_words))

    evals = [text(FIRST, LAST + 1, 20) for _ in range(num_evals)]
    texts = evals + [text(1, FIRST, chooser.randrange(1, 60)) for _ in range(30 * num_steps)]
    chooser.shuffle(texts)
    (folder / "evals.txt").write_text("\n".join(evals))
    save_word_tokenizer(folder / "model", 200, splits=True)
    world = World(folder, tokenizer=folder / "model").raw({"a.txt": "\n".join(texts)})
    world.make(num_shards=4, append_eos=False, **form)
    options: dict[str, Any] = {"batch_size": 12, "global_batch_size": 12, "seed": 5}
    with world.loader(**options) as loader:
        batches = list(islice(endless(loader), num_steps))
        (folder / "state.json").write_text(json.dumps(loader.state_dict()))
        expected = [as_padding(batch) for batch in islice(endless(loader), num_steps)]
    ended = world.main("overlap", world.data_dir, against=folder / "evals.txt")
    assert ended.code == 0, ended.text
    names, new = world.data_dir / "overlap" / "names.txt", folder / "new"
    ended = world.main("blank", world.data_dir, ids=names, output=new, num_proc=1)
    assert ended.code == 0, ended.text
    seen = [
        step
        for step, batch in enumerate(batches)
        if not torch.equal(batch["input_ids"], as_padding(batch)["input_ids"])
    ]
    ended = world.main("where", new, "--state", folder / "state.json", "--blanked", "--json")
    assert [each["step"] for each in json.loads(ended.out.splitlines()[-1])["steps"]] == seen
    with open_loader(new, **options) as loader:
        loader.load_state_dict(json.loads((folder / "state.json").read_text()))
        rest = list(islice(endless(loader), num_steps))
    for batch, wanted in zip(rest, expected, strict=True):
        assert torch.equal(batch["input_ids"], wanted["input_ids"])
        assert torch.equal(batch["labels"], wanted["labels"])
    num_gone = sum(int((batch["input_ids"] == PADDING).sum()) for batch in rest)
    return {"num_steps": num_steps, "num_seen": len(seen), "num_padding": num_gone}


def main() -> None:
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    for form in ({}, {"record": "packed", "seq_len": 32}):
        with tempfile.TemporaryDirectory(prefix="shardprep-overlap-") as name:
            print(form or "documents", go_on_without_hits(Path(name), num_steps, **form), flush=True)
    print(machine_line())


if __name__ == "__main__":  # blank starts processes that import this file
    main()
