"""Models and data sets of the hub, which is a local server here, or does not answer."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import zlib
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import ROOT
from tests.children import run_child, shardprep
from tests.world import World, flags_of

pytestmark = pytest.mark.processes
SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """What ``huggingface_hub`` asks for of repositories, as files of a folder: revision, list, and files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.place, self.asked, self.is_down = (
            World(folder / "hub", raw_dir=folder / "hub"),
            list[str](),
            False,
        )

    def add(self, name: str, files: dict[str, bytes]) -> None:
        """Serve "models/NAME" or "datasets/NAME"."""
        listed = [{"type": "file", "path": path, "size": len(raw), "oid": SHA} for path, raw in files.items()]
        found = {"id": name.partition("/")[2], "sha": SHA, "siblings": []}
        self.place.raw(
            {f"api/{name}/revision/main": json.dumps(found), f"api/{name}/tree/{SHA}": json.dumps(listed)}
        )
        self.place.raw(
            {f"{name.removeprefix('models/')}/resolve/{SHA}/{path}": raw for path, raw in files.items()}
        )

    def environ(self, folder: Path) -> dict[str, str]:
        kept = {name: os.environ[name] for name in os.environ if not name.startswith(("HF_", "SLURM_"))}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
        return {**kept, **hub, "PATH": path, "PYTHONPATH": str(ROOT)}


class Answers(SimpleHTTPRequestHandler):
    server: Hub

    def send_head(self) -> Any:
        self.server.asked.append(self.path)
        if not self.server.is_down:
            return super().send_head()
        self.close_connection = True
        return None

    def translate_path(self, path: str) -> str:
        return str(self.server.place.raw_dir / path.partition("?")[0].strip("/"))

    def end_headers(self) -> None:
        self.send_header("ETag", f'"{zlib.crc32(self.path.encode()):08x}"')
        self.send_header("X-Repo-Commit", SHA)
        super().end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def plan(hub: Hub, place: Path, *, code: int, **flags: object) -> str:
    """Plan in a process; returns what it prints."""
    done = run_child(shardprep("plan", *flags_of(flags)), cwd=place, env=hub.environ(place), code=code)
    return done.stdout + done.stderr


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path).raw({"a.txt": "a line\n" * 9})


def test_a_hub_that_does_not_answer_is_asked_for_a_model_once(hub: Hub, world: World, tmp_path: Path) -> None:
    hub.is_down = True
    said = plan(hub, tmp_path, code=66, input_dir=world.raw_dir, output_dir="data", model_id="some/model")
    assert "hf download some/model " in said
    assert sum("some/model" in path for path in hub.asked) == 1


def test_a_model_of_the_hub_is_fetched_once_and_later_found(hub: Hub, world: World, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in world.tokenizer.iterdir()}
    hub.add("models/some/model", {**files, "vocab.txt": b"", "model.safetensors": b"not fetched"})
    flags = {"input_dir": world.raw_dir, "model_id": "some/model"}
    plan(hub, tmp_path, code=0, output_dir="first", **flags)
    assert not any("safetensors" in path for path in hub.asked)
    hub.is_down, num_asked = True, len(hub.asked)
    for name in ("whole", "as transformers leaves it, without what it did not ask for"):
        plan(hub, tmp_path, code=0, output_dir=name, **flags)
        for path in tmp_path.glob("hf/hub/*/snapshots/*/vocab.txt"):
            path.unlink()
    assert len(hub.asked) - num_asked <= 4, "and nobody waits for one that does not answer"
    plans = [json.loads(path.read_bytes())["plan_id"] for path in tmp_path.glob("*/plan.json")]
    assert len(plans) == 3
    assert len(set(plans)) == 1


def test_a_data_set_of_the_hub_is_told_how_to_be_fetched(hub: Hub, world: World, tmp_path: Path) -> None:
    lines = b"".join(b'{"input": "question %d", "output": "answer"}\n' % number for number in range(20))
    hub.add("datasets/some/questions", {"README.md": b"# card", "data/train.jsonl": lines})
    model = tmp_path / "model of mine"
    model.symlink_to(world.tokenizer)
    flags = {"output_dir": "data", "model_id": model, "text_template": r"{input}\n\n{output}"}
    said = plan(hub, tmp_path, code=66, input_dir="some/questions", **flags)
    found = re.search(r"(hf download .* --local-dir RAW); then plan --input_dir RAW --recursive", said)
    assert found
    run_child(["bash", "-euc", found[1]], cwd=tmp_path, env=hub.environ(tmp_path))
    plan(hub, tmp_path, code=0, input_dir="RAW/data", **flags)
    assert world.inputs() == ["train.jsonl"]


def test_other_names_of_folders_are_no_data_sets_of_the_hub(world: World) -> None:
    for name in ("raw", "/lustre/raw", "a/b/c", "../a"):
        ended = world.try_plan(input_dir=name)
        assert (ended.code, "hf download" in ended.text) == (66, False)
