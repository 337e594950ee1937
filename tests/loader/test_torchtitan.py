"""The dataloader of docs/training_others.md in torchtitan's configuration and in torch's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from loader import get_llama3_dataloader
from tests.documented import examples_of

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.frameworks
ROWS, TOKENS = 4, 32  # of a global batch


@pytest.fixture
def data(prep: Prep, sample_dir: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    prep.plan(sample_dir, folder, num_shards=3, record="packed", seq_len=TOKENS + 1)
    prep.make(folder)
    assert prep.command("verify", folder).code == 0
    return folder


def _shard_loader() -> Any:
    (code,) = (text for text in examples_of("training_others.md") if "BaseDataLoader" in text)
    names: dict[str, Any] = {"__name__": "training_others"}
    exec(compile(code, "docs/training_others.md", "exec", dont_inherit=True), names)
    return names["ShardLoader"]


def _built(data: Path, world: int) -> list[Any]:
    """A dataloader of each data-parallel rank, as torchtitan's trainer builds it."""
    config: Any = _shard_loader().Config(dataset_path=str(data), global_batch_size=ROWS, num_workers=0)
    runtime = {"tokenizer": None, "seq_len": TOKENS, "snapshot_every_n_steps": None}
    built = [
        config.build(dp_world_size=world, dp_rank=rank, local_batch_size=ROWS // world, **runtime)
        for rank in range(world)
    ]
    base = pytest.importorskip("torchtitan.components.dataloader").BaseDataLoader
    assert all(isinstance(each, base) for each in built)
    return built


def _steps(loaders: list[Any], number: int) -> list[tuple[torch.Tensor, ...]]:
    """The next global batches: input, positions, labels."""
    iterators = [iter(each) for each in loaders]
    found = []
    for _ in range(number):
        parts = [next(iterator) for iterator in iterators]
        fields = [(inputs["input"], inputs["positions"], labels) for inputs, labels in parts]
        found.append(tuple(torch.cat(each) for each in zip(*fields, strict=True)))
    return found


def test_torchtitans_checkpoints_resume_on_another_number_of_ranks(data: Path, tmp_path: Path) -> None:
    plain = get_llama3_dataloader(
        data, ROWS, seq_len=TOKENS, targets="shifted", boundaries="position_ids", num_workers=0
    )
    expected = [tuple(batch[n] for n in ("input_ids", "position_ids", "labels")) for batch in plain][:7]
    first = _built(data, 2)
    assert all(map(_equal, _steps(first, 3), expected[:3]))
    save({"dataloader": first[0]}, checkpoint_id=tmp_path / "step", no_dist=True)
    for world in (1, 2, 4):
        resumed = _built(data, world)
        for each in resumed:
            load({"dataloader": each}, checkpoint_id=tmp_path / "step", no_dist=True)
        assert all(map(_equal, _steps(resumed, 4), expected[3:]))


def _equal(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
