"""Flags, commands and arguments that version 0.1 removed, and what to use instead.

Kept for one release, for users of these. Nothing else depends on it.
"""

from __future__ import annotations

FLAGS = {  # by name, or by command and name if another command still has the flag
    **dict.fromkeys(
        ("--stripe_size", "--stripe_pool", "--count", "--size", "--pool", "--pfl", "--dom"),
        "one flag names the layout: --stripe N[,SIZE][,POOL], or --stripe '-c 8' as for lfs setstripe",
    ),
    **dict.fromkeys(("--no-torch", "doctor --torch"), "doctor uses torch if there is a GPU"),
    **dict.fromkeys(
        ("doctor --input_dir", "doctor --num_shards"),
        "shardprep plan --dry_run examines the input and shows the cost",
    ),
    "--existing_files_keep_theirs": "for new files only: lfs setstripe ... DATA, see docs/lustre.md",
    **dict.fromkeys(
        ("--batch_size", "--writer_batch_size"),
        "a batch has 512 KiB of text; export DATASET_BATCH_SIZE=N limits its documents",
    ),
    "--messages_field": "with --record chat, --text_field names the field of the messages",
    "--num_readers": "docs/lustre.md says which layout to choose; --stripe sets it",
    **dict.fromkeys(
        ("--fix_text", "--normalize", "--min_chars", "--max_chars"),
        "plan --transform FILE: docs/inputs.md has the function",
    ),
    "--crcs": "verify and stage compare hashes; Lustre has checksums of its own on the wire",
    "--keep_fields": "--id_field keeps an id of each document, by which its record is found in the input",
    **dict.fromkeys(
        ("--longest", "peek --shard", "peek --input", "peek --source", "peek --seed", "peek --random"),
        "peek takes addresses, such as 3:17, FILE:BYTE or id:ID; the report names the sources",
    ),
    **dict.fromkeys(("--text", "--card"), "the report is a page for a browser, or --json"),
    "--lang": "the report is in English",
    "--num_examples": "shardprep peek DATA ADDRESS shows documents; DATA/quarantine names those left out",
    "--auto": "plan shows the cost of the shards; give --cpus_per_task, --mem_gb and --time_min",
    "--metrics": "status --json is for programs, see docs/status_json.md",
    "--exclude_shards": "name the shards to read, as a list or a pattern",
    "--limit_bytes": "stage copies a whole data set; plan smaller ones",
    "--recheck": "shardprep verify DIR reads a staged copy again",
    "--find": "peek DATA ADDRESS shows a document; where DATA --state FILE --step N names those of a step",
    "--qos": "set SBATCH_QOS, or pass --sbatch_args '--qos=NAME'",
    "--constraint": "set SBATCH_CONSTRAINT, or pass --sbatch_args '--constraint=NAME'",
    **dict.fromkeys(("submit --exclude", "retry --exclude"), "pass --sbatch_args '--exclude=NODES'"),
    "--max_rounds": "--until_done sends failed shards again, at most five times",
    "--max_attempts": "name the shards: retry DATA --shards IDS sends them no matter how often they failed",
    "--lines": "logs prints the path of each log: tail -n 100 PATH",
    "--withdrawn": "where DATA --state FILE --step N names the documents that a step saw",
    "--global_batch_size": "where takes the loader's settings from the checkpoint: --state FILE",
}

COMMANDS = {
    "withdraw": "blank DATA --ids FILE --output NEW makes a data set without these documents",
    "rewrite": "blank DATA --ids FILE --output NEW, or plan again with --exclude FILE",
    "restore": "bring files back with lfs hsm_restore, see docs/lustre.md",
}

ARGUMENTS = {  # of get_llama3_dataloader
    "batch_size_schedule": "global_batch_size= takes sizes by step, too: [(0, 256), (1000, 512)]",
    "weights_schedule": "weights= takes weights by step, too: [(0, {...}), (1000, {...})]",
    "long_documents": "max_length= cuts documents, and loader.metrics.num_cut_tokens counts what is cut off",
    "multiprocessing_context": "call torch.multiprocessing.set_start_method before the first batch",
    "device_mesh": 'pass rank=mesh["dp"].get_local_rank() and world_size=mesh["dp"].size()',
    "process_group": "pass rank=dist.get_rank(group) and world_size=dist.get_world_size(group)",
    "tokens_per_batch": "pack documents into rows with seq_len=, or pass group_by_length=True",
    "exclude_shards": "name the shards to read, as a list or a pattern",
    "validation_fraction": "plan the data with --validation_fraction; split= then names a side",
    "staged_dir": "shardprep stage DATA --to DIR makes a data set: load DIR",
    "sample_fields": "collate_fn gets only input_ids; boundaries= marks where documents begin",
    "seq_len_schedule": "use a loader with a short seq_len= for the first steps, then one with the long one",
    "max_padded_tokens": "max_length= limits the width of a batch, and batch_size= its rows",
}
