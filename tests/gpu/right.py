"""Correctness checks on GPUs: numbers, waits, messages between GPUs, failures.

Most checks are defined in other tests; this file selects and reports them. With fewer GPUs than
ranks, all ranks of a mesh are in one actor.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.gpu.tables import Line, Where

ON_A_GPU = 1e-4
"""Of float32: numbers beside a CPU's. Of AdamW's steps ten times that."""


# -- the machine -----------------------------------------------------------------------------------


def doctor(where: Where) -> None:
    from dtensor.commands.doctor_gpu import on_gpus

    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "")
    if compiler:
        where.say(Line("ok", "C compiler", compiler, "Triton's launchers need one"))
    else:
        where.say(Line("wrong", "C compiler", "none", "Triton's launchers need one"))
    for name, tool in (("nvcc", "nvcc"), ("compute-sanitizer", sanitizer())):
        found = tool and shutil.which(tool)
        where.say(Line("ok", name, found) if found else Line("left out", name, "not installed"))
    if where.simulated:
        where.leave_out("topology", "not simulated")
    else:
        show = ["nvidia-smi", "topo", "-m"]
        if shutil.which(show[0]):
            texts: list[str] = []
            where.command("topology", show, texts.append)
            where.say("\n".join(["```", *texts, "```"]))
        else:
            where.leave_out("topology", "nvidia-smi is not installed")
    with where.gpus(kernels=True):
        for check in on_gpus():
            state = "left out" if check.state == "warning" else check.state
            where.say(Line(state, check.name, check.found, check.note))


def sanitizer() -> str:
    """Return the path of compute-sanitizer, also if CUDA's folders are not on PATH; "" if it is
    missing."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    wheels = glob(f"{sysconfig.get_paths()['purelib']}/nvidia/**/compute-sanitizer", recursive=True)
    files = [f"{home}/bin/compute-sanitizer", *glob("/usr/local/cuda*/bin/compute-sanitizer")]
    there = [each for each in (*files, *wheels) if Path(each).is_file()]
    return shutil.which("compute-sanitizer") or next(iter(there), "")


# -- kernels ---------------------------------------------------------------------------------------


def sweep(where: Where, *given: str) -> list[str]:
    if where.simulated:
        given = ("--quick", "--simulated", *given)
    return [sys.executable, "-W", "ignore", "-m", "tests.kernels.sweep", "--device=cuda", *given]


def kernels(where: Where) -> None:
    cache = where.folder / "triton"
    shutil.rmtree(cache, ignore_errors=True)
    for times in (
        ("compiled anew",) if where.simulated else ("compiled anew", "from Triton's cache")
    ):

        def said(text: str, times: str = times) -> None:
            name, _, found = text.partition(": ")
            if text.startswith("FAILED"):
                where.say(Line("wrong", times, text))
            elif found.startswith("cases "):
                where.say(Line("ok", name, found, times))

        where.command(times, sweep(where), said, TRITON_CACHE_DIR=str(cache))
    if where.simulated:
        where.leave_out("from Triton's cache", "not simulated: its interpreter compiles nothing")


