"""Measurements on GPUs: the time of a step by cause, waits, memory, and speed beside peers.

The benchmarks are those of benchmarks/; each runs in the process group of this part.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from tests.gpu.tables import Line, Where


def profile(where: Where) -> None:
    """Profile two stages with four microbatches."""
    import torch

    import dtensor as dt
    from benchmarks.gpu_step import cases

    case = cases(tiny=bool(where.simulated))["gpt"]
    torch.manual_seed(0)
    module = case.model()
    half = len(module.blocks) // 2  # type: ignore[arg-type]
    blocks = [f"blocks.{number}.*" for number in range(2 * half)]
    stages = {"pp": [["embed*", "positions*", *blocks[:half]], [*blocks[half:], "norm*", "head*"]]}
    mesh = dt.Mesh(pp=2)
    model = dt.parallelize(module, mesh, {}, stages=stages)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = dt.OneFOneB(microbatches=2 if where.simulated else 4)
    step = dt.train_step(model, case.loss, optimizer, schedule=schedule)
    per_actor = 1 if where.num > 1 else 2
    with (
        where.gpus(2),
        dt.launch(mesh, "ray", device="cuda", ranks_per_actor=per_actor, bring_home=False),
    ):
        with where.line("the loss") as line:
            first, last = (float(step(*case.batch())) for _ in range(2))
            assert last < first, (first, last)
            line.found = f"{first:.4f}, then {last:.4f}"
        found = step.profile(1 if where.simulated else 5, *case.batch())
    if where.simulated:
        where.leave_out("seconds", "not simulated; the profile ran")
        assert len(found.ranks) == 2
        return
    for own in found.ranks:
        parts = {"kernels": own.kernels, "waiting": own.waiting, "overhead": own.overhead}
        spent: dict[str, float] = {}
        for what, by_name in parts.items():
            spent[what] = sum(each.seconds for each in by_name.values())
        spent["idle"] = own.idle.seconds
        text = ", ".join(f"{what} {seconds * 1e3:.1f}" for what, seconds in spent.items())
        where.say(Line("ok", f"rank {own.rank}, ms of {found.seconds * 1e3:.1f}", text))
    where.say(f"```text\n{found}\n```")


def waits(where: Where) -> None:
    """Count the host waits of a warm step. Ranks are threads of this process, because torch
    reports the waits of its own process; a simulated GPU reports them itself."""
    import torch

    import dtensor as dt
    from benchmarks.gpu_step import waits_of
    from tests.training import Run, batches

    one = batches(1)[0]
    for placed in ("single", "tp2", "dp2", "pp2"):
        with where.line(f"a step, {placed}") as line, where.gpus(1) as gpus:
            run = Run.of(placed)
            counted: Callable[[Callable[[], object]], Mapping[str, int]] = waits_of
            if gpus is not None:
                counted = lambda call, gpus=gpus: _simulated(call, gpus)  # noqa: E731
            with dt.launch(run.mesh, device="cuda", bring_home=False):
                run.losses([one] * 2)
                if not where.simulated:
                    torch.cuda.synchronize()
                found = counted(lambda run=run: run.losses([one]))
            assert found, "none: not even to read the loss"
            line.found = f"{sum(found.values())} waits"
            ordered = sorted(found.items(), key=lambda each: (-each[1], each[0]))
            line.note = "\n".join(f"{times} x {what}" for what, times in ordered)


def _simulated(call: Callable[[], object], gpus: Any) -> Mapping[str, int]:
    before = gpus.report().host_waits
    call()
    after: Counter[str] = Counter()
    for wait, times in gpus.report().host_waits.items():
        after[str(wait)] += times - before.get(wait, 0)
    return +after


def memory(where: Where) -> None:
    """Measure one rank: torch's peak and reserved memory, and the memory missing on the GPU."""
    import torch

    import dtensor as dt
    from benchmarks.gpu_step import cases

    for name in ("gpt",) if where.simulated else ("gpt", "small"):
        case = cases(tiny=bool(where.simulated))[name]
        with where.line(case.label) as line, where.gpus(1):
            if not where.simulated:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.mem_get_info()[0]
            mesh = dt.Mesh()
            with dt.launch(mesh, device="cuda", bring_home=False):
                model = dt.parallelize(case.model(), mesh, {})
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
                step = dt.train_step(model, case.loss, optimizer)
                batch = case.batch()
                planned = step.plan(*batch).memory[0].total
                for _ in range(3):
                    float(step(*batch))
                peak = torch.cuda.max_memory_allocated()
                if not where.simulated:
                    reserved = torch.cuda.max_memory_reserved()
                    gone = before - torch.cuda.mem_get_info()[0]
                    line.note = f"reserved {_mib(reserved)}, the GPU has {_mib(gone)} less"
                else:
                    line.note = "reserved: not simulated"
            line.found = f"at most {_mib(peak)}, planned {_mib(planned)}: {peak / planned:.2f}"
            assert peak <= 2 * planned, line.found


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


