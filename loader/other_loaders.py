"""Arguments that other data loaders take, and what does the same in this one."""

from __future__ import annotations

# Not an argument of get_llama3_dataloader -> what does it.
ARGUMENTS = {
    "batch_size_schedule": "global_batch_size= takes sizes by step, too: [(0, 256), (1000, 512)]",
    "weights_schedule": "weights= takes weights by step, too: [(0, {...}), (1000, {...})]",
    "drop_last": "each epoch ends with the last whole global batch; what is left out is counted",
    "sampler": "it orders its samples itself: shuffle=, seed=, weights=",
    "sample_fields": "collate_fn gets only input_ids; boundaries= marks where documents begin",
    "long_documents": "max_length= cuts documents, and loader.metrics.num_cut_tokens counts what is cut off",
    "multiprocessing_context": "call torch.multiprocessing.set_start_method before the first batch",
    "device_mesh": 'pass rank=mesh["dp"].get_local_rank() and world_size=mesh["dp"].size()',
    "process_group": "pass rank=dist.get_rank(group) and world_size=dist.get_world_size(group)",
    "tokens_per_batch": "pack documents into rows with seq_len=, or pass group_by_length=True",
    "exclude_shards": "name the shards to read, as a list or a pattern",
    "validation_fraction": "plan the data with --validation_fraction; split= then names a side",
    "staged_dir": "shardprep stage DATA --to DIR makes a data set: load DIR",
    "seq_len_schedule": "use a loader with a short seq_len= for the first steps, then one with the long one",
    "max_padded_tokens": "max_length= limits the width of a batch, and batch_size= its rows",
}
