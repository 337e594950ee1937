"""Models and data sets of the hub, which is a local server here, or does not answer."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import ROOT
from tests.children import run_child, shardprep
from tests.world import World, flags_of

pytestmark = pytest.mark.processes
SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """What ``huggingface_hub`` asks for of repositories: their revision, the list of files, and files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.repositories: dict[str, dict[str, bytes]] = {}  # "models/NAME" or "datasets/NAME" -> files
        self.asked: list[str] = []
        self.is_down = False

    def environ(self, folder: Path) -> dict[str, str]:
        kept = {name: os.environ[name] for name in os.environ if not name.startswith(("HF_", "SLURM_"))}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
        return {**kept, **hub, "PATH": path, "PYTHONPATH": str(ROOT)}


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        self.server.asked.append(path)
        if self.server.is_down:
            self.close_connection = True
            return None
        for name, files in self.server.repositories.items():
            listed: list[dict[str, Any]] = [
                {"type": "file", "path": each, "size": len(raw), "oid": SHA} for each, raw in files.items()
            ]
            found = {
                f"api/{name}/revision/main": {"id": name.partition("/")[2], "sha": SHA, "siblings": []},
                f"api/{name}/tree/{SHA}": listed,
            }
            if path in found:
                return self.answer(json.dumps(found[path]).encode())
            for each, raw in files.items():
                if path == f"{name.removeprefix('models/')}/resolve/{SHA}/{each}":
                    return self.answer(raw)
        return self.answer(b"", code=404)

    def answer(self, content: bytes, *, code: int = 200) -> None:
        self.send_response(code)
        tag = f'"{hash(content) & 0xFFFFFFFF:08x}"'
        for name, value in {"ETag": tag, "X-Repo-Commit": SHA, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
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


def test_a_model_that_is_on_no_disk_is_asked_for_once_where_no_hub_answers(
    hub: Hub, world: World, tmp_path: Path
) -> None:
    hub.is_down = True
    said = plan(hub, tmp_path, code=66, input_dir=world.raw_dir, output_dir="data", model_id="some/model")
    assert "hf download some/model " in said
    assert sum("some/model" in path for path in hub.asked) == 1


def test_a_model_of_the_hub_is_fetched_once_and_later_found_without_a_hub(
    hub: Hub, world: World, tmp_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in world.tokenizer.iterdir()}
    hub.repositories["models/some/model"] = {**files, "vocab.txt": b"", "model.safetensors": b"not fetched"}
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


def test_a_data_set_of_the_hub_is_answered_with_the_command_that_fetches_it(
    hub: Hub, world: World, tmp_path: Path
) -> None:
    lines = b"".join(b'{"input": "question %d", "output": "answer"}\n' % number for number in range(20))
    hub.repositories["datasets/some/questions"] = {"README.md": b"# card", "data/train.jsonl": lines}
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