# -- beside peers ----------------------------------------------------------------------------------


def speed_kernels(where: Where) -> None:
    if where.simulated:
        where.leave_out(
            "kernels beside eager torch, torch.compile and Liger", "not simulated: speed"
        )
        return
    if find_spec("liger_kernel") is None:
        where.leave_out("Liger", "not installed")
    if find_spec("triton") is None:
        where.leave_out("kernels", "not installed: triton")
        return
    benchmark(where, "benchmarks.kernels", "--rounds", "20", "--write")


def attention(where: Where) -> None:
    if where.simulated:
        where.leave_out("attention by cuDNN, flash and memory-efficient kernels", "speed")
        return
    benchmark(where, "benchmarks.attention", "--rounds", "20", "--write")


def speed_llama(where: Where) -> None:
    if find_spec("transformers") is None:
        where.leave_out("Llama of transformers", "not installed")
    elif where.simulated:
        where.leave_out("Llama of transformers", "not simulated: speed")
    else:
        _speed_of(where, "llama")


def speed_gpt(where: Where) -> None:
    _speed_of(where, "gpt")


def speed_small(where: Where) -> None:
    _speed_of(where, "small")


def _speed_of(where: Where, case: str) -> None:
    """Time a step of one case of benchmarks/gpu_step.py beside its peers."""
    if where.simulated:
        where.leave_out("seconds, torch.compile", "not simulated; the line below is of a CPU")
        given = ("--device", "cpu", "--tiny", "--no-compile", "--rounds", "1", "--cases", case)
        benchmark(where, "benchmarks.gpu_step", *given, shown=False)
        return
    given = () if find_spec("triton") else ("--no-compile",)
    if given:
        where.leave_out("sides that compile", "not installed: triton")
    benchmark(where, "benchmarks.gpu_step", "--cases", case, "--rounds", "15", "--write", *given)


def speed_all_reduce(where: Where) -> None:
    if where.simulated:
        where.leave_out("an all_reduce beside torch.distributed", "not simulated: speed")
    elif where.num < 2:
        where.leave_out("an all_reduce", "needs two GPUs")
    else:
        benchmark(where, "benchmarks.nccl", "--write")


def speed_block(where: Where) -> None:
    if where.simulated:
        where.leave_out("seconds", "not simulated; the line below is of two processes on a CPU")
        given = ("--widths", "64", "--rounds", "2", "--ranks", "2")
        benchmark(where, "benchmarks.transformer_block", *given, shown=False)
        return
    if where.num < 2:
        where.leave_out("two ranks", "needs two GPUs")
        return
    given = ("--device", "cuda", "--ranks", "2", "--rounds", "20", "--zero3", "--write")
    benchmark(where, "benchmarks.transformer_block", *given)


def benchmark(where: Where, module: str, *given: str, shown: bool = True) -> None:
    """Run a benchmark. ``shown``: titles of its tables to show below the table of this part."""
    command: Sequence[str] = [sys.executable, "-m", module, *given]
    texts: list[str] = []

    def said(text: str) -> None:
        texts.append(text)
        if shown and not text.startswith("# "):
            where.say(text)

    began = time.monotonic()
    status = where.command(module, command, said)
    if status == 0:
        rows = sum(text.startswith("| ") for text in texts)
        seconds = f"{time.monotonic() - began:.0f} s"
        where.say(Line("ok" if rows else "wrong", module, f"{rows} rows", seconds))
