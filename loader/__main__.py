"""``python -m loader DATA`` prints the first batch, ``stage`` copies shards, ``where`` names documents."""

from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C while Python still imports waits until the command can stop cleanly
    import signal

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

import argparse
import sys
from collections.abc import Sequence

from shardprep.command_line import Command, Program, given_words
from shardprep.console import counted, print_lines

SHOWN_IDS = 12
SHOWN_CHARS = 200
_NAMED = ("stage", "where")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``stage`` or ``where``, or show the shards that the words name. Returns an exit code."""
    words = given_words(argv)
    return PROGRAM.run(words if words[:1] and words[0] in _NAMED else ["show", *words])


def show(args: argparse.Namespace) -> int:
    from loader.dataloader import get_llama3_dataloader

    options = {name: value for name, value in vars(args).items() if name != "command"}
    with get_llama3_dataloader(**options) as loader:
        batch = next(iter(loader))
        num_samples = sum(source.order.num_samples for source in loader.run.sources)
        print_lines(f"{counted(num_samples, 'sample')}, {counted(len(loader), 'batch')} per epoch")
        for name, tensor in batch.items():
            print_lines(f"{name}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
        for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
            real = ids[batch["attention_mask"][row].bool()]
            print_lines("", f"sample {row}: {len(real)} tokens, {len(ids) - len(real)} of padding")
            for name, numbers in (("input_ids", ids.tolist()), ("labels   ", labels.tolist())):
                shown = str(numbers)
                if len(numbers) > 2 * SHOWN_IDS:
                    shown = f"{str(numbers[:SHOWN_IDS])[:-1]}, ..., {str(numbers[-SHOWN_IDS:])[1:]}"
                print_lines(f"  {name} {shown}")
            print_lines(f"  text      {loader.tokenizer.decode(real)[:SHOWN_CHARS]!r}")
    return 0


def _show_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] input_shards ...\n       %(prog)s {stage,where} ..."
    parser.description = f"{PROGRAM.description} A folder named stage is ./stage."
    parser.add_argument("input_shards", nargs="+", help="a folder, an index.json, tars or a pattern of tars")
    parser.add_argument("--model_id", help="whose tokenizer made tars that shardprep did not write")
    parser.add_argument("--batch_size", type=int, default=2, help="samples (default: 2)")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that read (default: 0)")
    parser.add_argument("--max_length", type=int, help="tokens at which documents are cut")
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffle (default: 0)")


PROGRAM = Program(
    name="python -m loader",
    description="Print a batch of a data set, decoded; or stage its shards on this node.",
    commands={
        "show": Command(summary="print the first batch", add_flags=_show_flags, run=show, is_nameless=True),
        "stage": Command(
            summary="copy shards to a disk of this node, verified",
            add_flags="loader.copies:add_flags",
            run="loader.copies:stage",
        ),
        "where": Command(
            summary="which documents a training step saw",
            add_flags="loader.where:add_flags",
            run="loader.where:where",
        ),
    },
)

if __name__ == "__main__":
    sys.exit(main())
