"""Withdrawn documents are padding where they stand; all other places, the order and the state stay."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from loader import TokenLoader, get_llama3_dataloader
from shardprep.errors import BrokenShard
from shardprep.format.withdrawals import read_withdrawals, withdrawal_path

if TYPE_CHECKING:
    from tests.conftest import Prep

NUM_DOCUMENTS, PAD, EOS = 400, 500, 501  # every id of document 7 is 7
_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} "
    "{% endgeneration %}{% else %}{{ m['content'] }} {% endif %}{% endfor %}"
)
FORMS: dict[str, dict[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy", "keep_text": False, "append_eos": True},
    "concat": {"record": "packed", "seq_len": 16, "append_eos": True},
    "best_fit": {"record": "packed", "seq_len": 16, "pack": "best_fit", "append_eos": True},
    "chat": {"record": "chat", "seq_len": 16, "text_field": "chat", "append_eos": False},
    "sides": {"token_format": "npy", "validation_fraction": 0.3},
    "rows of sides": {"record": "packed", "seq_len": 16, "append_eos": True, "validation_fraction": 0.3},
    "best fit of sides": {"record": "packed", "seq_len": 16, "pack": "best_fit", "validation_fraction": 0.3},
}
# Of a data set, and the loader's arguments.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "padded": ("json", {}),
    "cut": ("npy", {"max_length": 5}),
    "grouped": ("npy", {"group_by_length": 2}),
    "one width": ("json", {"max_length": 40, "padding": "max_length", "targets": "shifted"}),
    "joined": ("json", {"seq_len": 16}),
    "joined with boundaries": ("json", {"seq_len": 16, "boundaries": ["segment_ids", "cu_seqlens"]}),
    "joined with EOS": ("npy", {"seq_len": 16, "boundaries": "transformers"}),
    "packed": ("concat", {}),
    "packed with boundaries": ("concat", {"boundaries": ["segment_ids", "position_ids"]}),
    "best fit": ("best_fit", {"boundaries": "transformers"}),
    "chat": ("chat", {"boundaries": "segment_ids"}),
    "shifted": ("concat", {"targets": "shifted"}),
    "both sides": ("rows of sides", {}),
    "planned documents": ("sides", {"split": "validation"}),
    "planned rows": ("rows of sides", {"split": "validation"}),
    "planned best fit": ("best fit of sides", {"split": "validation"}),
    "trained best fit": ("best fit of sides", {"split": "train"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def data(prep: Prep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of each form; of each a copy, ``FORM withdrawn``, with about 5 % withdrawn by two lists."""
    root, chooser = tmp_path_factory.mktemp("data"), random.Random(0)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(502)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=f"w{PAD}", eos_token=f"w{EOS}", chat_template=_TEMPLATE
    ).save_pretrained(root / "model")
    lines = []
    for number in range(1, NUM_DOCUMENTS + 1):
        words = [f"w{number}"] * chooser.choice([1, 2, 5, 9, 20, 50])
        turns = [("user", words[:2]), ("assistant", words)]
        chat = [{"role": role, "content": " ".join(said)} for role, said in turns]
        lines.append(json.dumps({"id": f"d{number}", "text": " ".join(words), "chat": chat}))
    (root / "raw").mkdir()
    (root / "raw" / "all.jsonl").write_text("\n".join(lines) + "\n")
    (root / "first.txt").write_text("".join(f"d{number}\n" for number in sorted(WITHDRAWN)[::2]))
    (root / "second.txt").write_text("".join(f"d{number}\n" for number in sorted(WITHDRAWN)))
    for name, options in FORMS.items():
        common: dict[str, Any] = {"model_id": str(root / "model"), "id_field": "id"}
        prep.plan(root / "raw", root / name, num_shards=3, **common, **options)
        prep.make(root / name)
        shutil.copytree(root / name, root / f"{name} withdrawn")
        for ids in ("first.txt", "second.txt"):
            ended = prep.command("withdraw", root / f"{name} withdrawn", "--ids", root / ids)
            assert ended.code == 0, ended.text
    return root


WITHDRAWN = frozenset(random.Random(1).sample(range(1, NUM_DOCUMENTS + 1), 20))


