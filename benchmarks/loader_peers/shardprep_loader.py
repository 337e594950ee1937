"""shardprep: get_llama3_dataloader with defaults, but without workers. BENCH_OPTIONS has more arguments."""

import json
import os

from measure import BATCH, epochs, run

from loader import get_llama3_dataloader


def prepare(*_):
    raise SystemExit("python -m preprocess made it")


def batches(out):
    options = {"batch_size": BATCH, **json.loads(os.environ.get("BENCH_OPTIONS", "{}"))}
    return epochs(get_llama3_dataloader(out, num_workers=0, **options))


if __name__ == "__main__":
    run(prepare, batches)
