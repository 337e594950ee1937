"""The training script before shardprep: webdataset, JSON ids, transformers' collator; rows or documents."""

import os

import numpy as np
import webdataset as wds
from measure import BATCH, NUM_SHARDS, epochs, run
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, DataCollatorForLanguageModeling


def prepare(rows, out):
    for shard, part in enumerate(np.array_split(np.arange(len(rows)), NUM_SHARDS)):
        with wds.TarWriter(str(out / f"shard-{shard:05d}.tar")) as writer:
            for row in part:
                writer.write({"__key__": f"s{row:08d}", "token_ids.json": rows[row].tolist()})


def batches(out):
    tokenizer = AutoTokenizer.from_pretrained(os.environ["BENCH_TOKENIZER"])
    tokenizer.pad_token = tokenizer.eos_token
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    urls = sorted(map(str, out.glob("*.tar")))
    longest = int(os.environ.get("BENCH_MAX_LENGTH", 10**9))
    data = wds.WebDataset(urls, shardshuffle=False, nodesplitter=wds.split_by_node).shuffle(1000).decode()
    data = data.to_tuple("token_ids.json")

    def collate(samples):
        return collator([{"input_ids": ids[:longest]} for (ids,) in samples])

    return epochs(DataLoader(data, batch_size=int(os.environ.get("BENCH_BATCH", BATCH)), collate_fn=collate))


if __name__ == "__main__":
    run(prepare, batches)
