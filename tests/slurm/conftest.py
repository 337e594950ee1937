"""A data set and stand-ins for Slurm's commands, first on PATH; and a real cluster without accounts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.slurm.fake_slurm import Desk, install_fake_slurm
from tests.slurm.started_cluster import started_cluster
from tests.world import World


@pytest.fixture(scope="session")
def made(sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    """The sample text in 5 shards. Never written to."""
    return World(tmp_path_factory.mktemp("made"), raw_dir=sample_dir).plan(num_shards=5).run()


@pytest.fixture
def desk(made: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """A data set of five shards, none of them made."""
    data = made.copy(tmp_path, but=["shard-*"]).data_dir
    place = install_fake_slurm(tmp_path, monkeypatch)
    return Desk(data=data, place=place, made=made.data_dir, patch=monkeypatch)


@pytest.fixture(scope="module")  # one of the session would be ended when all else has ended
def plain_cluster() -> Iterator[dict[str, str]]:
    """Three nodes: the environment of commands, in which the ranks of a training find each other."""
    settings = {"NODE_CPUS": "8", "KILL_WAIT": "120"}
    settings |= {"SHARDPREP_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    settings |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with started_cluster("NO SLURM CLUSTER, the batch scripts are untested here", **settings) as started:
        yield started
