"""Compare conversations per second and core: a task of shardprep, and the preparation of TRL's SFTTrainer.

    python benchmarks/chat_speed.py [--num 100000] [--trl_python .venv-frameworks/bin/python]

Both get the same conversations of one to three turns, and Llama 3's tokenizer if the corpora are there. TRL
gets the template with generation tags, shardprep without them, as models ship it. TRL's time is that of
SFTTrainer's constructor, less that for ten conversations; ours is the manifest's CPU time, which includes
packing and writing. Each process has one core.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmark_text import lay_out

ANSWER = "{{ m.content }}<|eot_id|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'assistant' %}ANSWER{% else %}{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
UNTAGGED = TEMPLATE.replace("ANSWER", ANSWER)
TAGGED = TEMPLATE.replace("ANSWER", "{% generation %}" + ANSWER + "{% endgeneration %}")
WITH_TRL = """
import json, sys, time
from datasets import Dataset, disable_caching
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer
import trl
disable_caching()
model_id, chats, folder = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model_id)
tokenizer.chat_template = TEMPLATE
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, **sizes))
config = SFTConfig(output_dir=folder, assistant_only_loss=True, max_length=4096, bf16=False, use_cpu=True,
                   report_to=[], disable_tqdm=True)
records = [json.loads(line) for line in open(chats, encoding="utf-8")]
took = []
for part in (records[:10], records):
    data = Dataset.from_list(part)
    began = time.process_time()
    trainer = SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer)
    took.append(time.process_time() - began)
num_tokens = sum(len(ids) for ids in trainer.train_dataset["input_ids"])
print(json.dumps({"cpu_s": took[1] - took[0], "num_tokens": num_tokens, "trl": trl.__version__}))
""".replace("TEMPLATE", repr(TAGGED))


def write_conversations(path: Path, lines: Sequence[str], number: int) -> None:
    """Write records of one to three turns, whose texts are lines of the corpora, up to 800 characters."""
    drawn = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(number):
            messages = []
            for _ in range(drawn.randint(1, 3)):
                messages.append({"role": "user", "content": drawn.choice(lines)[:800]})
                messages.append({"role": "assistant", "content": drawn.choice(lines)[:800]})
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def run(*words: object, environ: dict[str, str]) -> str:
    """Run a process on one core. Returns what it prints."""
    core = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "-c", core, *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environ).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=100_000, help="conversations")
    parser.add_argument("--trl_python", default=".venv-frameworks/bin/python", help="a Python with TRL")
    args = parser.parse_args()
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM", "DATASET_"))}
    environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    print("| | conversations | tokens | CPU s | conversations per second and core |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="shardprep-bench-") as name:
        folder = Path(name)
        text = lay_out(folder / "text", 2_000_000)
        lines = []
        for corpus in text.corpora:
            lines += (corpus.folder / "documents.txt").read_text(encoding="utf-8").splitlines()
        model = folder / "model"
        shutil.copytree(text.tokenizer, model, copy_function=shutil.copy)
        (model / "chat_template.jinja").write_text(UNTAGGED, encoding="utf-8")
        raw = folder / "raw"
        raw.mkdir()
        write_conversations(raw / "chats.jsonl", lines, args.num)
        for learn in ("all", "each"):
            data = folder / learn
            plan = [
                "plan",
                "--input_dir",
                raw,
                "--output_dir",
                data,
                "--model_id",
                model,
                "--num_shards",
                "1",
            ]
            plan += ["--record", "chat", "--seq_len", "4096", "--learn", learn]
            run(sys.executable, "-m", "shardprep", *plan, environ=environ)
            run(sys.executable, "-m", "shardprep", "run", data, environ=environ)
            manifest = json.loads((data / "shard-00000.json").read_bytes())
            cpu_s = manifest["run"]["cpu_s"]
            num_tokens = manifest["counts"]["num_tokens"]
            label = f"shardprep, --learn {learn} ({manifest['run']['render_cpu_s']:.1f} s rendering)"
            print(
                f"| {label} | {args.num:,} | {num_tokens:,} | {cpu_s:.1f} | {args.num / cpu_s:.0f} |",
                flush=True,
            )
        out = run(
            args.trl_python, "-c", WITH_TRL, model, raw / "chats.jsonl", folder / "trl", environ=environ
        )
        found = json.loads(out.splitlines()[-1])
        cpu_s = found["cpu_s"]
        label = f"TRL {found['trl']}, SFTTrainer(assistant_only_loss)"
        print(f"| {label} | {args.num:,} | {found['num_tokens']:,} | {cpu_s:.1f} | {args.num / cpu_s:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
