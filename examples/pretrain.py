"""Text to a language model on one machine: shards, a small Llama, its losses by source, a sample of its text.

    python examples/pretrain.py FOLDER                  # 450 kB of sample text, Korean and English
    python examples/pretrain.py FOLDER --raw MY_TEXT    # a subfolder per source: MY_TEXT/ko/a.txt ...

The price with the sample text, on two cores without a GPU: about 4 minutes for 200 steps (0.8 M tokens),
20 MB on disk and 1 GB of memory. Stop it at any time, with Ctrl-C or kill -9, and run it again: it continues
after its last checkpoint, with the batches that an uninterrupted run gets.

In FOLDER it writes tokenizer/, a data set per source, checkpoint.pt, losses.jsonl and losses.svg.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from sample_text import write_sample_text  # type: ignore[import-not-found]  # beside this file
from transformers import LlamaConfig, LlamaForCausalLM

from loader import SourceLosses, get_llama3_dataloader, set_up_training

SEQ_LEN = 256  # tokens per row
BATCH_SIZE = 16  # rows per step
LOG_EVERY = 10  # steps
PROMPTS = ("The report lists", "할머니는")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for everything that this script writes")
    parser.add_argument("--raw", type=Path, help="your text, a subfolder per source (default: sample text)")
    parser.add_argument("--num_steps", type=int, default=200)
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--num_layers", type=int, default=4)
    args = parser.parse_args()
    folder: Path = args.folder
    sources = prepare(folder, args.raw or sample_of(folder / "raw"))
    train(folder, sources, args)
    draw(folder)


def sample_of(raw: Path) -> Path:
    """Write the sample text, if it is not there yet, with a subfolder per language."""
    if not raw.exists():
        write_sample_text(raw)
        for file in sorted(raw.glob("*.txt")):
            language = raw / file.name[:2]
            language.mkdir(exist_ok=True)
            file.rename(language / file.name)
    return raw


def prepare(folder: Path, raw: Path) -> dict[str, str]:
    """Make a tokenizer, and a verified data set of packed rows per source. Returns source -> its folder."""
    tokenizer = folder / "tokenizer"
    if not tokenizer.exists():
        words = ("--input_dir", raw, "--recursive", "--output_dir", tokenizer, "--vocab_size", 2000)
        shardprep("train_tokenizer", *words)
    sources = {}
    for source in sorted(path for path in raw.iterdir() if path.is_dir()):
        data = folder / source.name
        if not (data / "index.json").exists():
            form = ("--record", "packed", "--seq_len", SEQ_LEN, "--num_shards", 4)
            shardprep("plan", "--input_dir", source, "--output_dir", data, "--model_id", tokenizer, *form)
            shardprep("run", data)
            shardprep("verify", data)
        sources[source.name] = str(data)
    return sources


def shardprep(*words: object) -> None:
    """Print a command as you would type it, and run it."""
    typed = [str(word) for word in words]
    print("$ shardprep", *typed, flush=True)
    subprocess.run([sys.executable, "-m", "shardprep", *typed], check=True)


def train(folder: Path, sources: dict[str, str], args: argparse.Namespace) -> None:
    """Train from the last checkpoint to ``num_steps``, and print a sample of text at the end."""
    loader = get_llama3_dataloader(
        sources,
        batch_size=BATCH_SIZE,
        seq_len=SEQ_LEN,
        boundaries="transformers",
        weights=dict.fromkeys(sources, 1.0),  # equal shares; each source has its own epochs
        origins=True,
        num_workers=1,
    )
    setup = set_up_training(loader)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = make_model(loader.tokenizer, args, setup.model_options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    checkpoint = folder / "checkpoint.pt"
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]
        print(f"continues after step {step}, at epochs {loader.source_epochs}")
    losses = SourceLosses.of_loader(loader)
    began_s = time.monotonic()
    began_at = step
    while step < args.num_steps:
        for batch in loader:
            origins = batch.pop("origins")  # which document each token is from
            output = model(**batch.to(device))
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.add(output.logits, batch["labels"], origins)
            step += 1
            if step % LOG_EVERY == 0:
                means = losses.means(reset=True)
                speed = (step - began_at) * BATCH_SIZE * SEQ_LEN / (time.monotonic() - began_s)
                shown = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
                print(f"step {step}: loss {shown}; {speed:,.0f} tokens per second", flush=True)
                log(folder, step, means)
                state = {"step": step, "loader": loader.state_at(step)}
                state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(checkpoint, state)
            if step >= args.num_steps:
                break
    loader.close()
    model.eval()
    for prompt in PROMPTS:
        ids = loader.tokenizer(prompt, return_tensors="pt").input_ids.to(device)
        generated = model.generate(ids, max_new_tokens=40, do_sample=True, top_k=20)
        print(repr(loader.tokenizer.decode(generated[0], skip_special_tokens=True)))


def make_model(tokenizer: Any, args: argparse.Namespace, options: Mapping[str, Any]) -> Any:
    """Return a Llama with the tokenizer's vocabulary and random weights."""
    config = LlamaConfig(
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 3,
        num_hidden_layers=args.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LEN,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )
    return LlamaForCausalLM(config)


def save(path: Path, state: dict[str, Any]) -> None:
    """Save a checkpoint, which appears whole or not at all."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.rename(path)


def log(folder: Path, step: int, means: dict[str, float]) -> None:
    with (folder / "losses.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "losses": means}) + "\n")


def draw(folder: Path) -> None:
    """Draw the losses by source as an SVG."""
    lines = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    points = {line["step"]: line["losses"] for line in lines}  # a repeated step counts once
    top = max(max(losses.values()) for losses in points.values())
    last = max(points)
    colours = ("#0969da", "#cf222e", "#1a7f37", "#8250df", "#9a6700")
    drawn = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 320" font-size="13">',
        '<rect width="640" height="320" fill="white"/>',
        '<path d="M50 20V280H620" fill="none" stroke="#59636e"/>',
        f'<text x="8" y="26">{top:.1f}</text><text x="30" y="284">0</text>',
        f'<text x="50" y="300">loss per token, by step (last: {last:,})</text>',
    ]
    for number, source in enumerate(next(iter(points.values()))):
        colour = colours[number % len(colours)]
        path = []
        for step, losses in sorted(points.items()):
            x = 50 + 570 * step / last
            y = 280 - 260 * losses[source] / top
            path.append(f"{x:.1f},{y:.1f}")
        drawn.append(f'<polyline points="{" ".join(path)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn.append(f'<text x="540" y="{40 + 18 * number}" fill="{colour}">{source}</text>')
    (folder / "losses.svg").write_text("\n".join([*drawn, "</svg>"]) + "\n")
    print(f"wrote {folder / 'losses.svg'}")


if __name__ == "__main__":
    main()
