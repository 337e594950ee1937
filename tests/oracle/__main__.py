"""``python -m tests.oracle``: compare all streams and members with the table; ``--make`` writes it anew.

Before it writes, ``--make`` compares the labels of chat with transformers' own mask.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.oracle import frozen
from tests.oracle.forms import FORMS, SHARDPREP_SETS, WORLD_SIZES, DataSets, conversations
from tests.world import TURN, Ranks


def check_chat_labels(data: DataSets) -> None:
    """Raise AssertionError unless ids and labels of chat are those that transformers gives."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(data["chat"].parent / "model")
    expected: list[tuple[int, int]] = []
    for chat in conversations():
        if TURN in chat[-1]["content"]:
            continue  # it is left out
        found = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        expected += zip(found["input_ids"], found["assistant_masks"], strict=True)
    place = 0
    with Ranks(
        data["chat"], global_batch_size=1, shuffle=False, boundaries=["segment_ids", "position_ids"]
    ) as ranks:
        for (row,) in ranks.take(len(ranks.loaders[0])):
            for token, label, position in zip(
                row["input_ids"], row["labels"], row["position_ids"], strict=True
            ):
                wanted_token, is_assistant = expected[place]
                # What begins a document, or goes on in another row, has no label.
                wanted_label = token if is_assistant and position else -100
                assert (token, label) == (wanted_token, wanted_label), f"token {place} of all conversations"
                place += 1
    assert place == len(expected)


def make(data: DataSets) -> None:
    check_chat_labels(data)
    streams: dict[str, dict[str, list[str]]] = {}
    for name in FORMS:
        of_form: dict[str, list[str]] = {}
        for _, found in frozen.stream(data, name, world_size=1, num_workers=(0, 0), resume_on=1):
            for field, value in found.items():
                of_form.setdefault(field, []).append(value)
        streams[name] = of_form
    members = {name: frozen.members_of(data[name]) for name in SHARDPREP_SETS}
    frozen.write_table(streams, members)


def problems(data: DataSets) -> list[str]:
    """Compare each form on each number of ranks, without workers and with two."""
    members: Any = frozen.read_table()["members"]
    found = [
        f"the members of {name} differ"
        for name in SHARDPREP_SETS
        if frozen.members_of(data[name]) != members[name]
    ]
    for name in FORMS:
        for world_size in WORLD_SIZES:
            for num_workers in ((0, 0), (2, 2)):
                try:
                    frozen.compare(data, name, world_size, num_workers)
                except AssertionError as error:
                    found.append(str(error))
        print(name, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", action="store_true", help="write the table anew before comparing with it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        data = DataSets(Path(folder) / "data")
        if args.make:
            make(data)
        found = problems(data)
    print(*found, sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
