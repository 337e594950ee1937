"""Measure what the loader costs a training step on one GPU, with a Llama in bf16 on packed rows.

    python benchmarks/gpu_check.py                       # a GPU; 600 M parameters
    python benchmarks/gpu_check.py --tiny                # takes seconds, also on a CPU; tests run it

It takes 4 minutes at most, and prints six tables: the share of time that a step waits for data, with 0, 2
and 4 workers; copies of a batch to the device, from pinned and other memory; attention within documents, with
SDPA and, if installed, flash attention: whether tokens leak between documents, and its speed; memory; the
loader alone; and the precisions that set_up_training sets, with SDPA and eager attention. Without --data it
first makes shards of examples/sample_text.py with a tokenizer trained on it.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loader import ShardprepError, check_boundaries, get_llama3_dataloader, set_up_training

ROOT = Path(__file__).resolve().parents[1]
ATTENTIONS = ("sdpa", "flash_attention_2")
WORKERS = (0, 2, 4)
WARM_UP_STEPS = 3


def main() -> int:
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.tiny:
        print("error: torch sees no GPU here; --tiny runs on a CPU", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}; torch {torch.__version__}; batches of {args.batch_size} rows of {args.seq_len} tokens")
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        data = args.data or make_data(Path(folder), args)
        model = make_model(args, device, "sdpa")
        num_parameters = sum(each.numel() for each in model.parameters())
        print(f"{num_parameters / 1e6:,.0f} M parameters, {next(model.parameters()).dtype}\n")
        print_stalls(args, data, model, device)
        print_copies(args, data, device)
        del model
        print_attention(args, data, device)
        print_memory(device)
        print_loader_alone(args, data)
        print_precision(args, data, device)
    return 0


def make_data(folder: Path, args: argparse.Namespace) -> Path:
    """Make packed rows of sample text with the commands that a user types."""

    def command(*words: Any) -> None:
        subprocess.run([sys.executable, *map(str, words)], check=True, capture_output=True, cwd=ROOT)

    raw, tokenizer, data = folder / "raw", folder / "tokenizer", folder / "data"
    command("examples/sample_text.py", raw)
    text = b"".join(path.read_bytes() for path in sorted(raw.rglob("*.txt")))
    (raw / "more.txt").write_bytes(text * max(1, args.text_mb * 1_000_000 // len(text)))
    prepare = ("-m", "preprocess")
    command(*prepare, "train_tokenizer", "--input_dir", raw, "--vocab_size", 1500, "--output_dir", tokenizer)
    rows = ("--record", "packed", "--seq_len", args.seq_len, "--num_shards", 4)
    command(*prepare, "plan", "--input_dir", raw, "--output_dir", data, "--model_id", tokenizer, *rows)
    command(*prepare, "run", data)
    command(*prepare, "verify", data)
    return data


def make_model(
    args: argparse.Namespace, device: torch.device, attention: str, dtype: torch.dtype | None = None
) -> Any:
    """Return a Llama with random weights, by default in bf16 on a GPU and in float32 on a CPU."""
    torch.manual_seed(0)
    # Llama 3's vocabulary: with a smaller one a step would be too short to compare with.
    hidden, num_layers, vocab_size = (64, 2, 2000) if args.tiny else (1536, 14, 128_256)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden * 4,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 16 if args.tiny else hidden // 128,
        num_key_value_heads=hidden // 64 if args.tiny else hidden // 512,
        max_position_embeddings=args.seq_len,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    model.set_attn_implementation(attention)
    by_default = torch.bfloat16 if device.type == "cuda" else torch.float32
    return model.to(device=device, dtype=dtype or by_default)


def open_loader(args: argparse.Namespace, data: Path, **options: Any) -> Any:
    return get_llama3_dataloader(str(data), batch_size=args.batch_size, **options)


def endless(loader: Any) -> Iterator[Any]:
    return chain.from_iterable(repeat(loader))


def train(
    loader: Any, model: Any, device: torch.device, seconds: float, autocast: Any = nullcontext
) -> tuple[int, float]:
    """Train for some seconds. Return the number of steps and the seconds that they took."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    num_steps, began_s = 0, 0.0
    for number, batch in enumerate(endless(loader)):
        if number == WARM_UP_STEPS:
            synchronize(device)
            loader.metrics.reset()
            began_s = time.perf_counter()
        with autocast():
            loss = model(**batch.to(device, non_blocking=True)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)  # otherwise work on the device would hide waits for the loader
        num_steps = number + 1 - WARM_UP_STEPS
        if num_steps > 0 and time.perf_counter() - began_s >= seconds:
            break
    return num_steps, time.perf_counter() - began_s


def print_stalls(args: argparse.Namespace, data: Path, model: Any, device: torch.device) -> None:
    print("| workers | ms per step | waits for data | tokens per second |\n|---|---|---|---|")
    for num_workers in WORKERS:
        with open_loader(args, data, num_workers=num_workers, boundaries="transformers") as loader:
            num_steps, took_s = train(loader, model, device, args.seconds)
            share = loader.metrics.wait_s / took_s
        tokens = num_steps * args.batch_size * args.seq_len / took_s
        print(f"| {num_workers} | {took_s / num_steps * 1e3:.1f} | {share:.2%} | {tokens:,.0f} |", flush=True)


