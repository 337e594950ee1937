"""webdataset with a .npy member per row, decoded by webdataset."""

import numpy as np
import torch
import webdataset as wds
from measure import BATCH, NUM_SHARDS, epochs, run, with_labels
from torch.utils.data import DataLoader


def prepare(rows, out):
    for shard, part in enumerate(np.array_split(np.arange(len(rows)), NUM_SHARDS)):
        with wds.TarWriter(str(out / f"shard-{shard:05d}.tar")) as writer:
            for row in part:
                writer.write({"__key__": f"s{row:08d}", "ids.npy": rows[row]})


def collate(samples):
    return with_labels(torch.stack([torch.from_numpy(ids.astype(np.int64)) for (ids,) in samples]))


def batches(out):
    urls = sorted(map(str, out.glob("*.tar")))
    data = wds.WebDataset(urls, shardshuffle=100, nodesplitter=wds.split_by_node)
    data = data.shuffle(1000).decode().to_tuple("ids.npy")
    return epochs(DataLoader(data, batch_size=BATCH, collate_fn=collate))


if __name__ == "__main__":
    run(prepare, batches)
