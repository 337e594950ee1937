"""The commands that messages advise work as typed, from another folder, and the first one loses nothing."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader import BrokenShard, OtherRun, UsageError
from shardprep.__main__ import COMMANDS
from tests.checkout import PACKAGES, ROOT
from tests.world import World, call_main, open_loader, type_in

# A command in a message, up to a comment, another sentence or the end of the line.
COMMAND = re.compile(r"(?:mkdir -p \S+ && mv \S+ \S+ && )?shardprep (?:(?!  #|; |, first |\. ).)+")
LOSES = re.compile(r"--max_bad_fraction|\brm\b")
FUNCTION = 'def transform(record):\n    return record["words"]["en"]\n'
RECORDS = [{"words": {"en": f"the kettle of store {number}"}} for number in range(60)]


def advised(text: str) -> list[str]:
    """Return the commands in the messages of a command."""
    return [found[0].strip() for line in text.splitlines() for found in COMMAND.finditer(line)]


def first_advised(text: str) -> str:
    """Return what stands behind ``next: ``, without its comment."""
    (line,) = [line for line in text.splitlines() if line.startswith("next: ")]
    return line.removeprefix("next: ").partition("  #")[0]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A data set with a function, of three shards. The function's file is gone."""
    folder = tmp_path_factory.mktemp("advice") / "a b"
    world = World(folder).raw({"a.jsonl": RECORDS})
    function = folder / "my function.py"
    function.write_text(FUNCTION)
    world.plan(num_shards=3, transform=function).run(transform=function)
    function.unlink()  # the copy in the data set is left
    return world.verify()


@pytest.fixture
def made(original: World, tmp_path: Path) -> World:
    """A copy of the data set."""
    return original.copy(tmp_path / "c d")


def load_all(world: World) -> str:
    try:
        for _ in open_loader(world.data_dir):
            pass
    except Exception as error:
        return str(error)
    return ""


def command(*words: str) -> Callable[[World], str]:
    return lambda world: call_main(words[0], world.data_dir, *words[1:]).err


def of_status(world: World) -> str:
    return call_main("status", world.data_dir, environ={"PATH": "/nowhere"}).out


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[World], object]] = {
    "no tar": lambda world: (world.data_dir / "shard-00001.tar").unlink(),
    "no idx": lambda world: (world.data_dir / "shard-00001.idx").unlink(),
    "no manifest": lambda world: (world.data_dir / "shard-00001.json").unlink(),
    "short tar": lambda world: (world.data_dir / "shard-00001.tar").write_bytes(bytes(512)),
    "altered tar": lambda world: flipped(world.data_dir / "shard-00001.tar"),
    "altered idx": lambda world: flipped(world.data_dir / "shard-00001.idx"),
}
VIEWS: dict[str, Callable[[World], str]] = {
    "verify": command("verify"),
    "peek": command("peek", "1:0"),
    "export": lambda world: (
        call_main("export", world.data_dir, "--to", "nanogpt", "--output_dir", f"{world.data_dir}_export").err
    ),
    "loader": load_all,
}


