"""What people type on the command line who know other tools, and what of ours it means.

A hint is chosen by meaning, not by letters: ``--tokenizer`` means ``--model_id``, not ``--token_format``.
Nothing else depends on this module. It is long because it is one table, of flags; that of commands is short.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

HUB_HINT = (
    "download a data set of the hub first: hf download NAME --repo-type dataset --local-dir RAW; "
    "then plan --input_dir RAW --recursive"
)


class _Meaning(NamedTuple):
    """A hint for flags that people type.

    ``typed``: these flags, separated by blanks. ``ours``: the flags that mean the same, the best one first.
    ``of``: hints for some commands, such as "plan shard", which come first. ``otherwise``: the hint for a
    command that has none of our flags. Without one, a later meaning of the same flag counts.
    """

    typed: str
    ours: str = ""
    otherwise: str = ""
    of: Mapping[str, str] = {}


FLAGS = (
    # Short flags of sbatch, which mean something else in other commands.
    _Meaning(
        typed="-w -q -x -C",
        of={
            "submit retry": "an option of sbatch: pass --sbatch_args '{flag} ...', quoted as one word",
        },
    ),
    _Meaning(
        typed="--job_name -J --output -o --error -e",
        of={
            "submit retry": "submit names jobs and logs itself; scontrol update JobName=... works afterwards",
        },
    ),
    _Meaning(
        typed="-n",
        of={
            "submit retry": "use --max_parallel N for tasks at once, or --dry_run to see the scripts alone",
        },
    ),
    _Meaning(
        typed="--exclusive --hold -H",
        of={
            "submit retry": "an option of sbatch: pass --sbatch_args '{flag}'",
        },
    ),
    _Meaning(
        typed="--clusters --cluster -M",
        of={
            "submit retry": "name the cluster in the environment: export SLURM_CLUSTERS=NAME",
        },
    ),
    _Meaning(
        typed=(
            "--tokenizer --tokenizer_name --tokenizer_path --tokenizer_id --tokenizer_dir "
            "--tokenizer_model --tokenizer_type --tokenizer_name_or_path --tokenizer_file --model "
            "--model_name --model_path --model_dir --model_name_or_path --pretrained "
            "--pretrained_model_name_or_path --vocab --vocab_file --llama -m"
        ),
        ours="--model_id",
        otherwise="the data set has its own tokenizer: plan --model_id chose it",
        of={
            "train_tokenizer": "it trains a new one: --output_dir names its folder",
        },
    ),
    _Meaning(
        typed=(
            "--workers --num_workers --nworkers --n_workers --jobs --njobs --n_jobs --num_jobs -j --nproc "
            "--n_proc --num_procs --num_proc --procs --processes --num_processes --nprocs --threads "
            "--num_threads --nthreads --n_threads --parallel --parallelism --cpus --num_cpus --ncpus "
            "--cores --num_cores --cpus_per_task --preprocessing_num_workers --dataset_num_proc -c -w"
        ),
        ours="--num_proc",
        otherwise=(
            "run makes the shards: shardprep run DATA --num_proc N; submit: --cpus_per_task N, "
            "--max_parallel N"
        ),
        of={
            "submit retry": (
                "use --cpus_per_task N for the CPUs of a task, --max_parallel N for tasks at once"
            ),
            "shard": (
                "it uses the CPUs of its task; shardprep run DATA --num_proc N makes several shards at once"
            ),
        },
    ),
    _Meaning(
        typed=(
            "--force --overwrite --overwrite_output_dir --overwrite_cache --replace --clobber --redo "
            "--rerun --recreate --rebuild --exist_ok --no_cache --ignore_existing -f"
        ),
        ours="--again",
        otherwise="nothing is overwritten: use a new --output_dir",
        of={
            "run shard": "--again makes shards again that are done; run needs --shards IDS with it",
            "submit": ("done shards are not sent; shardprep run DATA --shards IDS --again makes them again"),
            "retry": "retry DATA --shards IDS sends failed shards no matter how often they failed",
            "clean": "it removes what no attempt can need; leave the flag out",
            "report": "the page is replaced; leave the flag out",
        },
    ),
    _Meaning(
        typed=(
            "--packed --packing --pack_sequences --pack_sequence --pack_tokens --sample_packing --concat "
            "--concatenate --group_texts --constant_length --rows"
        ),
        otherwise="plan --record packed --seq_len N makes packed rows",
        of={
            "plan shard": "to pack documents into rows, use --record packed --seq_len 8192",
        },
    ),
    _Meaning(
        typed=(
            "--seq_length --sequence_length --seqlen --max_seq_length --max_seq_len --max_length --max_len "
            "--block_size --context_length --context_size --context --ctx --chunk_size --chunk_length "
            "--row_length --truncate --truncation --model_max_length --cutoff_len"
        ),
        otherwise=(
            "documents stay whole unless --record packed --seq_len N makes rows; the loader can cut them: "
            "max_length=N"
        ),
    ),
    _Meaning(
        typed="--seq_len",
        otherwise="plan --record packed --seq_len N decides it, and a plan never changes",
    ),
    _Meaning(
        typed="--chat --conversations --conversation --sft --apply_chat_template --dialogue --instruct",
        otherwise="plan --record chat makes rows of conversations",
        of={
            "plan shard": "use --record chat, and --text_field for the field of the messages",
        },
    ),
    _Meaning(
        typed="--messages_field --messages_key --messages_column --conversation_field",
        otherwise="plan --record chat --text_field names the field of the messages",
    ),
    _Meaning(
        typed="--chat_template --template --jinja --jinja_file",
        ours="--chat_template_file",
        otherwise="plan stores the template",
    ),
    _Meaning(
        typed=(
            "--text_key --text_keys --text_column --text_column_name --text_col --column --columns --key "
            "--keys --json_key --json_keys --content_field --content_key --field --fields --feature "
            "--features --jsonl_key --text --text_name"
        ),
        ours="--text_field",
        otherwise="plan --text_field names the field of the text",
    ),
    _Meaning(
        typed="--id_key --id_column --doc_id --id_col --keep_fields",
        ours="--id_field",
        otherwise="plan --id_field keeps ids",
    ),
    _Meaning(
        typed="--source_key --source_column --domain --domain_key",
        ours="--source_field",
        otherwise="plan --source_field",
    ),
    _Meaning(
        typed="--dataset --dataset_name --dataset_id --hf_dataset --repo_id --dataset_path --hf_repo",
        otherwise="DATA is a word without a flag: a folder that plan made",
        of={
            "plan shard train_tokenizer": HUB_HINT,
        },
    ),
    _Meaning(
        typed=(
            "--input --inputs --input_path --input_paths --input_file --input_files --input_folder "
            "--input_data --input_glob --raw --raw_dir --source_dir --src --src_dir --train_file "
            "--train_files --train_data --files --corpus --text_dir --texts --in -i"
        ),
        ours="--input_dir --against",
        otherwise="DATA is a word without a flag: a folder that plan made",
    ),
    _Meaning(
        typed="--data --data_dir --data_path --data_folder --dir --folder --path --plan --plan_dir -d",
        ours="--input_dir",
        otherwise="DATA is a word without a flag",
        of={
            "run verify peek status submit retry cancel logs clean report": (
                "DATA is a word without a flag, or --output_dir DATA"
            ),
        },
    ),
    _Meaning(
        typed=(
            "--output --out --output_path --output_folder --output_file --output_prefix --outdir --out_dir "
            "--dest --dst --destination --save_dir --save_path --save_to --target --target_dir --to "
            "--export_dir -o"
        ),
        ours="--output_dir --output --to",
        otherwise="it writes into DATA, which is a word without a flag",
    ),
    _Meaning(
        typed="--output_dir",
        ours="--output --to",
        otherwise="--output_dir is not for this command",
    ),
    _Meaning(
        typed=(
            "--n_shards --nshards --shard_count --num_partitions --partitions --num_files --num_chunks "
            "--nchunks --num_output_files --shards --num_splits --num_tasks"
        ),
        ours="--num_shards",
        otherwise="plan --num_shards decides it, and a plan never changes",
        of={
            "submit retry": ("use --max_parallel N for tasks at once; plan --num_shards decides the shards"),
        },
    ),
    _Meaning(
        typed="--num_shards",
        otherwise="plan --num_shards decides it, and a plan never changes",
    ),
    _Meaning(
        typed=(
            "--shard_size --max_shard_size --shard_mb --target_size --file_size --chunk_bytes "
            "--partition_size"
        ),
        ours="--shard_bytes",
        otherwise="plan --shard_bytes decides it",
    ),
    _Meaning(
        typed="--shard --shard_id --shard_ids --ids --index --indices --array --only --rank",
        ours="--shards",
        otherwise="no flag chooses shards here",
        of={
            "peek": "peek takes addresses, such as 3:17, FILE:BYTE or id:ID",
        },
    ),
    _Meaning(
        typed=(
            "--validation_split --val_fraction --val_split --val_size --valid_fraction --validation_size "
            "--eval_fraction --validation_split_percentage --test_size --test_split --eval_split --holdout "
            "--split_ratio --train_ratio --valid_size"
        ),
        ours="--validation_fraction",
        otherwise="plan --validation_fraction holds documents out",
    ),
    _Meaning(
        typed="--eos --add_eos --append_eod --eod --add_eos_token --append_eot --eot --put_eos",
        ours="--append_eos --put_eos",
        otherwise="plan --append_eos ends documents with EOS",
    ),
    _Meaning(
        typed="--no_eos --no-eos --no_append_eod",
        otherwise="plan --no-append_eos",
    ),
    _Meaning(
        typed="--bos --add_bos --add_bos_token --special_tokens --prepend_bos",
        ours="--add_special_tokens",
        otherwise="plan --add_special_tokens, which is on, adds BOS",
    ),
    _Meaning(
        typed="--no_bos --no-bos --no-special_tokens --no_special_tokens --skip_special_tokens",
        otherwise="plan --no-add_special_tokens leaves out BOS and the like",
    ),
    _Meaning(
        typed="--split_special_tokens --parse_special --parse_special_tokens --encode_special_tokens",
        ours="--allow_special_tokens",
        otherwise="plan --allow_special_tokens",
    ),
    _Meaning(
        typed=(
            "--glob --pattern --suffix --suffixes --ext --exts --extension --extensions --include "
            "--file_pattern --input_format --file_type --filetype --filenames"
        ),
        ours="--also",
        otherwise="plan --also takes files of other names",
    ),
    _Meaning(
        typed="--subdirs --subfolders --subdirectories --recurse -r -R",
        ours="--recursive",
        otherwise="plan --recursive",
    ),
    _Meaning(
        typed="--symlinks --follow_symlinks --links -L",
        ours="--follow_links",
        otherwise="plan --recursive --follow_links",
    ),
    _Meaning(
        typed=(
            "--filter --map --map_fn --preprocess --preprocessing --function --fn --script --clean_text "
            "--fix_text --normalize --min_chars --max_chars --min_length --lower --lowercase --strip "
            "--format_fn --processor"
        ),
        ours="--transform",
        otherwise="plan --transform FILE: docs/inputs.md has the function",
    ),
    _Meaning(
        typed="--dedup --deduplicate --dedupe --duplicates --unique",
        otherwise="plan --digests, and when the shards are made: shardprep duplicates DATA --output FILE",
    ),
    _Meaning(
        typed="--exclude_list --blacklist --denylist --blocklist --drop --remove --skip_list",
        ours="--exclude --ids",
        otherwise="plan --exclude FILE leaves documents out",
    ),
    _Meaning(
        typed="--keep_texts --store_text --save_text --with_text --keep_raw",
        ours="--keep_text",
        otherwise="plan --keep_text",
    ),
    _Meaning(
        typed="--dtype --token_dtype --int32 --uint16 --uint32 --binary --npy",
        ours="--token_format",
        otherwise="plan --token_format npy stores binary ids",
    ),
    _Meaning(
        typed=(
            "--max_samples --max_documents --max_docs --max_examples --num_samples --num_documents "
            "--num_docs --num_examples --max_train_samples --subset --sample --first --take --max_lines "
            "--num_lines"
        ),
        ours="--limit --num",
        otherwise="plan --limit N takes a trial's documents",
    ),
    _Meaning(
        typed=(
            "--skip_errors --ignore_errors --max_errors --bad_fraction --on_error --skip_bad "
            "--max_failures --errors"
        ),
        ours="--max_bad_fraction",
        otherwise="plan --max_bad_fraction",
    ),
    _Meaning(
        typed="--charset --codec --file_encoding --codepage",
        ours="--encoding",
        otherwise="plan --encoding is for .txt files",
    ),
    _Meaning(
        typed=(
            "--seed --shuffle --no_shuffle --shuffle_seed --random_seed --epochs --num_epochs "
            "--shuffle_buffer"
        ),
        otherwise=(
            "the loader does this: get_llama3_dataloader(DATA, batch_size, seed=N), and for each epoch anew"
        ),
    ),
    _Meaning(
        typed="--weights --weight --mixture --mix --proportions --sampling_ratios --blend",
        otherwise=(
            'the loader mixes data sets: get_llama3_dataloader({"a": A, "b": B}, ..., weights={"a": 1, '
            '"b": 2})'
        ),
    ),
    _Meaning(
        typed="--global_batch_size --gradient_accumulation_steps --micro_batch_size --world_size",
        otherwise="the loader does this: get_llama3_dataloader(DATA, batch_size, global_batch_size=N)",
    ),
    _Meaning(
        typed="--batch_size --batch --writer_batch_size --batched --dataset_batch_size",
        otherwise="a batch has 512 KiB or 1 MiB of text; export DATASET_BATCH_SIZE=N limits its documents",
    ),
    _Meaning(
        typed=(
            "--mem --memory --ram --max_memory --mem_limit --memory_limit --mem_gb --memory_gb --mem_per_task"
        ),
        ours="--mem_gb --memory_gb",
        otherwise="run --memory_gb N, or submit --mem_gb N",
    ),
    _Meaning(
        typed="--mem_per_cpu",
        ours="--mem_per_cpu_gb",
        otherwise="submit --mem_per_cpu_gb N",
    ),
    _Meaning(
        typed="--time --walltime --wall_time --time_limit --timeout --max_time --time_min --timeout_min -t",
        ours="--time_min",
        otherwise="submit --time_min MINUTES",
    ),
    _Meaning(
        typed="--queue --slurm_partition --partition -p",
        ours="--partition --num_proc",
        otherwise="submit --partition NAME",
    ),
    _Meaning(
        typed="--project --slurm_account --account -A",
        ours="--account",
        otherwise="submit --account NAME",
    ),
    _Meaning(
        typed="--slurm_args --slurm_options --sbatch --sbatch_options --extra_args --additional_parameters",
        ours="--sbatch_args",
        otherwise="submit --sbatch_args '...'",
    ),
    _Meaning(
        typed=(
            "--qos --constraint --exclude --nodelist --gres --gpus --nice --comment --reservation "
            "--licenses --exclusive --mail_type --mail_user --dependency --hold --begin --tmp "
            "--cluster -C -x"
        ),
        otherwise="submit --sbatch_args '...' passes options to sbatch",
        of={
            "submit retry": "an option of sbatch: pass --sbatch_args '{flag}=...', quoted as one word",
        },
    ),
    _Meaning(
        typed="--num_nodes --nnodes --n_nodes -N",
        ours="--nodes",
        otherwise="submit --nodes N takes whole nodes; run: srun --nodes=N shardprep run DATA",
    ),
    _Meaning(
        typed="--ntasks --tasks --concurrency --max_jobs --max_tasks --array_parallelism --slots --throttle",
        ours="--max_parallel",
        otherwise="submit --max_parallel N",
    ),
    _Meaning(
        typed=(
            "--module --modules --env --conda --conda_env --venv --virtualenv --activate --prologue "
            "--setup_script"
        ),
        ours="--setup",
        otherwise="submit --setup FILE, which tasks source first",
    ),
    _Meaning(
        typed="--image --singularity --apptainer --docker --container_image --sif --enroot",
        ours="--container",
        otherwise="submit --container 'apptainer exec image.sif'",
    ),
    _Meaning(
        typed="--email --mail --webhook --slack --on_end",
        ours="--notify",
        otherwise="submit --notify COMMAND",
    ),
    _Meaning(
        typed="--max_rounds --retries --max_retries --max_attempts --attempts --auto_retry",
        ours="--until_done",
        otherwise="submit --until_done sends failed shards again, at most five times",
        of={
            "submit": "--until_done sends failed shards again, at most five times",
            "retry": (
                "--until_done sends failed shards again; --shards IDS names them, however often they failed"
            ),
        },
    ),
    _Meaning(
        typed=(
            "--resume --continue --restart --resume_from --resume_from_checkpoint --skip_existing "
            "--skip_done --missing --incremental --append"
        ),
        otherwise="leave it out: what is done is never made twice, so the same command goes on",
    ),
    _Meaning(
        typed="--dryrun --dry --simulate --no_op --noop --preview --plan_only --test -n",
        ours="--dry_run",
        otherwise="plan, submit and clean have --dry_run",
    ),
    _Meaning(
        typed="--quiet --silent --no_progress --no_progress_bar -q",
        otherwise="progress is on standard error: 2> run.log keeps it away",
    ),
    _Meaning(
        typed="--debug --verbosity --log_level --loglevel --log",
        ours="--verbose",
        otherwise="there is no log level; leave it out",
    ),
    _Meaning(
        typed="--yes --assume_yes --no_confirm --non_interactive -y",
        otherwise="no command asks; leave it out",
    ),
    _Meaning(
        typed="--as_json --output_format --format --machine_readable --metrics --porcelain",
        ours="--json --to",
        otherwise="status, report, doctor and duplicates have --json",
    ),
    _Meaning(
        typed="--watch --follow --live --refresh --interval --wait_for --tail",
        ours="--watch --wait",
        otherwise="shardprep status DATA --watch",
    ),
    _Meaning(
        typed="--hash --checksum --checksums --crcs --md5 --sha256",
        ours="--hash_inputs",
        otherwise="verify and stage compare the hashes of all files",
    ),
    _Meaning(
        typed="--deep_check --full --thorough --strict",
        ours="--deep",
        otherwise="shardprep verify DATA --deep",
    ),
    _Meaning(
        typed="--quick --fast_check",
        ours="--fast",
        otherwise="shardprep verify DATA --fast",
    ),
    _Meaning(
        typed="--stripe_size --stripe_count --stripe_pool --count --size --pool --pfl --dom --layout",
        ours="--stripe",
        otherwise="plan --stripe N[,SIZE][,POOL]",
        of={
            "plan lustre": (
                "one flag names the layout: --stripe N[,SIZE][,POOL], or --stripe '-c 8' as for lfs setstripe"
            ),
        },
    ),
    _Meaning(
        typed="--library --backend --tokenizer_library --use_fast --fast_tokenizer",
        ours="--engine",
        otherwise="run --engine NAME chooses the library",
    ),
    _Meaning(
        typed="--find --search --query --contains --regex",
        ours="--grep",
        otherwise="shardprep peek DATA --grep TEXT, or peek DATA ADDRESS",
    ),
    _Meaning(
        typed="--vocabulary_size --n_vocab --num_merges --merges",
        ours="--vocab_size",
        otherwise="train_tokenizer --vocab_size",
    ),
    _Meaning(
        typed="--checkpoint --ckpt --state_dict --state_file",
        ours="--state",
        otherwise="where DATA --state FILE",
    ),
    _Meaning(
        typed="--steps --global_step --iteration --iter",
        ours="--step",
        otherwise="where DATA --state FILE --step N",
    ),
    _Meaning(
        typed="--cache_dir --staged_dir --local_dir --scratch --tmp_dir --tmpdir",
        ours="--to",
        otherwise="export TMPDIR=DIR for scratch files; shardprep stage DATA --to DIR copies a data set",
    ),
    _Meaning(
        typed="--token --hf_token --auth_token --use_auth_token --api_key",
        otherwise="type: hf auth login",
    ),
    _Meaning(
        typed="--trust_remote_code",
        otherwise="code of a model is never run; leave it out",
    ),
    _Meaning(
        typed="--lang --language --locale",
        otherwise="there is one language; leave it out",
    ),
    _Meaning(
        typed="--config --config_file --yaml --cfg",
        otherwise="flags have no file; put the command into a script",
    ),
    _Meaning(
        typed="True False true false on off yes no",
        otherwise="a flag that is on or off takes no value: use --NAME or --no-NAME",
    ),
)

# Of ours -> what others call them.
COMMANDS = {
    "plan": "init prepare configure create new setup start dry_run cost estimate",
    "run": "make build process preprocess tokenize encode execute work convert_data generate go",
    "verify": "check validate test fsck integrity",
    "peek": "show view head cat sample inspect decode print look display",
    "export": "convert to_megatron megatron nanogpt save dump",
    "duplicates": "dedup dedupe deduplicate",
    "overlap": "decontaminate contamination decontam",
    "blank": "delete forget erase withdraw rewrite redact unlearn",
    "clean": "gc prune cleanup purge tidy clear",
    "train_tokenizer": "tokenizer train train_bpe bpe",
    "submit": "sbatch slurm array launch queue send",
    "status": "monitor watch progress ps info stat list ls top squeue",
    "retry": "resume continue restart rerun repeat resubmit requeue",
    "cancel": "kill stop abort scancel terminate",
    "logs": "log tail errors",
    "report": "summary stats statistics card html describe",
    "stage": "copy cp sync rsync download local",
    "where": "find trace which locate history",
    "lustre": "stripe lfs setstripe layout restore",
    "doctor": "diagnose env environment check_env health",
    "--version": "version",
}


def meaning_of_flag(typed: str, command: str, known: Collection[str]) -> str:
    """Return a hint for a flag that ``command`` does not have, or "". ``known``: the flags that it has."""
    for meaning in FLAGS:
        if typed not in meaning.typed.split(" "):
            continue
        for commands, hint in meaning.of.items():
            if command in commands.split(" "):
                # Python's argparse takes names with underscores, and Slurm takes hyphens.
                return hint.replace("{flag}", typed.replace("_", "-"))
        for flag in meaning.ours.split():
            if flag in known:
                return f"use {flag}"
        if meaning.otherwise:
            return meaning.otherwise
    return ""


def meaning_of_command(typed: str) -> str:
    """Return our command for what is typed, or ""."""
    for command, words in COMMANDS.items():
        if typed in words.split(" "):
            return command
    return ""
