"""Grain: raw uint32 rows in ArrayRecord files, MapDataset.shuffle.map.batch."""

import grain.python as grain
import numpy as np
import torch
from array_record.python.array_record_module import ArrayRecordWriter
from measure import BATCH, NUM_SHARDS, run, with_labels


def prepare(rows, out):
    for shard, part in enumerate(np.array_split(np.arange(len(rows)), NUM_SHARDS)):
        writer = ArrayRecordWriter(str(out / f"shard-{shard:05d}.array_record"), "group_size:1")
        for row in part:
            writer.write(rows[row].tobytes())
        writer.close()


def batches(out):
    source = grain.ArrayRecordDataSource(sorted(map(str, out.glob("*.array_record"))))
    data = grain.MapDataset.source(source).seed(0).shuffle().repeat()
    data = data.map(lambda raw: np.frombuffer(raw, np.uint32).astype(np.int64)).batch(BATCH)
    read = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return (with_labels(torch.from_numpy(ids)) for ids in data.to_iter_dataset(read))


if __name__ == "__main__":
    run(prepare, batches)
