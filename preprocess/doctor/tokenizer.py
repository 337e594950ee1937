"""The tokenizer, the engine and the estimate, found as ``plan --dry_run`` finds them; nothing is written."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from preprocess.cost_estimate import CostEstimate, measure, scratch_folder
from preprocess.doctor.findings import Finding, good, of_error, warning
from preprocess.engines import FEW_BYTES, PROBE
from preprocess.options import PrepConfig, WorkerSettings
from preprocess.plan import Plan, read_plan
from preprocess.planning import Sharding, make_plan
from preprocess.worker import load_worker
from shardprep.console import short_bytes, short_number
from shardprep.errors import ShardprepError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """What a plan would be, or is; ``plan`` and ``cost`` are None where there is none."""

    findings: list[Finding]
    plan: Plan | None = None
    cost: CostEstimate | None = None


def check_model(config: PrepConfig) -> list[Finding]:
    """The tokenizer and its engine, on texts that tell engines apart."""
    with scratch_folder() as folder:
        raw = folder / "raw"
        raw.mkdir()
        (raw / "a.txt").write_text(
            "\n".join(text.replace("\n", " ").replace("\r", " ") for text in PROBE), encoding="utf-8"
        )
        plain = PrepConfig(
            input_dir=raw, output_dir=folder / "data", model_id=config.model_id, engine="fastokens"
        )
        return check_plan(plain, Sharding(), of_probe=True).findings


def check_plan(config: PrepConfig, sharding: Sharding, *, of_probe: bool = False) -> Planned:
    """Plan without writing anything: the inputs, the tokenizer, the engine on this text, the estimate."""
    said: list[str] = []
    try:
        plan, cost = make_plan(config, sharding, dry_run=True, say=said.append)
    except ShardprepError as error:
        topic = "tokenizer" if "tokenizer" in str(error).split(";")[0] else "plan"
        return Planned(findings=[of_error(topic, error)])
    findings = [_tokenizer(plan), _engine(plan, said, "the probe" if of_probe else "this text")]
    if of_probe:
        return Planned(findings=findings)
    sizes = plan.shard_bytes()
    shards = f"{plan.num_shards} shards of up to {cost.longest_shard_s:.0f} s on one core"
    about = f"about {short_number(cost.num_tokens)} tokens, {cost.core_hours:.2g} core hours"
    text = f"{len(plan.inputs)} files, {short_bytes(sum(sizes))}; {about}, {shards}"
    return Planned(findings=[good("input", text), *findings], plan=plan, cost=cost)


def check_folder(folder: Path, num_cpus: int) -> Planned:
    """A folder that is planned already: its tokenizer's files, its engine, its input, the estimate."""
    said: list[str] = []
    try:
        plan = read_plan(folder)
        if plan is None:
            return Planned(findings=[])
        worker = load_worker(plan, folder, WorkerSettings(), num_cpus=num_cpus, warn=said.append)
        cost = measure(plan, worker.engine)
    except ShardprepError as error:
        return Planned(findings=[of_error("plan", error)])
    size = short_bytes(sum(plan.shard_bytes()))
    findings = [
        good("plan", f"plan {plan.plan_id[:12]} of {plan.num_shards} shards, {size} of input"),
        _tokenizer(plan),
        _engine(plan, said, "the plan's probe", worker.engine.name),
    ]
    return Planned(findings=findings, plan=plan, cost=cost)


def _tokenizer(plan: Plan) -> Finding:
    spec = plan.tokenizer
    text = (
        f"{spec.model_id} is a fast one, {spec.vocab_size} ids; BOS {spec.bos_token_id}, "
        f"EOS {spec.eos_token_id}, PAD {spec.pad_token_id}"
    )
    if spec.pad_token_id is not None and spec.pad_token_id == spec.eos_token_id:
        todo = "give it a pad token of its own; this project's loader masks by length, others lose EOS labels"
        return warning("tokenizer", f"{text}: PAD is EOS", todo)
    if not plan.can_be_cut:
        text += "; documents of megabytes are encoded whole, in memory"
    return good("tokenizer", text)


def _engine(plan: Plan, said: list[str], what: str, name: str | None = None) -> Finding:
    if (name or ("fastokens" if plan.fast_engine_is_equal else "tokenizers")) == "fastokens":
        return good("engine", f"fastokens gives the ids of tokenizers, the reference, on {what}")
    reason = next((line for line in said if "fastokens" in line), None)
    if reason is None and (num_bytes := sum(plan.shard_bytes())) < FEW_BYTES:
        return good("engine", f"tokenizers, which for {short_bytes(num_bytes)} is sooner done than fastokens")
    todo = "nothing is wrong with the ids; plan more or longer tasks, or take a tokenizer of a known kind"
    why = (reason or "fastokens is not used").partition("; tokenizers encodes")[0]
    return warning("engine", f"tokenizers encodes, several times slower: {why}", todo)