@pytest.mark.processes  # ``run``
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_command_that_an_error_about_a_shard_advises_mends_it_from_another_folder(
    original: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """The advice has --transform, from the data set's own copy."""
    monkeypatch.chdir("/")
    before = original.contents()
    mended = []
    for name, view in VIEWS.items():
        world = original.copy(tmp_path / name)
        DAMAGES[damage](world)
        for advice in advised(view(world)):
            assert not LOSES.search(advice), f"{name}: {advice}"
            assert "--transform" in advice, f"{name}: {advice}"
            type_in(advice).ends(0)
            mended.append(name)
        if name in mended:
            assert world.contents() == before, name
    assert "verify" in mended


def test_advice_repeats_where_the_input_and_the_function_are_now(
    made: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planned folder is elsewhere, and so is the function that was planned."""
    shutil.copytree(made.raw_dir, tmp_path / "moved raw")
    copied = tmp_path / "copied function.py"
    copied.write_text(FUNCTION)
    flipped(made.data_dir / "shard-00002.tar")
    monkeypatch.chdir(tmp_path)
    given = {"input_dir": "moved raw", "transform": "copied function.py"}
    ended = made.main("verify", made.data_dir, deep=1, **given).ends(65)
    (advice,) = advised(ended.err)
    monkeypatch.chdir("/")
    assert str(tmp_path / "moved raw") in advice
    assert str(copied) in advice
    type_in(advice).ends(0)
    made.verify()


def test_advice_asks_for_the_input_if_it_is_no_longer_where_it_was_planned(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "a line\n" * 9}).plan(num_shards=2).run(0)
    moved = world.raw_dir.rename(tmp_path / "moved raw")
    advice = first_advised(of_status(world))
    assert "--input_dir RAW" in advice
    world.run(1, input_dir=moved)
    assert "--input_dir" not in of_status(world), "nothing is to be made"


@pytest.mark.processes
def test_what_run_and_status_advise_for_bad_input_has_the_function_and_shows_the_loss_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path).raw({"a.jsonl": [*RECORDS, {"words": None}]})
    (tmp_path / "t.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)
    words = world.words_of_plan(num_shards=1, transform="t.py", max_bad_fraction=0.01)
    planned = call_main("plan", *words, environ={"PATH": "/nowhere"}).ends(0)  # without sbatch
    ended = world.main("run", world.data_dir, transform="t.py", num_proc=1).ends(65)
    shown = of_status(world)
    monkeypatch.chdir("/")
    type_in(first_advised(planned.out)).ends(65)
    (again,) = [each for each in advised(ended.err) if " --shards 0" in each]
    assert str(tmp_path / "t.py") in again
    type_in(again).ends(65)  # the same input fails in the same way, and not for a missing flag
    first = first_advised(shown)
    assert not LOSES.search(first)
    word, *_, path = shlex.split(first)
    assert word == "head"
    assert "transform_error" in Path(path).read_text()
    # What accepts the loss stands behind it, as a comment.
    (accept,) = [each for each in advised(shown) if LOSES.search(each)]
    type_in(accept).ends(0)
    world.verify()


@pytest.mark.processes
def test_status_advises_to_make_shards_with_the_flags_that_the_plan_needs(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tar", "idx", "json"):
        (made.data_dir / f"shard-00000.{name}").unlink()
    monkeypatch.chdir("/")
    type_in(first_advised(of_status(made))).ends(0)
    assert "3 of 3 shards are done" in of_status(made)


def test_a_copy_of_the_function_that_others_could_change_is_not_advised(made: World) -> None:
    (made.data_dir / "shard-00001.tar").unlink()
    (made.data_dir / "transform").chmod(0o777)
    (advice,) = advised(made.main("verify", made.data_dir).ends(66).err)
    assert shlex.split(advice)[-2:] == ["--transform", "FILE"]


def test_verify_of_a_data_set_without_shards_prints_one_line(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "a line\n" * 9}).plan(num_shards=2)
    ended = world.main("verify", world.data_dir).ends(66)
    assert len(ended.err.splitlines()) == 1
    assert advised(ended.err) == [f"shardprep run {world.data_dir}"]


def test_a_failed_attempt_to_make_a_shard_again_keeps_the_old_files(made: World) -> None:
    """Without the input, ``--again`` fails, and the shard stays as it was."""
    before = made.contents()
    function = made.data_dir / "transform/my function.py"
    empty = made.data_dir.parent
    made.try_shard(1, transform=function, input_dir=empty, again=True).ends(66)
    assert made.verify().contents() == before
    made.main("run", made.data_dir, again=True, transform=function).ends(2, "--shards")


DOOR = ROOT / "shardprep/format/commands.py"
_SPELLED = re.compile(rf"(^|[^\w'`])(shardprep (--shard_id|{'|'.join(COMMANDS)})|rm) ?$")


def test_no_other_place_spells_a_command_on_a_data_set() -> None:
    """A command with a value put into it, as an f-string has, is built by one module."""
    num_files = 0
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path == DOOR:
                continue
            num_files += 1
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if not isinstance(node, ast.JoinedStr):
                    continue
                for text, value in zip(node.values, node.values[1:], strict=False):
                    is_text = isinstance(text, ast.Constant) and isinstance(value, ast.FormattedValue)
                    spelled = is_text and _SPELLED.search(str(ast.literal_eval(text)))
                    assert not spelled, f"{path}:{node.lineno}: {ast.unparse(node)}"
    assert num_files > 60
    assert _SPELLED.search("error; run: shardprep run ")


@pytest.mark.processes  # plan tries a function in another process
def test_a_plan_that_differs_is_described_without_hashes_and_in_the_words_of_flags(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.jsonl": RECORDS})
    (tmp_path / "t.py").write_text(FUNCTION)
    (tmp_path / "u.py").write_text(FUNCTION + "\n")
    world.plan(num_shards=2, transform=tmp_path / "t.py", id_field="words")
    ended = world.try_plan(num_shards=3, transform=tmp_path / "u.py").ends(78)
    assert "--id_field words (you asked for no --id_field)" in ended.err
    assert "the function of --transform differs" in ended.err
    assert not re.search(r"[0-9a-f]{12}", ended.err.replace(str(tmp_path), "")), ended.err


def test_empty_shards_are_announced_unless_the_files_are_empty(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "a line\n" * 5, "b.txt": ""})
    assert "95 of 100 shards will be empty" in world.try_plan(num_shards=100, dry_run=True).ends(0).out
    assert "will be empty" not in world.try_plan(dry_run=True).ends(0).out


def test_a_loader_names_the_dict_that_holds_its_state_and_refuses_a_step_that_is_no_number(
    original: World,
) -> None:
    with open_loader(original.data_dir) as loader:
        state = loader.state_dict()
        with pytest.raises(BrokenShard) as nested:
            loader.load_state_dict({"model": {}, "data": state})
        assert nested.value.remedy == "loader.load_state_dict(checkpoint['data'])"
        for step in ("5", 3.5, None, True):
            wrong: Any = step
            with pytest.raises(UsageError) as refused:
                loader.state_at(wrong)
            assert refused.value.found == f"step={step!r}"
    with open_loader(original.data_dir, 8) as larger, pytest.raises(OtherRun) as raised:
        larger.load_state_dict(state)
    assert "batch_size=4" in str(raised.value.advice)


def test_a_command_without_the_function_of_its_plan_names_the_file(original: World) -> None:
    """What it advises to add is the copy in the data set."""
    shown = call_main("verify", original.data_dir, "--deep", "1").ends(2).err
    flags = shlex.split(shown.rpartition("its file: ")[2])
    call_main("verify", original.data_dir, "--deep", "1", *flags).ends(0)


def test_submit_and_retry_are_refused_and_advised_with_the_function_of_the_plan(made: World) -> None:
    (made.data_dir / "shard-00001.tar").unlink()
    function = made.data_dir / "transform/my function.py"
    ended = made.main("submit", made.data_dir).ends(2)
    (advice,) = advised(ended.err)
    assert shlex.split(advice)[1:4] == ["submit", str(made.data_dir), "--worker_args"]
    assert shlex.split(shlex.split(advice)[4]) == ["--transform", str(function)]
    shown = type_in(advice).err  # no cluster answers here, so it gets as far as asking
    assert "a function for documents" not in shown