def load(data: Path, name: str, world: int = 1, rank: int = 0, **options: Any) -> TokenLoader:
    given = {"batch_size": 12 // world, "num_workers": 0, "seed": 3, **options}
    return get_llama3_dataloader(data / name, rank=rank, world_size=world, **given)


def masked(batch: Mapping[str, Any], *, shifted: bool) -> dict[str, Any]:
    """A batch of a loader without lists, as one with the lists should give it."""
    found = {name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    found = {**batch, **found}
    ids, labels = found["input_ids"], found["labels"]
    gone = torch.isin(ids, torch.tensor(sorted(WITHDRAWN)))
    for row, column in (gone.roll(1, 1) & (ids == EOS)).nonzero().tolist():
        gone[row, column] |= column > 0  # the EOS behind a document is its
    ids[gone] = PAD
    if shifted:  # a label is of the next place
        labels[gone | torch.isin(labels, torch.tensor(sorted(WITHDRAWN)))] = -100
    else:
        labels[gone] = -100
        labels[:, 1:][gone[:, :-1]] = -100
    if "attention_mask" in found:
        found["attention_mask"][gone] = 0
        found["attention_mask"][(found["attention_mask"] == 0).all(1), 0] = 1
    return found


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """That batches are equal; an EOS at the begin of a row may be of a document of the row before."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
            assert (torch.as_tensor(found[name]) == torch.as_tensor(value)).all(), name
            continue
        differs = found[name] != value
        differs[:, 0] &= expected["input_ids"][:, 0] != EOS
        differs[:, 1:2] &= ~((expected["input_ids"][:, :1] == EOS) & (found["labels"][:, 1:2] == -100))
        assert not differs.any(), (name, found[name][differs.any(1)], value[differs.any(1)])
    return bool((expected["input_ids"] == PAD).any())


@pytest.mark.parametrize("case", CASES)
def test_withdrawn_documents_are_padding_where_they_stand(data: Path, case: str) -> None:
    form, options = CASES[case]
    shifted = options.get("targets") == "shifted"
    with load(data, form, **options) as loader, load(data, f"{form} withdrawn", **options) as with_lists:
        assert len(loader) == len(with_lists) > 1
        for _ in range(2):
            seen = [
                assert_same(found, masked(batch, shifted=shifted))
                for batch, found in zip(loader, with_lists, strict=True)
            ]
            assert any(seen)
        found = torch.cat([batch["input_ids"].reshape(-1) for batch in with_lists])
        assert not WITHDRAWN & set(found.tolist())


@pytest.mark.processes
@pytest.mark.parametrize("case", ["padded", "joined with boundaries", "packed", "chat"])
def test_batches_are_equal_on_every_world_with_workers_and_resumed(data: Path, case: str) -> None:
    form, options = CASES[case]
    with load(data, f"{form} withdrawn", **options) as loader:
        whole = [batch["labels"] for batch in loader]
        half = loader.state_at(len(whole) // 2)
    for world, workers in ((1, 2), (2, 0), (3, 2)):
        ranks = []
        for rank in range(world):
            with load(data, f"{form} withdrawn", world, rank, num_workers=workers, **options) as loader:
                loader.load_state_dict(half)
                ranks.append([batch["labels"] for batch in loader])
        for step, expected in enumerate(whole[len(whole) // 2 :]):
            found = [labels for rank in ranks for labels in rank[step]]
            for labels, wanted in zip(found, expected, strict=True):
                width = min(len(labels), len(wanted))
                assert torch.equal(labels[:width], wanted[:width])
                assert (torch.cat([labels[width:], wanted[width:]]) == -100).all()


@pytest.mark.parametrize("case", ["padded", "packed", "joined with boundaries", "best fit"])
def test_a_models_gradient_is_that_of_rows_in_which_they_are_padding(data: Path, case: str) -> None:
    """Whatever ids stand there: the gradient of other ids in their places is the same."""
    form, options = CASES[case]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=502, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
    )
    with load(data, form, **options) as loader, load(data, f"{form} withdrawn", **options) as with_lists:
        for batch, found in zip(loader, with_lists, strict=True):
            fields = {name: found[name] for name in ("attention_mask", "position_ids") if name in found}
            gone = torch.isin(batch["input_ids"], torch.tensor(sorted(WITHDRAWN)))
            if "segment_ids" in found:
                segments = found["segment_ids"]
                sees = segments[:, :, None] == segments[:, None]
                fields = {"attention_mask": (sees & torch.ones_like(sees).tril())[:, None]}
            if not gone.any():
                continue
            gradients = []
            for ids in (found["input_ids"], torch.where(gone, 3, found["input_ids"]), batch["input_ids"]):
                model.zero_grad()
                labels = found["labels"]
                model(input_ids=ids, labels=labels, use_cache=False, **fields).loss.backward()
                gradients.append(
                    torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
                )
            for other in gradients[1:]:
                assert torch.allclose(gradients[0], other, atol=1e-7)
            model(input_ids=batch["input_ids"], labels=batch["labels"], **fields).loss.backward()
            unmasked = torch.cat(
                [each.grad.flatten() for each in model.parameters() if each.grad is not None]
            )
            assert not torch.allclose(gradients[0], unmasked - gradients[2], atol=1e-7)
            return
    pytest.fail("no batch held a withdrawn document")


def test_a_batch_without_any_label_is_told_once(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in (1, 2):  # a loader each
        with load(data, "json withdrawn", batch_size=1) as loader:
            empty = [batch for batch in loader if (batch["labels"] == -100).all()]
        assert len(empty) >= len(WITHDRAWN) - 1
        assert all(batch["attention_mask"].sum() == 1 for batch in empty)
        assert caplog.text.count("a batch has no label left") == number


@pytest.mark.processes
def test_a_collate_fn_gets_labels_and_other_ids(data: Path) -> None:
    def collate(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return samples

    for workers in (0, 2):
        options: dict[str, Any] = {"seq_len": 16, "collate_fn": collate, "num_workers": workers}
        with load(data, "json", **options) as loader, load(data, "json withdrawn", **options) as with_lists:
            num_gone = 0
            pairs: Any = zip(loader, with_lists, strict=True)
            for batch, found in pairs:
                for before, after in zip(batch, found, strict=True):
                    gone = np.isin(before["input_ids"], sorted(WITHDRAWN))
                    num_gone += gone.sum()
                    assert (np.array(after["input_ids"])[gone] == PAD).all()
                    assert (np.array(after["labels"])[gone] == -100).all()
            assert num_gone > 20


def test_a_mixture_masks_each_source_by_its_own_lists(data: Path) -> None:
    folders = {"a": data / "json withdrawn", "b": data / "npy"}
    options: dict[str, Any] = {"weights": {"a": 1, "b": 1}, "num_workers": 0, "weights_in": "samples"}
    with get_llama3_dataloader(folders, 12, **options) as loader:
        found = torch.cat([batch["input_ids"].reshape(-1) for batch in loader])
    of_b = set(found.tolist()) & WITHDRAWN
    assert of_b
    folders["b"] = data / "npy withdrawn"
    with get_llama3_dataloader(folders, 12, **options) as loader:
        assert not set(torch.cat([batch["input_ids"].reshape(-1) for batch in loader]).tolist()) & WITHDRAWN


def test_a_state_goes_on_when_a_list_grows_and_names_the_lists(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(data / "concat", tmp_path / "set")
    with load(tmp_path, "set") as loader:
        assert loader.state_dict()["withdrawn"] == ""
        before = [batch["input_ids"] for batch in loader]
        state = loader.state_at(3)
        assert "withdrawn" not in loader.describe()
    shutil.copytree(data / "concat withdrawn" / "withdrawn", tmp_path / "set" / "withdrawn")
    caplog.set_level("INFO", "loader")
    with load(tmp_path, "set") as loader:
        assert len(re.findall("withdrawn: 20 documents are masked, by list .*0002.json", caplog.text)) == 1
        assert "withdrawn: 20 documents" in loader.describe()
        loader.load_state_dict(state)
        after = [batch["input_ids"] for batch in loader]
        assert len(after) == len(before) - 3
        for ids, were in zip(after, before[3:], strict=True):
            assert torch.equal(ids[ids != PAD], were[ids != PAD])
        later = json.loads(json.dumps(loader.state_at(5)))
    lists = read_withdrawals(tmp_path / "set", loader.plan.shards.datasets[0].spec.plan_id)  # type: ignore[union-attr]
    plan_id, sha256 = lists.lists[0].plan_id, lists.sha256
    assert later["withdrawn"] == f"3: {plan_id[:12]}={sha256[:16]}"
    caplog.clear()
    withdrawal_path(tmp_path / "set", 2).unlink()
    with load(tmp_path, "set") as loader:
        loader.load_state_dict(later)
    assert re.search(f"by list {sha256[:16]} of .* seen again", caplog.text)
    withdrawal_path(tmp_path / "set", 1).write_text("{}")
    with pytest.raises(BrokenShard, match=r"0001\.json.*bring the folder back"):
        load(tmp_path, "set")
