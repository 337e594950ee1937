"""``python -m loader``: print the first batch of a data set, or run ``stage``, ``where`` or ``forecast``."""

from __future__ import annotations

if __name__ == "__main__":
    from shardprep import begin_command

    begin_command()

import argparse
import sys
from collections.abc import Sequence

from shardprep.command_line import Command, Program, given_words
from shardprep.console import counted, print_lines

SHOWN_IDS = 12
SHOWN_CHARS = 200
_NAMED = ("forecast", "stage", "where")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names, or show the shards that it names. Returns the exit code."""
    words = given_words(argv)
    return PROGRAM.run(words if words[:1] and words[0] in _NAMED else ["show", *words])


def show(args: argparse.Namespace) -> int:
    from loader.dataloader import get_llama3_dataloader
    from loader.read.tokenizer import limited_decode

    options = {name: value for name, value in vars(args).items() if name != "command"}
    with get_llama3_dataloader(**options) as loader:
        batch = next(iter(loader))
        num_samples = sum(source.order.num_samples for source in loader.run.sources)
        print_lines(f"{counted(num_samples, 'sample')}, {counted(len(loader), 'batch')} per epoch")
        for name, tensor in batch.items():
            print_lines(f"{name}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
        text_of = limited_decode(loader.tokenizer)
        for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
            real = ids[batch["attention_mask"][row].bool()]
            print_lines("", f"sample {row}: {counted(len(real), 'token')}, {len(ids) - len(real)} of padding")
            for name, numbers in (("input_ids", ids.tolist()), ("labels   ", labels.tolist())):
                shown = str(numbers)
                if len(numbers) > 2 * SHOWN_IDS:
                    shown = f"{str(numbers[:SHOWN_IDS])[:-1]}, ..., {str(numbers[-SHOWN_IDS:])[1:]}"
                print_lines(f"  {name} {shown}")
            print_lines(f"  text      {text_of(real.tolist())[:SHOWN_CHARS]!r}")
    return 0


def _show_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = f"{PROGRAM.description} A folder named stage is ./stage."
    parser.add_argument("input_shards", nargs="+", help="a folder, an index.json, tars or a pattern of tars")
    parser.add_argument("--model_id", help="model whose tokenizer made tars that shardprep did not write")
    parser.add_argument("--batch_size", type=int, default=2, help="samples in the batch (default: 2)")
    parser.add_argument("--num_workers", type=int, default=0, help="reading processes (default: 0)")
    parser.add_argument("--max_length", type=int, help="truncate documents to this many tokens")
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffle (default: 0)")


PROGRAM = Program(
    name="python -m loader",
    description="Print the first batch of a data set, decoded. Other commands: stage, where, forecast.",
    commands={
        "show": Command("print the first batch", _show_flags, show, is_nameless=True),
        "stage": Command(
            "copy a data set to a local disk", "loader.train.stage:add_flags", "loader.train.stage:stage"
        ),
        "forecast": Command(
            "print what a run will deliver",
            "loader.train.forecast:add_flags",
            "loader.train.forecast:forecast",
        ),
        "where": Command(
            "print what a training step saw", "loader.train.where:add_flags", "loader.train.where:where"
        ),
    },
)

if __name__ == "__main__":
    sys.exit(main())