def print_copies(args: argparse.Namespace, data: Path, device: torch.device) -> None:
    """Time copies of one batch. On a CPU nothing is copied, and the table says so."""
    print("\n| memory of the batch | us per copy to the device |\n|---|---|")
    for is_pinned in (False, True):
        if device.type == "cpu":
            print(f"| {'pinned' if is_pinned else 'other'} | no GPU |")
            continue
        with open_loader(args, data, num_workers=0, pin_memory=is_pinned) as loader:
            tensors = list(next(iter(loader)).values())  # the batch's own to() would move it, once
            assert all(tensor.is_pinned() == is_pinned for tensor in tensors)
            for num_copies in (20, 500):  # the first ones warm up
                synchronize(device)
                began_s = time.perf_counter()
                for _ in range(num_copies):
                    for tensor in tensors:
                        tensor.to(device, non_blocking=True)
                synchronize(device)
        took_us = (time.perf_counter() - began_s) / num_copies * 1e6
        print(f"| {'pinned' if is_pinned else 'other'} | {took_us:.0f} |", flush=True)


def print_attention(args: argparse.Namespace, data: Path, device: torch.device) -> None:
    print("\n| attention | documents kept apart | ms per step | without boundaries |\n|---|---|---|---|")
    for attention in ATTENTIONS:
        if attention == "flash_attention_2" and (device.type == "cpu" or not find_spec("flash_attn")):
            print(f"| {attention} | not installed, or no GPU | | |")
            continue
        model = make_model(args, device, attention)
        with open_loader(args, data, num_workers=2, boundaries="transformers") as loader:
            apart = "yes"
            try:
                check_boundaries(model, loader.peek().to(device))
            except ShardprepError as error:
                apart = f"NO: {error}"
            num_steps, took_s = train(loader, model, device, args.seconds)
        with open_loader(args, data, num_workers=2) as loader:
            plain_steps, plain_s = train(loader, model, device, args.seconds)
        times = f"{took_s / num_steps * 1e3:.1f} | {plain_s / plain_steps * 1e3:.1f}"
        print(f"| {attention} | {apart} | {times} |", flush=True)


def print_memory(device: torch.device) -> None:
    print("\n| memory | MB |\n|---|---|")
    if device.type == "cuda":
        print(f"| GPU, most at once | {torch.cuda.max_memory_allocated() / 1e6:,.0f} |")
    for name, who in (("this process", resource.RUSAGE_SELF), ("largest worker", resource.RUSAGE_CHILDREN)):
        print(f"| {name}, most at once | {resource.getrusage(who).ru_maxrss / 1e3:,.0f} |")


def print_loader_alone(args: argparse.Namespace, data: Path) -> None:
    print("\n| the loader alone, workers | tokens per second |\n|---|---|")
    for num_workers in WORKERS:
        with open_loader(args, data, num_workers=num_workers, boundaries="transformers") as loader:
            batches = endless(loader)
            for _ in range(WARM_UP_STEPS):
                next(batches)
            num_batches, began_s = 0, time.perf_counter()
            while time.perf_counter() - began_s < args.seconds / 2:
                next(batches)
                num_batches += 1
            tokens = num_batches * args.batch_size * args.seq_len / (time.perf_counter() - began_s)
        print(f"| {num_workers} | {tokens:,.0f} |", flush=True)


def print_precision(args: argparse.Namespace, data: Path, device: torch.device) -> None:
    """Time steps of a model with weights in float32, by what set_up_training sets."""
    print("\n| weights in float32, products in | attention | ms per step |\n|---|---|---|")
    for name, attention, options in (
        ("float32", "sdpa", {"tf32": False}),
        ("TF32", "sdpa", {}),
        ("bfloat16", "sdpa", {"bf16": True}),
        ("bfloat16", "eager", {"bf16": True}),
    ):
        model = make_model(args, device, attention, torch.float32)
        with open_loader(args, data, num_workers=2) as loader:
            setup = set_up_training(loader, **options)
            num_steps, took_s = train(loader, model, device, args.seconds, setup.autocast)
        print(f"| {name} | {attention} | {took_s / num_steps * 1e3:.1f} |", flush=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="your own rows (default: made from sample text)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short rows, also on a CPU")
    parser.add_argument("--batch_size", type=int, help="rows (default: 8; tiny: 2)")
    parser.add_argument(
        "--seq_len", type=int, help="tokens per row; must fit --data (default: 2048; tiny: 64)"
    )
    parser.add_argument("--seconds", type=float, help="per measurement (default: 12; tiny: 0.2)")
    args = parser.parse_args()
    args.text_mb = 1 if args.tiny else 60
    args.batch_size = args.batch_size or (2 if args.tiny else 8)
    args.seq_len = args.seq_len or (64 if args.tiny else 2048)
    args.seconds = args.seconds or (0.2 if args.tiny else 12)
    return args


if __name__ == "__main__":
    sys.exit(main())
