"""Run the training examples of the docs in a folder that has everything they name.

    python -m tests.training_pages

Examples of frameworks and of several ranks run elsewhere (RUN_ELSEWHERE). Here only their imports and
arguments are checked.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from types import SimpleNamespace
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM

import loader as loader_package
from tests.checkout import ROOT
from tests.documented import examples_of

OURS = ("loader", "shardprep")
RUN_ELSEWHERE = {
    "training_own_loop.md": {3, 4, 5},  # tests/ranks.py
    # tests/loader/test_frameworks.py, where the frameworks are installed
    "training_frameworks.md": {2, 3, 4, 5, 6, 7, 8},
    "seeing.md": {0},  # tests/project/test_wheel.py
    "cluster.md": {0},
    "format.md": {0},  # plain webdataset; tests/format/
}  # fmt: skip


# Text of the examples -> what runs here. Eager attention on the CPU takes the square of a row's length.
SMALLER = {
    '"/data/': '"sources/',
    '"/lustre/data"': '"DATA"',
    '"data"': '"sources/web"',
    '"num_shards": 64, "validation_fraction": 0.05': '"num_shards": 8, "validation_fraction": 0.01',
    "seq_len=8192": "seq_len=256",
    "seq_len=4096": "seq_len=256",
    "seq_len=2048": "seq_len=256",
}


class QuickModel(torch.nn.Module):
    """Return outputs like a model of transformers, without computing anything."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(loss=self.weight.sum())


def main() -> None:
    torch.set_num_threads(1)
    if not importlib.util.find_spec("lightning"):  # only the arguments on its page are checked here
        sys.modules.setdefault("pytorch_lightning", cast(Any, SimpleNamespace(Callback=object)))
    assert not str(loader_package.__file__).startswith(str(ROOT)), "must be the wheel, not the checkout"
    checked = examples = 0
    pages = ["training_data.md", *sorted(path.name for path in (ROOT / "docs").glob("*.md")), "README.md"]
    for page in dict.fromkeys(pages):
        names = names_for(page)
        for number, text in enumerate(examples_of(page)):
            place = f"{page}, example {number}"
            print(f"--- {place}", flush=True)
            checked += check_arguments(text)
            if number not in RUN_ELSEWHERE.get(page, ()):
                run(place, text, names)
                examples += 1
        for value in names.values():
            if hasattr(value, "state_at"):
                value.close()
    print(f"{examples} examples ran, {checked} calls of ours were compared")


def names_for(page: str) -> dict[str, Any]:
    """Return the names that a page expects the reader's script to define."""
    quick = page in ("README.md", "training.md", "training_own_loop.md")
    model = QuickModel() if quick else AutoModelForCausalLM.from_pretrained("MODEL")
    data = "sources/web" if page == "training_checks.md" else "DATA"
    names = {"DATA": data, "CHECKPOINT": f"checkpoints of {page}", "num_steps": 2, "device": "cpu", "rank": 0}
    names |= {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    return {**names, "more_arguments": {"use_cpu": True, "report_to": [], "disable_tqdm": True}}


def run(place: str, text: str, names: dict[str, Any]) -> None:
    if "loader" in names:
        names["checkpoint"] = {"loader": names["loader"].state_at(2)}
    for shown, here in SMALLER.items():
        text = text.replace(shown, here)
    exec(compile(text, place, "exec"), names)


def check_arguments(text: str) -> int:
    """Check that what an example imports and calls of ours exists. Returns the number of calls."""
    tree = ast.parse(text)
    a_loader = loader_package.get_llama3_dataloader("sources/web", batch_size=8, num_workers=0)
    ours: dict[str, Any] = {"get_llama3_dataloader": loader_package.get_llama3_dataloader}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in OURS:
            module = importlib.import_module(str(node.module))
            ours |= {name.asname or name.name: getattr(module, name.name) for name in node.names}
    num_calls = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "loader":
            assert hasattr(a_loader, node.attr), f"a loader has no {node.attr}"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in ours and called != "LeaveOut":  # an exception takes any arguments
            given = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(ours[called]).bind_partial(*node.args, **given)
            num_calls += 1
    return num_calls


if __name__ == "__main__":
    main()
