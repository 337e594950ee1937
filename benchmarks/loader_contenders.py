"""The loaders that are measured: the rows of each table."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

PACKED = "**shardprep, packed**"
LITDATA = "litdata 0.2.76 TokensLoader"
BASELINE = "baseline"  # webdataset, JSON, transformers' collator


@dataclass(frozen=True, kw_only=True)
class Loader:
    """A row of a table."""

    label: str
    script: str  # in loader_peers/
    peer: str | None = None  # which has its own environment; None: this one
    data: str = ""  # a folder that exists already; "": the script prepares it from the rows
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Return the name of the folder of its data set."""
        return self.data or "-".join([self.script, *self.environ.values()])


ROWS = [
    Loader(label=PACKED, script="shardprep_loader", data="packed"),
    Loader(
        label="shardprep, packed, position_ids and cu_seqlens",
        script="shardprep_loader",
        data="packed",
        environ={"BENCH_OPTIONS": '{"boundaries": ["position_ids", "cu_seqlens"]}'},
    ),
    Loader(label=LITDATA, script="litdata_tokens", peer="litdata"),
    Loader(label="HF datasets 5.2, numpy", script="hf_datasets", peer="loader_hf_datasets"),
    Loader(label="Grain 0.2.18, ArrayRecord", script="grain_records", peer="grain"),
    Loader(label="lancedb 0.40 StreamingDataset", script="lancedb_streaming", peer="lancedb"),
    Loader(label="tokbin 0.1.0 WindowDataset", script="tokbin_windows", peer="loader_tokbin"),
    Loader(label="nanoGPT memmap", script="nanogpt"),
    *(
        Loader(
            label=f"Megatron-core 0.16.1 GPTDataset, documents of {length:,} tokens",
            script="megatron_gpt",
            peer="megatron",
            environ={"BENCH_DOCUMENT_TOKENS": str(length)},
        )
        for length in (2048, 31)
    ),
    Loader(label="webdataset, raw uint32", script="webdataset_raw"),
    Loader(label="webdataset, npy", script="webdataset_npy"),
    Loader(label="MosaicML streaming 0.13", script="mosaicml", peer="mosaicml"),
    Loader(label="Energon 7.4.1, raw uint32", script="energon_crude", peer="energon"),
    Loader(label=BASELINE, script="baseline"),
]


def document_loaders(corpus: str) -> list[Loader]:
    """Return the baseline and ours on the same tars: batch 32, documents cut at 2,048 tokens."""
    limits = {"batch_size": 32, "max_length": 2048}
    return [
        Loader(
            label=f"{corpus}: {BASELINE}, padded",
            script="baseline",
            data=f"documents-{corpus}",
            environ={"BENCH_BATCH": "32", "BENCH_MAX_LENGTH": "2048"},
        ),
        *(
            Loader(
                label=f"{corpus}: shardprep, {name}",
                script="shardprep_loader",
                data=f"documents-{corpus}",
                environ={"BENCH_OPTIONS": json.dumps(options)},
            )
            for name, options in {
                "padded": limits,
                "padded, grouped by length": {**limits, "group_by_length": True},
                "packed at load": {"seq_len": 2048},
            }.items()
        ),
    ]
