"""One step of training on conversations changes a model as TRL's SFTTrainer does, on the same records.

TRL gets templates whose generation tags say which answers are learnt, and ``assistant_only_loss``. Here the
template has no tags, and ``--learn``, weights and the rows of a loader say so.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.attention_families import small_model
from tests.world import EOS, World, save_tokenizer

pytest.importorskip("trl")
pytestmark = [pytest.mark.processes, pytest.mark.frameworks]

LEARNING_RATE = 0.5
# Earlier turns lose their thoughts, as those of reasoning models do. ON is where an answer's tags begin.
TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' }}{% set text = m.content %}"
    "{% if not loop.last %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{% if m.role == 'assistant' and ON %}{% generation %}{{ text + EOS }}{% endgeneration %}"
    "{% else %}{{ text + EOS }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
).replace("EOS", f"'{EOS}'")


def turns(*texts: str, weights: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        found.append({"role": "user" if number % 2 == 0 else "assistant", "content": text})
    for answer, weight in zip(found[1::2], weights, strict=False):
        answer["weight"] = weight
    return found


PLAIN = [
    turns("Hi?", "Hello there."),
    turns("Sum?", "Four.", "And now?", "It is 12, as told."),
    turns("한글?", "네, 한글."),
]
THINKING = [
    turns("Why?", "<think>Since A.</think>So.", "Then?", "<think>It ends.</think>Nothing."),
    turns("Who?", "<think>Me.</think>I."),
]
WEIGHTED = [
    turns("Hi?", "Bad words.", "And?", "Good words.", weights=(0, 1)),
    turns("Sum?", "Four.", weights=(1,)),
]


def up_to_each_answer(records: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    return [record[:end] for record in records for end in range(2, len(record) + 1, 2)]


def weights_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def trained_by_trl(
    model: Any, model_id: Path, records: list[list[dict[str, Any]]], template: str, folder: Path
) -> list[torch.Tensor]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(model_id)
    tokenizer.chat_template = template
    config = SFTConfig(
        output_dir=str(folder),
        assistant_only_loss=True,
        per_device_train_batch_size=len(records),
        max_steps=1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        max_length=None,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    data = Dataset.from_list([{"messages": record} for record in records])
    SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer).train()
    return weights_of(model)


def trained_by_hand(model: Any, world: World) -> list[torch.Tensor]:
    """Make one step of SGD on all rows, with the mean of the losses of all labels."""
    num_rows = sum(each["counts"]["num_samples"] for each in world.manifests())
    with world.loader(batch_size=num_rows, boundaries="transformers", shuffle=False) as loader:
        (batch,) = loader
        logits = model(**{name: batch[name] for name in batch if name != "labels"}).logits
    labels = batch["labels"][:, 1:]
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100, reduction="sum"
    )
    (losses / (labels != -100).sum()).backward()
    with torch.no_grad():
        for each in model.parameters():
            if each.grad is not None:
                each -= LEARNING_RATE * each.grad
    return weights_of(model)


@pytest.mark.parametrize(
    ("learn", "records", "tags"),
    [
        ("all", PLAIN, "true"),
        ("last", THINKING, "loop.last"),
        ("each", THINKING, "loop.last"),
        ("all", WEIGHTED, "m.weight != 0"),
        ("each", WEIGHTED, "m.weight != 0"),
    ],
    ids=["all", "last", "each", "weights", "each with weights"],
)
def test_a_step_changes_a_model_as_trls_does(
    tmp_path: Path, learn: str, records: list[list[dict[str, Any]]], tags: str
) -> None:
    untagged = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    model_id = save_tokenizer(tmp_path / "model", untagged.replace("ON", "true"))
    world = World(tmp_path, tokenizer=model_id).raw({"chats.jsonl": [{"messages": each} for each in records]})
    options: dict[str, Any] = {"record": "chat", "seq_len": 512, "pack": "best_fit", "num_shards": 1}
    world.plan(**options, learn=learn).run().verify()
    first = small_model("llama", "sdpa")
    first.resize_token_embeddings(400)
    second = copy.deepcopy(first)
    before = weights_of(first)
    # A template without thoughts renders the earlier answers of WEIGHTED equally in each of its documents.
    given = up_to_each_answer(records) if learn == "each" and records is THINKING else records
    expected = trained_by_trl(first, model_id, given, TEMPLATE.replace("ON", tags), tmp_path / "trl")
    found = trained_by_hand(second, world)
    changes = [(one - other).abs().max().item() for one, other in zip(expected, before, strict=True)]
    assert max(changes) > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
