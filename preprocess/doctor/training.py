"""What training will find on this machine: torch, CUDA, NCCL, bf16 and SDPA's back ends.

A process of its own asks torch: a broken installation ends that one, and not the doctor.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from typing import Any

from preprocess.doctor.findings import Finding, bad, good, warning
from shardprep.errors import UsageError

_LIMIT_S = 180.0
_QUESTIONS = """
import json, sys
import torch
cuda, gpus = torch.cuda, []
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}
found["threads"] = torch.get_num_threads()
if cuda.is_available():
    found["nccl"] = ".".join(map(str, cuda.nccl.version()))
    found["bf16"] = cuda.is_bf16_supported()
    for number in range(cuda.device_count()):
        gpu = cuda.get_device_properties(number)
        gpus.append([gpu.name, gpu.total_memory, f"{gpu.major}.{gpu.minor}"])
    from torch.nn.attention import SDPBackend, sdpa_kernel
    dtype = torch.bfloat16 if found["bf16"] else torch.float16
    query = torch.randn(1, 2, 64, 64, device="cuda", dtype=dtype)
    found["sdpa"] = {}
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
            cuda.synchronize()
            found["sdpa"][name] = ""
        except Exception as error:
            found["sdpa"][name] = (str(error).splitlines() or [type(error).__name__])[0]
print("shardprep " + json.dumps(found))
"""


def training_findings() -> list[Finding]:
    """Nothing where torch is not installed: tasks need none."""
    if importlib.util.find_spec("torch") is None:
        return []
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _QUESTIONS],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = f"torch was not loaded, or a GPU did not answer, within {_LIMIT_S:.0f} s"
        return [
            bad("torch", text, "look at nvidia-smi, and at the file system of the environment", UsageError)
        ]
    answer = next((line for line in done.stdout.splitlines() if line.startswith("shardprep ")), None)
    if done.returncode or answer is None:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [
            bad("torch", f"torch cannot be used: {why}", "install torch anew for this machine", UsageError)
        ]
    return torch_findings(
        json.loads(answer.removeprefix("shardprep ")), has_driver=bool(shutil.which("nvidia-smi"))
    )


def torch_findings(found: dict[str, Any], *, has_driver: bool) -> list[Finding]:
    """What torch's answers mean for training."""
    built = f"for CUDA {found['cuda']}" if found["cuda"] else "for CPUs"
    text = f"torch {found['torch']} {built}, {found['threads']} threads"
    if not found["gpus"]:
        if has_driver:
            todo = "is a GPU given to this job (--gpus)? Else install a torch of the driver's CUDA"
            return [warning("torch", f"{text}; nvidia-smi is here, but torch sees no GPU", todo)]
        return [good("torch", f"{text}; no GPU here: fine for tasks")]
    kinds = {f"{name} ({memory / 2**30:.0f} GiB, {level})" for name, memory, level in found["gpus"]}
    findings = [
        good("torch", f"{text}; {len(found['gpus'])} GPUs: {', '.join(sorted(kinds))}; NCCL {found['nccl']}")
    ]
    if found["bf16"]:
        findings.append(good("torch", "bf16 works"))
    else:
        findings.append(
            warning("torch", "no bf16 on this GPU", "train in fp16 with a GradScaler, or in fp32")
        )
    works = [name for name, error in found["sdpa"].items() if not error]
    fails = [f"{name} ({error})" for name, error in found["sdpa"].items() if error]
    text = f"SDPA: {', '.join(works) or 'nothing'} works" + (f"; not: {', '.join(fails)}" if fails else "")
    if set(works) <= {"MATH"}:
        todo = "attention will take memory of the square of the length: another torch, or another GPU"
        findings.append(warning("torch", text, todo))
    else:
        findings.append(good("torch", text))
    return findings