def memcheck(where: Where) -> None:
    if where.simulated:
        where.leave_out("memcheck", "not simulated")
        return
    tool = sanitizer()
    if not tool:
        where.leave_out("memcheck", "compute-sanitizer is not installed")
        return

    def said(text: str) -> None:
        if "ERROR SUMMARY" in text:
            clean = text.rstrip().endswith(" 0 errors")
            where.say(Line("ok" if clean else "wrong", "memcheck", text.strip("= ")))
        elif ": cases " in text:
            name, _, found = text.partition(": ")
            where.say(Line("ok", name, found))

    # a separate allocation for each tensor, so that an overrun does not end inside another tensor
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", *sweep(where, "--quick")]
    where.command("memcheck", command, said, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


# -- ranks on GPUs ---------------------------------------------------------------------------------


def in_process(where: Where) -> None:
    from tests.gpu import selected

    # the part "kernels" checks its numbers
    but = [
        "--deselect",
        "tests/kernels/test_kernels.py::test_triton_kernels_match_reference_on_gpu",
    ]
    few = ["-k", "(tp2 and not pp2) or test_compile or lent"] if where.simulated else []
    selected.run(where, "gpu and not ray", selected.marked(), *but, *few)


COMPILED = {
    "generated": {"local": "generated"},
    "compiled": {"local": "inductor"},
    "graphs": {"local": "inductor", "graphs": True},
}
"""Options of launches: how local code runs."""
FIRST_LOSSES = {"small": 1e-3, "gpt": 2e-2}
"""Cases of benchmarks/gpu_step.py, in float32 and in bfloat16, with the relative tolerance of their
losses."""


def compiled(where: Where) -> None:
    """Run tests marked `gpu`, and compare the losses of 50 steps with eager torch's, for each kind
    of local code."""
    import dtensor as dt
    from benchmarks.gpu_step import cases, ours, plain
    from tests.gpu import selected

    steps = 2 if where.simulated else 50
    device = "cpu" if where.simulated else "cuda"
    wanted: dict[str, list[float]] = {}
    for how, options in COMPILED.items():
        for name, tolerance in FIRST_LOSSES.items():
            case = cases(tiny=True)[name]
            with where.line(f"{how}: losses of {case.label}") as line, where.gpus(1):
                if name not in wanted:
                    wanted[name] = plain(case, device, None)(steps)
                mesh = dt.Mesh()
                with dt.launch(mesh, device="cuda", bring_home=False, **options):
                    losses = ours(case, mesh)(steps)
                off = max(abs(a - b) / b for a, b in zip(losses, wanted[name], strict=True))
                assert off <= tolerance, f"off by {off:.1e} of eager torch's"
                line.found = f"{steps} steps, off by at most {off:.1e} of eager torch's"
        few = "test_compile" if where.simulated else "train or test_compile or generat"
        with changed_launches(lambda _, given, new=options: given.update(new), on_ray=False):
            selected.run(where, "gpu and not ray", selected.marked(), "-k", few)


def nccl(where: Where) -> None:
    from tests.gpu import selected

    if where.num < 2:
        where.leave_out("NCCL", "needs two GPUs")
        return
    logs = where.folder / "nccl"
    logs.mkdir(exist_ok=True)
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{logs}/%h.%p.log"}
    selected.run(where, "gpu", ["tests/daft/test_nccl_protocol.py"])
    if where.simulated:
        where.leave_out("NCCL's log", "not simulated")
        return
    texts = [file.read_text(errors="replace") for file in sorted(logs.iterdir())]
    ways = sorted({way for text in texts for way in re.findall(r" via ([\w/]+)", text)})
    warned = sum(text.count("NCCL WARN") for text in texts)
    with where.line("NCCL's log") as line:
        assert texts, "no actor wrote one"
        line.found = f"{len(texts)} actors, by {', '.join(ways) or 'no way'}; {warned} warnings"
        line.note = str(logs)


def on_ray(where: Where) -> None:
    from tests.gpu import selected

    few = ["-k", "test_compile or tp2-"] if where.simulated else []
    but = ["--deselect", "tests/daft/test_nccl_protocol.py"]
    selected.run(where, "gpu and ray", selected.marked(), *but, *few)
    few_cases = ("train tp2", "zero 3", "checkpoint")
    ours = ("schedule", "kernels", "in this process")
    matrix(where, lambda name: name in few_cases if where.simulated else not name.startswith(ours))


def schedules(where: Where) -> None:
    """Run the schedules with an empty Triton cache and without earlier connections, because the
    first step of a schedule may hang."""
    os.environ["TRITON_CACHE_DIR"] = str(where.folder / "triton")
    shutil.rmtree(where.folder / "triton", ignore_errors=True)
    end = "p=2" if where.simulated else ("p=2", "p=4")
    matrix(where, lambda name: name.startswith("schedule") and name.endswith(end))


def matrix(where: Where, wanted: Callable[[str], bool]) -> None:
    """Run cases of tests/testing/gpus twice each, on GPUs and on the CPU."""
    from tests.testing.gpus.matrix import cases, check, difference, without_kernels

    for case in cases():
        if not wanted(case.name):
            continue
        began = time.monotonic()
        with where.line(case.name) as line:
            if where.simulated:
                with without_kernels():
                    seen = check(case, [0])
                assert not seen.races and not seen.early_frees, f"{seen.races} races"
                off = seen.most
            else:
                with shared(where.num):
                    found = case.body("cuda")
                off = difference(found, case.body("cpu"))
                limit = max(ON_A_GPU, 10 * case.tolerance)
                assert off <= limit, f"off by {off:.1e}, above {limit:.0e}"
            line.found, line.note = (
                f"off by {off:.1e} of the CPU's",
                f"{time.monotonic() - began:.1f} s",
            )


@contextmanager
def shared(num: int) -> Iterator[None]:
    """Make launches on Ray share GPUs inside the block if they have more ranks than GPUs, and
    allow a call 120 s."""

    def changed(meshes: Sequence[Any], options: dict[str, Any]) -> None:
        size = sum(mesh.size for mesh in meshes)
        if size > num * (options.get("ranks_per_actor") or 1):
            options["ranks_per_actor"] = size
        options.setdefault("call_deadline_s", 120.0)

    with changed_launches(changed, on_ray=True):
        yield


@contextmanager
def changed_launches(
    change: Callable[[Sequence[Any], dict[str, Any]], None], *, on_ray: bool
) -> Iterator[None]:
    """Change the options of launches on CUDA inside the block. ``on_ray``: of those on Ray alone.
    ``change`` takes the meshes of a launch, and its options."""
    import dtensor as dt

    launch = dt.launch

    def launched(*given: Any, **options: Any) -> Any:
        ray = "ray" in (*given, options.get("backend"))
        if options.get("device") == "cuda" and (ray or not on_ray):
            change([each for each in given if isinstance(each, dt.Mesh)], options)
        return launch(*given, **options)

    with patch.object(dt, "launch", launched):
        yield


# -- failures and drift ----------------------------------------------------------------------------


def killed(where: Where) -> None:
    """Kill an actor on Ray, with one actor per rank or one for all. A simulated GPU's actor is a
    thread, so ranks are then on the CPU."""
    import torch

    import dtensor as dt
    from dtensor.daft import ActorLost
    from dtensor.daft.ray.cluster import RayCluster
    from tests.training import Run, batches, sgd

    device = "cpu" if where.simulated else "cuda"
    if where.simulated:
        where.leave_out("an actor on a GPU", "not simulated: the line below is of ranks on the CPU")
    free = [] if where.simulated else [torch.cuda.mem_get_info(i)[0] for i in range(where.num)]
    per_actor = 1 if where.simulated or where.num > 1 else 2
    data = batches(2)
    losses: list[float] = []

    def launched(run: Run) -> Any:
        return dt.launch(
            run.mesh, backend="ray", device=device, ranks_per_actor=per_actor, bring_home=False
        )

    with where.line("an actor that is killed") as line:
        run = Run.of("tp2", make=sgd)
        with suppress(ActorLost), launched(run) as going:
            losses = run.losses(data)
            assert isinstance(going.cluster, RayCluster)
            os.kill(going.cluster.membership.host(0).counter.pid, signal.SIGKILL)
            began = time.monotonic()
            try:
                run.losses(data)
            except ActorLost as error:
                text = str(error).splitlines()[0]
                line.found = f"{time.monotonic() - began:.1f} s until: {text}"
                assert "rank" in text and "died" in text, text
                raise
            raise AssertionError("steps went on without it")
    with where.line("a launch after it") as line:
        run = Run.of("tp2", make=sgd)
        with launched(run):
            again = run.losses(data)
        assert losses and again == losses, f"losses {again}, and before {losses}"
        line.found = "the same losses, to the bit"
    if free:
        with where.line("the GPU's memory") as line:
            left = [a - torch.cuda.mem_get_info(i)[0] for i, a in enumerate(free)]
            line.found = f"{max(left) / 2**20:.0f} MiB less is free than before"
            assert max(left) < 2**30, line.found


def replicas(where: Where) -> None:
    """Check that copies of a replicated value, which each rank computes itself, stay equal."""
    import torch

    import dtensor as dt
    from tests.training import Run, batches, make_model, sgd

    steps = 3 if where.simulated else 50
    data = [batches(4)[number % 4] for number in range(steps)]
    for placed in ("dp2", "tp2"):
        with where.line(f"{placed}, {steps} steps of a bfloat16 GPT") as line, where.gpus(2):
            run = Run.of(placed, module=make_model().to(torch.bfloat16), make=sgd)
            per_actor = 1 if where.num > 1 else 2
            with dt.launch(run.mesh, "ray", device="cuda", ranks_per_actor=per_actor):
                losses = run.losses(data)
                alike = dt.check_replicas(run.model, run.optimizer)
            assert all(loss == loss for loss in losses), losses
            assert alike, "no value has copies"
            line.found = f"{alike} replicated values, alike on both ranks to the bit"
