"""The example of docs/training_trainer.md for TRL's SFTTrainer, on conversations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.chat_sets import TAGGED, chat_model, conversations, write_chats
from tests.documented import examples_of

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = [pytest.mark.processes, pytest.mark.frameworks]


def test_the_example_trains_on_the_loaders_batches(prep: Prep, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    model = chat_model(prep.model_dir, tmp_path / "model", TAGGED)
    raw, data = write_chats(tmp_path / "raw", conversations(80)), tmp_path / "data"
    prep.plan(raw, data, num_shards=2, record="chat", seq_len=64, model_id=str(model))
    prep.make(data)
    assert prep.command("verify", data).code == 0
    (example,) = (code for code in examples_of("training_trainer.md") if "SFTTrainer" in code)
    config = LlamaConfig(
        vocab_size=900, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    seen: list[dict[str, Any]] = []
    llama = LlamaForCausalLM(config)

    def look(_: Any, __: Any, fields: dict[str, Any]) -> None:
        seen.append(fields)

    llama.register_forward_pre_hook(look, with_kwargs=True)
    more = {"use_cpu": True, "report_to": [], "bf16": False, "save_strategy": "no", "disable_tqdm": True}
    names: dict[str, Any] = {"DATA": str(data), "CHECKPOINT": str(tmp_path / "out"), "num_steps": 2}
    exec(
        compile(example, "docs/training_trainer.md", "exec"),
        {**names, "model": llama, "more_arguments": more},
    )
    trained = [fields for fields in seen if fields.get("labels") is not None]
    assert len(trained) == 2
    assert all((fields["labels"] == -100).any() for fields in trained)
    assert all(fields["position_ids"].shape == (8, 64) for fields in trained)
