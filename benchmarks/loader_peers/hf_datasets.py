"""HF datasets: Arrow on disk, numpy format, shuffled by the DataLoader."""

import numpy as np
import torch
from datasets import Dataset, Features, Sequence, Value, load_from_disk
from measure import BATCH, SEQ_LEN, epochs, run, with_labels
from torch.utils.data import DataLoader


def prepare(rows, out):
    def some():
        for row in rows:
            yield {"input_ids": row.astype(np.int32)}

    features = Features({"input_ids": Sequence(Value("int32"), length=SEQ_LEN)})
    Dataset.from_generator(some, features=features, cache_dir=str(out / "cache")).save_to_disk(out / "data")


def collate(samples):
    return with_labels(torch.from_numpy(np.stack([each["input_ids"] for each in samples]).astype(np.int64)))


def batches(out):
    data = load_from_disk(str(out / "data")).with_format("numpy")
    return epochs(DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=collate))


if __name__ == "__main__":
    run(prepare, batches)
