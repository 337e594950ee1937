"""Run the quick start of the README, the pages of docs/ with their examples, and printed commands.

All run with only the wheel. benchmarks/gpu_check.py runs on the CPU.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.chat_sets import TAGGED, conversations
from tests.checkout import ROOT
from tests.children import environ_of_children, run_child
from tests.slurm.fake_slurm import install_fake_slurm
from tests.warm_python import WarmPython
from tests.world import World, call_main, hostile_text, save_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.processes, pytest.mark.slow]
HINT = re.compile(r"\b(?:next|or|run|then|one|retry|again|type): ((?:shardprep|sbatch|python|rm) [^\n;()]*)")
# Runs the tasks of a named script one after the other. A script on standard input goes to the stand-in.
SBATCH = r"""#!/bin/bash
[[ ${1:-} = --array=* ]] || exec @FAKE@ "$@"
tasks=${1#--array=}; shift
while [[ $1 = -* ]]; do shift; done
script=$1; shift
for id in $(seq "${tasks%-*}" "${tasks#*-}"); do
  SLURM_JOB_ID=7 SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=$id bash "$script" "$@" || exit
done
"""
SRUN = "#!/bin/bash\nwhile [[ $1 = -* ]]; do shift; done\n" + 'exec "$@"\n'


@dataclass
class Desk:
    """An empty folder, and an environment with only the wheel."""

    folder: Path
    environ: dict[str, str]

    def run(self, command: str, *, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = run_child(["bash", "-euc", command], cwd=self.folder, env=self.environ, code=code)
        assert str(ROOT) + "/" not in done.stderr + done.stdout
        return done

    def follow(self, printed: str) -> list[str]:
        """Run each printed command, then those that these print. Returns all of them in order."""
        todo, tried = HINT.findall(printed), list[str]()
        while todo:
            command = todo.pop(0).strip()
            if command not in tried:
                tried.append(command)
                done = self.run(command, code=None)
                assert done.returncode in (0, 65, 74), f"{command}\n{done.stderr}"
                todo += HINT.findall(done.stdout + done.stderr)
        return tried


@pytest.fixture(scope="module")
def warm(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """Python with the wheel's packages imported. The checkout is last on the path, for modules of tests."""
    # On small models more threads than one spin for most of the time.
    environ = environ_of_children(PYTHONPATH=f"{site}:{ROOT}", OMP_NUM_THREADS="1")
    modules = [
        "transformers",
        "transformers.models.llama.modeling_llama",
        "loader.dataloader",
        "preprocess.__main__",
        "slurm.__main__",
    ]
    with WarmPython(tmp_path_factory.mktemp("warm"), modules, environ) as server:
        yield server


@pytest.fixture
def desk(
    site: Path, warm: WarmPython, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Desk:
    fake = install_fake_slurm(tmp_path, monkeypatch)
    commands, folder = tmp_path / "commands", tmp_path / "a desk"
    commands.mkdir()
    folder.mkdir()
    sbatch = SBATCH.replace("@FAKE@", shlex.quote(f"{fake}/bin/sbatch"))
    for name, text in {"sbatch": sbatch, "srun": SRUN}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    shutil.copytree(model_dir, tmp_path / "MODEL")
    warm.install(commands)
    path = f"{commands}:{site / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = environ_of_children(PATH=path, PYTHONPATH=str(site))
    return Desk(folder, environ)


def quick_start() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```\n(mkdir raw.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(block)


def test_the_quick_start_of_the_readme_runs_as_shown_in_an_empty_folder(desk: Desk, site: Path) -> None:
    """With the commands that the wheel installs."""
    for name in ("python", "shardprep"):
        (desk.folder.parent / "commands" / name).unlink()
    ended = desk.run(quick_start())
    assert "verified 2 shards: 2 samples" in ended.stdout
    assert "두 번째 문서입니다." in ended.stdout, "peek shows it"
    found = desk.run("python -c 'import loader; print(loader.__file__)'").stdout
    assert found.strip() == f"{site}/loader/__init__.py"


@pytest.mark.parametrize("way", ["submit", "run"])
def test_the_next_commands_that_plan_prints_work_from_any_folder(desk: Desk, way: str) -> None:
    plan = next(line for line in quick_start().splitlines() if " plan " in line)
    desk.run(quick_start().partition("shardprep")[0])
    plan = plan.replace("--output_dir data", "--output_dir 'my data'").replace("MODEL", "../MODEL")
    printed = desk.run(plan).stdout
    (submit,) = re.findall(r"shardprep submit '[^']*'", printed)  # there is Slurm
    command = submit.replace("submit", way)
    data, desk.folder = desk.folder / "my data", desk.folder / "elsewhere"
    desk.folder.mkdir()
    tried = desk.follow(f"next: {command}")
    if way == "run":
        tried += desk.follow(desk.run(f"shardprep status {shlex.quote(str(data))}").stdout)
        assert any("verify" in command for command in tried)
        assert (data / "index.json").exists()
    else:
        assert len(tried) > 1


# Beginnings of commands on the pages that cannot run here.
NOT_RUN = (
    "python3 -m venv ",  # this environment replaces it
    "source ",
    "pip install ",  # needs an index; the wheel is installed
    "pip wheel ",
    "hf download ",  # needs the hub; test_tokenizers.py has a local server for it
    "find RAW -type f -print0 | xargs ",  # needs files archived by Lustre HSM
)
CHECKOUT = ("slurm/train_ddp.sh", "examples/train_llama.py")
MOUNTED = """import lustre.lfs
lustre.lfs.read_mounts_table = lambda: "10.0.0.1@tcp:/fakefs / lustre rw,flock 0 0\\n"
"""
STATE = """import torch
from loader import get_llama3_dataloader
loader = get_llama3_dataloader("DATA", batch_size=8, global_batch_size=64, seq_len=2048)
torch.save(loader.state_at(9000), "checkpoint.pt")
"""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page of docs/, and what its commands need to run one after the other."""

    name: str
    made: Mapping[str, str] = field(default_factory=dict)  # file -> text
    tokenizer: str = ""  # folder of the page's model
    first: str = ""  # a command that runs before those of the page
    between: Mapping[str, str] = field(default_factory=dict)  # command of the page -> command before it
    changed: Mapping[str, str] = field(default_factory=dict)  # text of the page -> replacement
    codes: Mapping[str, int] = field(default_factory=dict)  # command -> its exit code on the page, if not 0


PAGES = (
    Page(name="getting-started.md"),
    Page(name="inputs.md", made={"RAW/en/a.jsonl": '{"text": "a sentence"}\n' * 3000}, tokenizer="MODEL"),
    Page(
        name="seeing.md",
        made={"RAW/web/page_1.txt": ("a sentence, <html, lorem " * 24 + "\n") * 1400},
        tokenizer="M",
        first="shardprep plan --input_dir RAW --recursive --output_dir DATA --model_id M --num_shards 10; "
        f"shardprep run DATA; shardprep verify DATA; python -c '{STATE}'",
        between={"shardprep forecast web=WEB": "cp -rT DATA WEB; cp -rT DATA CODE"},
        changed={"--num_steps 100000": "--num_steps 100", "--num_steps 200000": "--num_steps 9100"},
        codes={"shardprep doctor": 1, "srun shardprep doctor": 1},
    ),
    Page(
        name="cluster.md",
        made={"RAW/a.txt": "a sentence\n" * 100}
        | {name: (ROOT / name).read_text(encoding="utf-8") for name in CHECKOUT},
        tokenizer="meta-llama/Meta-Llama-3-8B",
        between={
            "shardprep status DATA --watch": "shardprep run DATA; shardprep verify DATA",
            "cat >../example.py": "rm DATA/shard-00001.json",
        },
        changed={
            "--num_shards 1000": "--num_shards 2",
            "AutoExecutor(": 'AutoExecutor(cluster="local", ',
            "/local/": "local/",
        },
    ),
    Page(
        name="lustre.md",
        made={"DATA/jobs/a": "", "RAW/a.txt": "a\n", "site/sitecustomize.py": MOUNTED},
        tokenizer="MODEL",
    ),
)


def commands_of(page: Page) -> list[str]:
    """Return the commands in a page's blocks without a language, and its Python blocks as commands."""
    text = (ROOT / "docs" / page.name).read_text(encoding="utf-8")
    for old, new in page.changed.items():
        assert old in text
        text = text.replace(old, new)
    found = list[str]()
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language == "python":
            found.append(f"cat >../example.py <<'END'\n{block}END\npython ../example.py")
        elif not language:
            found += block.replace("\\\n", " ").splitlines()
    return [command for command in found if command and not command.startswith("#")]


def test_each_command_that_cannot_run_is_on_some_page() -> None:
    shown = [command for page in PAGES for command in commands_of(page)]
    assert [begin for begin in NOT_RUN if not any(each.startswith(begin) for each in shown)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_run_as_shown_in_an_empty_folder(desk: Desk, page: Page) -> None:
    desk.folder = desk.folder.with_name("desk")  # without white space, for Megatron
    desk.folder.mkdir()
    for name, text in page.made.items():
        (desk.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (desk.folder / name).write_text(text, encoding="utf-8")
    if page.tokenizer:
        shutil.copytree(desk.folder.parent / "MODEL", desk.folder / page.tokenizer)
    script = [page.first]
    for command in commands_of(page):
        if not command.startswith(NOT_RUN):
            script += [text for begin, text in page.between.items() if command.startswith(begin)]
            codes = [code for begin, code in page.codes.items() if command.startswith(begin)]
            script.append(f"{command} \\\n || (( $? == {codes[0]} ))" if codes else command)
    assert len(script) > 3
    environ = {"HOME": str(desk.folder), "USER": "user"}
    if page.name == "lustre.md":  # needs a new Python, which reads site/sitecustomize.py
        environ["PYTHONPATH"] = f"{desk.environ['PYTHONPATH']}:site"
        for name in ("python", "shardprep"):
            (desk.folder.parent / "commands" / name).unlink()
    run_child(["bash", "-euxc", "\n".join(script)], cwd=desk.folder, env=desk.environ | environ)


ENVIRON = environ_of_children(TOKENIZERS_PARALLELISM="false")


@pytest.fixture(scope="module")
def training_desk(model_dir: Path, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with MODEL (a Llama and tokenizer), RAW (0.3 M tokens), and three small data sets to mix."""
    folder = tmp_path_factory.mktemp("a desk")
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(model_dir, folder / "MODEL")
    config = LlamaConfig(
        vocab_size=900, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(config).save_pretrained(folder / "MODEL")
    texts = sorted(sample_dir.glob("*.txt"))
    (folder / "RAW").mkdir()
    for number in range(4):
        for text in texts:
            shutil.copy(text, folder / "RAW" / f"{number}_{text.name}")
    for number, name in enumerate(("web", "code", "books")):
        (folder / f"raw_{name}").mkdir()
        shutil.copy(texts[number], folder / f"raw_{name}")
        data_dir = folder / "sources" / name
        World(folder, tokenizer=folder / "MODEL", raw_dir=folder / f"raw_{name}", data_dir=data_dir).make()
    return folder


def test_each_example_of_training_runs_as_shown(training_desk: Path, warm: WarmPython) -> None:
    ended = run_child([warm.python, "-m", "tests.training_pages"], cwd=training_desk, env=ENVIRON)
    found = re.search(r"(\d+) examples ran, (\d+) calls of ours were compared", ended.stdout)
    assert found, ended.stdout
    assert int(found[1]) >= 16
    assert int(found[2]) >= 25


def test_the_command_that_plans_conversations_runs_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tokenizer(tmp_path / "MODEL", TAGGED)
    chats = [{"messages": chat} for chat in conversations(80)]
    World(tmp_path, raw_dir=tmp_path / "RAW").raw({"chats.jsonl": chats})
    page = (ROOT / "docs" / "conversations.md").read_text(encoding="utf-8")
    command, *_ = re.findall(r"^shardprep plan .*--record chat.*$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    call_main(*shlex.split(command)[1:]).ends(0)
    call_main("run", "DATA").ends(0)
    manifests = World(tmp_path, data_dir=tmp_path / "DATA").manifests()
    assert sum(manifest["counts"]["num_documents"] for manifest in manifests) == 80


def test_the_template_for_base_models_marks_the_answers_alone(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "MODEL")  # without a template
    turns = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": "An answer."}]
    world = World(tmp_path, raw_dir=tmp_path / "RAW", tokenizer=tmp_path / "MODEL")
    world.raw({"chats.jsonl": [{"messages": turns * 2}] * 9})
    template = ROOT / "examples" / "llama3_chat.jinja"
    world.make(record="chat", seq_len=512, chat_template_file=template)
    shown = call_main("peek", world.data_dir, "0:0:0").ends(0).out
    assert re.sub(r"⟦[^⟧]*⟧", "", "".join(re.findall("⟪(.*?)⟫", shown))) == "An answer." * 2


def test_the_example_of_ddp_trains_as_shown(training_desk: Path, warm: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    script = shutil.copy(ROOT / "examples" / "train_llama.py", tmp_path / "examples")
    shown = re.search(
        r"^ +python (examples/train_llama.py DATA CHECKPOINTS .*?)  ", Path(script).read_text(), re.MULTILINE
    )
    assert shown
    here = {"DATA": str(training_desk / "sources" / "web"), "1000": "3"}
    words = [here.get(word, word) for word in shown[1].split()]
    ended = run_child([warm.python, *words, "--log_every", "1"], cwd=tmp_path, env=ENVIRON)
    assert "step 3: loss " in ended.stdout
    assert [path.name for path in (tmp_path / "CHECKPOINTS").glob("*.pt")] == ["step-00000003.pt"]


def test_the_example_from_text_to_a_model_continues_after_its_checkpoint(
    warm: WarmPython, site: Path, tmp_path: Path
) -> None:
    small = ("--hidden_size", "8", "--num_layers", "1")
    script = str(ROOT / "examples" / "pretrain.py")
    # The script starts `shardprep` by sys.executable, which takes 2 s where transformers is not imported.
    begin = f"import sys; sys.executable, script = {str(warm.python)!r}, {script!r}"
    code = f"{begin}; sys.path.insert(0, {str(ROOT / 'examples')!r})"
    code += "; import runpy; runpy.run_path(script, run_name='__main__')"
    words = [str(warm.python), "-c", code, "OUT", *small]
    first = run_child([*words, "--num_steps", "10"], cwd=tmp_path, env=ENVIRON)
    second = run_child([*words, "--num_steps", "20"], cwd=tmp_path, env=ENVIRON)
    assert first.stdout.count("$ shardprep") == 7
    assert "continues after step 10" in second.stdout
    assert "$ shardprep" not in second.stdout
    lines = (tmp_path / "OUT" / "losses.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    assert [line["step"] for line in logged] == [10, 20]
    assert all(0 < loss < 9 for line in logged for loss in line["losses"].values())
    assert ElementTree.parse(tmp_path / "OUT" / "losses.svg").getroot().tag.endswith("svg")


def test_the_check_for_a_gpu_measures_on_a_cpu_what_it_can(warm: WarmPython, tmp_path: Path) -> None:
    data = World(tmp_path).raw({"a.txt": hostile_text(400)}).make(record="packed", seq_len=64).data_dir
    script = ROOT / "benchmarks" / "gpu_check.py"
    words = ["--tiny", "--data", str(data), "--seconds", "0.05", "--seq_len", "64"]
    printed = run_child([warm.python, script, *words], cwd=tmp_path, env=ENVIRON).stdout
    waits = re.findall(r"^\| (\d) \| [\d.]+ \| [\d.]+% \| [\d,]+ \|$", printed, re.MULTILINE)
    assert waits == ["0", "2", "4"]
    assert re.search(r"^\| sdpa \| yes \| [\d.]+ \| [\d.]+ \|$", printed, re.MULTILINE)
    assert printed.count("no GPU") == 3  # for two copies, and for flash attention
    steps = re.findall(r"^\| (\w+) \| (?:sdpa|eager) \| [\d.]+ \|$", printed, re.MULTILINE)
    assert steps == ["float32", "TF32", "bfloat16", "bfloat16"]
