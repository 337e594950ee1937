"""The examples of training of README and docs/ run with the wheel, in a folder with their data set alone."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.chat_sets import TAGGED, chat_model, conversations, write_chats
from tests.checkout import ROOT
from tests.children import environ_of_children, run_child

if TYPE_CHECKING:
    from tests.conftest import Prep
    from tests.warm_python import WarmPython

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def environ() -> dict[str, str]:
    return environ_of_children(TOKENIZERS_PARALLELISM="false")


@pytest.fixture(scope="module")
def desk(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MODEL, a Llama with its tokenizer; RAW, 0.9 M tokens; and three small data sets to mix."""
    folder = tmp_path_factory.mktemp("a desk")
    shutil.copytree(prep.model_dir, folder / "MODEL")
    config = LlamaConfig(
        vocab_size=900, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(config).save_pretrained(folder / "MODEL")
    texts = sorted(sample_dir.glob("*.txt"))
    (folder / "RAW").mkdir()
    for number in range(12):
        for text in texts:
            shutil.copy(text, folder / "RAW" / f"{number}_{text.name}")
    for number, name in enumerate(("web", "code", "books")):
        (folder / f"raw_{name}").mkdir()
        shutil.copy(texts[number], folder / f"raw_{name}")
        prep.plan(
            folder / f"raw_{name}", folder / "sources" / name, model_id=str(folder / "MODEL"), num_shards=2
        )
        prep.make(folder / "sources" / name)
        assert prep.command("verify", folder / "sources" / name).code == 0
    return folder


def test_each_example_of_training_runs_as_shown(
    desk: Path, warm: WarmPython, environ: dict[str, str]
) -> None:
    ended = run_child([warm.python, "-m", "tests.training_pages"], cwd=desk, env=environ)
    found = re.search(r"(\d+) examples ran, (\d+) calls of ours were compared", ended.stdout)
    assert found, ended.stdout
    assert int(found[1]) >= 16
    assert int(found[2]) >= 25


def test_the_command_that_plans_conversations_runs_as_shown(
    warm: WarmPython, environ: dict[str, str], prep: Prep, tmp_path: Path
) -> None:
    chat_model(prep.model_dir, tmp_path / "MODEL", TAGGED)
    write_chats(tmp_path / "RAW", conversations(80))
    page = (ROOT / "docs" / "training_data.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^shardprep plan .*--record chat.*$", page, re.MULTILINE)
    run_child([warm.python, "-m", *shlex.split(command)], cwd=tmp_path, env=environ)
    run_child([warm.python, "-m", "shardprep", "run", "DATA"], cwd=tmp_path, env=environ)
    manifests = [json.loads(path.read_bytes()) for path in (tmp_path / "DATA").glob("shard-*.json")]
    assert sum(manifest["counts"]["num_documents"] for manifest in manifests) == 80


def test_the_example_of_ddp_trains_as_shown(
    desk: Path, warm: WarmPython, environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "examples").mkdir()
    script = shutil.copy(ROOT / "examples" / "train_llama.py", tmp_path / "examples")
    shown = re.search(
        r"^ +python (examples/train_llama.py DATA CHECKPOINTS .*?)  ", Path(script).read_text(), re.MULTILINE
    )
    assert shown
    here = {"DATA": str(desk / "sources" / "web"), "1000": "3"}
    words = [here.get(word, word) for word in shown[1].split()]
    ended = run_child([warm.python, *words, "--log_every", "1"], cwd=tmp_path, env=environ)
    assert "step 3: loss " in ended.stdout
    assert [path.name for path in (tmp_path / "CHECKPOINTS").glob("*.pt")] == ["step-00000003.pt"]
