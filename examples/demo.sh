#!/bin/bash
# Run all steps on one machine, in ./demo_data: text -> tokenizer -> plan -> shards -> verify -> training steps.
# `make demo` runs this in the project's virtual environment. Each step is printed as you would type it.
set -euo pipefail
cd "$(dirname "$0")/.."

data=demo_data
marker=$data/.made_by_demo
export HF_HUB_OFFLINE=1 # the demo needs no hub; leave this out if you use a model's name instead of a folder

if [ -e "$data" ] && [ ! -e "$marker" ]; then
  echo "demo: ./$data exists and was not made by this demo; move it away, then run this again" >&2
  exit 73
fi
rm -rf "$data"
mkdir "$data"
touch "$marker"

say() { printf '\n# %s\n' "$*"; }
step() {
  printf '$ %s\n' "$*"
  "$@"
}

started=$SECONDS
say "1. Raw text: Korean and English, one document per line."
step python examples/sample_text.py $data/raw

say "2. A small tokenizer like Llama 3's. (For real data, use --model_id meta-llama/Meta-Llama-3-8B below instead.)"
step shardprep train_tokenizer --input_dir $data/raw --vocab_size 1500 --output_dir $data/tokenizer

say "3. The plan: the byte ranges of each shard, and rows of 512 tokens. It is made once and never changes."
step shardprep plan --input_dir $data/raw --output_dir $data/shards --model_id $data/tokenizer --num_shards 4 \
  --record packed --seq_len 512

say "4. The shards, made on this machine; on a cluster a job array makes them."
step shardprep run $data/shards

say "5. Verify: every shard exists and is whole, and together they cover the input exactly once."
step shardprep verify $data/shards

say "6. The batches that training gets."
step python -m loader $data/shards --batch_size 4 --num_workers 0

say "7. Ten training steps of a small Llama. Run it again with --num_steps 20, and it continues after step 10."
step python examples/train_llama.py $data/shards $data/checkpoints --seq_len 512 --num_steps 10 --log_every 2 --lr 0.01

cat <<END

The demo took $((SECONDS - started)) s. All its files are in ./$data.

# Next, on a Slurm cluster (in this checkout, with .venv active: source .venv/bin/activate)
\$ shardprep plan --input_dir RAW --output_dir DATA --model_id meta-llama/Meta-Llama-3-8B --num_shards 100 \\
    --record packed --seq_len 8192
\$ shardprep submit DATA --partition cpu
\$ shardprep status DATA --watch

# and in the training script
from loader import get_llama3_dataloader
dataloader = get_llama3_dataloader("DATA", batch_size=8, seq_len=8192, boundaries="transformers")
END
