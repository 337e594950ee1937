"""``python -m loader DATA`` prints the first batch, decoded; ``python -m loader stage`` copies shards."""

from __future__ import annotations

import argparse
import os
import re
import sys

from loader.staging.stage_command import stage
from shardprep.errors import ReadWriteError, ShardprepError, Stopped

SHOWN_IDS = 12
SHOWN_CHARS = 200


def main(argv: list[str] | None = None) -> int:
    """Show what a training script would get, or stage. Returns an exit code, as preprocess does."""
    argv = [_underscored(word) for word in (sys.argv[1:] if argv is None else argv)]
    try:
        return stage(argv[1:], say=_say) if argv[:1] == ["stage"] else _show(argv)
    except (ShardprepError, Stopped) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _show(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loader",
        usage="%(prog)s [options] input_shards ...\n       %(prog)s {stage} ...",
        description="Print a batch of a data set, decoded; or stage its shards on this node: stage --help. "
        "A folder of that name is ./stage.",
    )
    parser.add_argument("input_shards", nargs="+", help="a folder, an index.json, tars or a pattern of tars")
    parser.add_argument("--model_id", help="whose tokenizer made tars that shardprep did not write")
    parser.add_argument("--batch_size", type=int, default=2, help="samples (default 2)")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that read (default 0)")
    parser.add_argument("--max_length", type=int, help="tokens at which documents are cut")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle (default 0)")
    _print_batch(**vars(parser.parse_args(argv)))
    return 0


def _underscored(word: str) -> str:
    """``--batch-size`` -> ``--batch_size``: in a flag's name dashes and underscores are the same."""
    name, equals, value = word.partition("=")
    if not re.fullmatch(r"--[a-z][a-z_-]*", name):
        return word
    return re.sub("^--no_", "--no-", "--" + name[2:].replace("-", "_")) + equals + value


def _print_batch(**options: object) -> None:
    from loader.dataloader import get_llama3_dataloader

    with get_llama3_dataloader(**options) as loader:  # type: ignore[arg-type]
        batch = next(iter(loader))
        _say(f"{loader.order.num_samples:,} samples, {len(loader):,} batches an epoch")
        for name, tensor in batch.items():
            _say(f"{name}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
        for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
            real = ids[batch["attention_mask"][row].bool()]
            _say(f"\nsample {row}: {len(real)} tokens, {len(ids) - len(real)} of padding")
            _say(f"  input_ids {_shown(ids.tolist())}")
            _say(f"  labels    {_shown(labels.tolist())}")
            _say(f"  text      {loader.tokenizer.decode(real)[:SHOWN_CHARS]!r}")


def _say(line: str) -> None:
    """Print a line; where `| head` has seen enough, the rest is dropped and the work goes on."""
    try:
        print(line, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise ReadWriteError(f"standard output cannot be written: {error.strerror}") from None


def _shown(ids: list[int]) -> str:
    if len(ids) <= 2 * SHOWN_IDS:
        return str(ids)
    return f"{str(ids[:SHOWN_IDS])[:-1]}, ..., {str(ids[-SHOWN_IDS:])[1:]}"


if __name__ == "__main__":
    sys.exit(main())
