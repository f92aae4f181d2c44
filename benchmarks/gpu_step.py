"""A training step on one GPU: one rank of dtensor beside torch, eager, compiled and as DTensor.

    python -m benchmarks.gpu_step [--cases gpt llama small] [--rounds 10] [--write]
    python -m benchmarks.gpu_step --device cpu --tiny          # that it runs; its times say nothing

A side is a process with the same weights, batches and AdamW (torch's with `fused=True`), the batch
in the host's memory, and caches of compilers that are empty at first. The sides of dtensor differ
in the options of the launch. PyTorch's DTensor has the linear layers cut as Megatron does, over a
mesh of one rank: its cost to the host. A timing is a few steps as in a training loop, the losses
read at the end. In a round each side is timed once, in turns; ratios are taken within a round. The
first losses are compared with eager torch's. Then two ranks of dtensor at tp=2 on the same GPU, in
rounds of their own: they compute one after the other there what one rank does, and exchange.

Besides times: the most memory that a side holds, the seconds of its first steps, and the host's
waits for the device in a warm step (`torch.cuda.set_sync_debug_mode`), with the lines of ours that
make them. Not here: several GPUs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import dtensor as dt
from benchmarks.processes import Processes, answer
from benchmarks.smallest import parsed
from tests.gpu.__main__ import DRIVER, first_of
from tests.models import GPT

RESULTS = Path(__file__).parent / "results"
LR = 1e-4
LOSS_RTOL = 2e-2
"""The tolerance of the first losses, with values of 16 bits. A side that computes something else
differs by far more; later losses differ by more, because roundings add up."""

Run = Callable[[int], list[float]]
"""Takes that many training steps; their losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``model``: what is trained, made anew; ``cast``: the dtype of autocast; ``steps`` in a
    timing."""

    label: str
    model: Callable[[], nn.Module]
    vocab: int
    rows: int
    tokens: int
    steps: int
    cast: torch.dtype | None = None
    pins: Mapping[str, Mapping[str, dt.Placement]]

    def batch(self) -> tuple[Tensor, Tensor]:
        made = torch.Generator().manual_seed(1)
        size = (self.rows, self.tokens)
        return tuple(torch.randint(self.vocab, size, generator=made) for _ in range(2))  # type: ignore[return-value]

    def loss(self, model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, self.cast, enabled=self.cast is not None):
            logits = model(tokens)
            logits = getattr(logits, "logits", logits)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def llama(width: int, layers: int, vocab: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=width * 11 // 4,
        num_hidden_layers=layers, num_attention_heads=width // 64, use_cache=False,
        num_key_value_heads=width // 256, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16)


def gpt(width: int, layers: int, vocab: int, positions: int) -> nn.Module:
    torch.manual_seed(0)
    model = GPT(vocab, width, max(width // 64, 2), layers, positions)
    for x in (model.embed.weight, model.positions.weight):  # from a loss near that of chance
        nn.init.normal_(x, std=0.02)
    return model


GPT_PINS: Mapping[str, Mapping[str, dt.Placement]] = {
    "*.qkv.weight": dict(tp=dt.Row(blocks=3)),
    "*.proj.weight": dict(tp=dt.Column()),
    "*.up.weight": dict(tp=dt.Row()),
    "*.down.weight": dict(tp=dt.Column()),
}
LLAMA_PINS: Mapping[str, Mapping[str, dt.Placement]] = {
    **{f"*.{name}_proj.weight": dict(tp=dt.Row()) for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}_proj.weight": dict(tp=dt.Column()) for name in ("o", "down")},
}


def cases(tiny: bool) -> dict[str, Case]:
    """``tiny``: two layers of width 256."""
    w, n, t, v = (256, 2, 32, 512) if tiny else (1024, 12, 1024, 32000)
    gw, gv = (256, 512) if tiny else (768, 50304)
    rows = 2 if tiny else 8
    gpt_label = f"GPT, {n} layers of {gw}, float32 weights, autocast to bfloat16"
    return {
        "llama": Case(
            label=f"Llama of transformers, {n} layers of {w}, bfloat16",
            model=lambda: llama(w, n, v), vocab=v, rows=rows, tokens=t, steps=4, pins=LLAMA_PINS,
        ),
        "gpt": Case(
            label=gpt_label, model=lambda: gpt(gw, n, gv, t), vocab=gv, rows=rows, tokens=t,
            steps=4, cast=torch.bfloat16, pins=GPT_PINS,
        ),
        "small": Case(
            label="GPT, 4 layers of 256, float32", model=lambda: gpt(256, 4, 512, 128), vocab=512,
            rows=4, tokens=128, steps=10, pins=GPT_PINS,
        ),
    }  # fmt: skip


# -- the sides -------------------------------------------------------------------------------------


TORCH: Mapping[str, Mapping[str, str] | None] = {
    "eager": None,
    "compile": {},
    "compile, reduce-overhead": {"mode": "reduce-overhead"},
}
"""Sides of torch, with the options of torch.compile."""
OURS: Mapping[str, Mapping[str, Any]] = {
    "dtensor, generated": {"local": "generated"},
    "dtensor, compiled": {"local": "inductor"},
    "dtensor, compiled, graphs": {"local": "inductor", "graphs": True},
}
"""Sides of dtensor, with the options of the launch."""
DTENSOR = "PyTorch's DTensor"
TWO_RANKS = "dtensor, tp=2 here"


def sides_of(device: str, *, compiled: bool) -> list[str]:
    """Return the sides that are timed in turns. ``compiled``: with those that compile."""
    names = [*TORCH, DTENSOR, *OURS]
    if device != "cuda":
        names = [name for name in names if "graphs" not in name and "reduce" not in name]
    return names if compiled else [name for name in names if "compile" not in name]


def plain(case: Case, device: str, options: Mapping[str, str] | None) -> Run:
    model = case.model().to(device)
    compile_model: Any = torch.compile
    called = model if options is None else compile_model(model, **options)
    return trained(case, device, called, torch.optim.AdamW(model.parameters(), lr=LR, fused=True))


def torch_dtensor(case: Case, device: str) -> Run:
    """To be called within `one_process`."""
    mesh = init_device_mesh(device, (1,))
    model = case.model().to(device)
    for name, module in model.named_modules():
        for pattern, placed in case.pins.items():
            if fnmatch(f"{name}.weight", pattern):
                cut = RowwiseParallel() if placed["tp"] == dt.Column() else ColwiseParallel()
                parallelize_module(module, mesh, cut)
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    assert split and whole
    groups = [{"params": split}, {"params": whole}]  # the fused kernel takes one kind at a time
    return trained(case, device, model, torch.optim.AdamW(groups, lr=LR, fused=True))


@contextmanager
def one_process(device: str) -> Iterator[None]:
    """A process group of this process alone."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trained(case: Case, device: str, model: Any, optimizer: torch.optim.Optimizer) -> Run:
    batch = case.batch()

    def run(count: int) -> list[float]:
        losses: list[Tensor] = []
        for _ in range(count):
            tokens, targets = (x.to(device) for x in batch)
            loss = case.loss(model, tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [float(loss) for loss in losses]

    return run


def ours(case: Case, mesh: dt.Mesh) -> Run:
    """To be called within a launch of ``mesh``."""
    model = dt.parallelize(case.model(), mesh, case.pins if mesh.shape else {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    step, batch = dt.train_step(model, case.loss, optimizer), case.batch()
    return lambda count: [float(loss) for loss in [step(*batch) for _ in range(count)]]


# -- what is measured ------------------------------------------------------------------------------


@dataclass(slots=True)
class Side:
    """``peak``: GiB, in a warm step, above what the side holds before it. ``losses``: of the first
    steps."""

    first_s: float
    peak: float
    waits: Counter[str]
    losses: list[float]
    times: list[float] = field(default_factory=list[float])


def work(
    rank: int, name: str, side: str, device: str, tiny: bool, directory: str, pipe: Connection
) -> None:
    """Do what one side is asked: "prepare" it, or time the "steps" of a round."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{directory}/inductor"
    os.environ["TRITON_CACHE_DIR"] = f"{directory}/triton"
    case = cases(tiny)[name]
    runs: list[Run] = []
    with ExitStack() as stack:

        def make() -> Run:
            if side in TORCH:
                return plain(case, device, TORCH[side])
            if side == DTENSOR:
                stack.enter_context(one_process(device))
                return torch_dtensor(case, device)
            mesh = dt.Mesh(tp=2) if side == TWO_RANKS else dt.Mesh()
            options = OURS.get(side, {})
            stack.enter_context(dt.launch(mesh, device=device, bring_home=False, **options))
            return ours(case, mesh)

        def prepare() -> Side:
            run, found = prepared(make, case.steps, device)
            runs.append(run)
            return found

        def steps() -> float:
            begin = time.perf_counter()
            runs[0](case.steps)
            return (time.perf_counter() - begin) / case.steps

        answer(pipe, {"prepare": prepare, "steps": steps})


def prepared(make: Callable[[], Run], steps: int, device: str) -> tuple[Run, Side]:
    """Make a side, take its first steps, then look at its memory and its waits."""
    begin = time.perf_counter()
    run = make()
    losses = run(steps)
    first = time.perf_counter() - begin
    if device != "cuda":
        return run, Side(first, 0.0, Counter(), losses)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    losses += run(1)
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30
    waits = waits_of(lambda: losses.extend(run(1)))
    return run, Side(first, peak, waits, losses)


def waits_of(call: Callable[[], object]) -> Counter[str]:
    """Where the host waits for the device: the innermost line of dtensor or of this file."""
    found: Counter[str] = Counter()

    def seen(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            lines = [f for f in traceback.extract_stack() if "site-packages" not in f.filename]
            named = [f for f in lines if "dtensor" in f.filename or "gpu_step" in f.filename]
            at = [f for f in named if f.name not in ("seen",)][-1]
            found[f"{Path(at.filename).name}:{at.lineno} {at.name}: {at.line}"] += 1

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = seen
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return found


def measure(name: str, device: str, tiny: bool, rounds: int, compiled: bool) -> dict[str, Side]:
    sides: dict[str, Side] = {}
    with ExitStack() as stack:
        asked: dict[str, Processes] = {}

        def prepare(side: str) -> None:
            process = Processes(1, work, name, side, device, tiny)
            asked[side] = stack.enter_context(process)
            (sides[side],) = process.ask("prepare")

        for side in sides_of(device, compiled=compiled):
            prepare(side)
        names = list(sides)
        for number in range(rounds):
            shift = number % len(names)
            for side in (*names[shift:], *names[:shift]):
                sides[side].times += asked[side].ask("steps")
        prepare(TWO_RANKS)
        for _ in range(rounds):
            sides[TWO_RANKS].times += asked[TWO_RANKS].ask("steps")
    for side, found in sides.items():
        for number, (loss, wanted) in enumerate(zip(found.losses, sides["eager"].losses)):
            assert abs(loss - wanted) < LOSS_RTOL * wanted, (side, number, loss, wanted)
    return sides


# -- the table -------------------------------------------------------------------------------------


FIGURES = (
    ("dtensor, compiled", "compile"),
    ("dtensor, compiled", "eager"),
    ("dtensor, compiled, graphs", "compile, reduce-overhead"),
    ("dtensor, compiled", "dtensor, generated"),
)
"""Pairs of sides whose ratios decide the defaults of a launch."""


def ratio(side: Side, peer: Side) -> str:
    """Return the median, the least and the most ratio of times within a round."""
    ratios = sorted(a / b for a, b in zip(side.times, peer.times, strict=True))
    return f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"


def rows(case: Case, sides: Mapping[str, Side]) -> Iterator[str]:
    yield f"## {case.label}, {case.rows} x {case.tokens} tokens"
    yield ""
    yield "| side | ms a step | over eager | memory of a step, GiB | host waits | first steps, s |"
    yield "|---|---|---|---|---|---|"
    for name, side in sides.items():
        ms = statistics.median(side.times) * 1e3
        cells = f"{ms:.2f} | {ratio(side, sides['eager'])} | {side.peak:.2f}"
        yield f"| {name} | {cells} | {sum(side.waits.values())} | {side.first_s:.1f} |"
    yield ""
    pairs = [(a, b) for a, b in FIGURES if a in sides and b in sides]
    if pairs:
        yield "| side | over | time | memory of a step | first steps |"
        yield "|---|---|---|---|---|"
    for name, peer in pairs:
        a, b = sides[name], sides[peer]
        memory = f"{a.peak / b.peak:.2f}" if b.peak else "-"
        yield f"| {name} | {peer} | {ratio(a, b)} | {memory} | {a.first_s / b.first_s:.2f} |"
    yield ""
    for name in (*OURS, TWO_RANKS):
        if name not in sides or not sides[name].waits:
            continue
        yield f"Host waits of {name}, a step:"
        yield ""
        for line, count in sides[name].waits.most_common():
            yield f"- {count}: `{line}`"
        yield ""


def header(device: str, rounds: int) -> Iterator[str]:
    yield "# A training step on one GPU"
    yield ""
    yield f"`python -m benchmarks.gpu_step {' '.join(sys.argv[1:])}`".replace(" `", "`")
    yield ""
    name = "the CPU"
    if device == "cuda":
        name = f"{torch.cuda.get_device_name()}, driver {first_of(DRIVER)}"
    yield (
        f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}. {rounds} rounds; "
        "medians, and of the ratios within a round the least and the most. What the sides are, "
        "and how they are timed: benchmarks/gpu_step.py."
    )
    yield ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=["llama", "gpt", "small"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-compile", action="store_true", help="without the sides that compile")
    parser.add_argument("--write", action="store_true", help="to benchmarks/results")
    given = parsed(
        parser, argv, cases=["small"], rounds=1, device="cpu", tiny=True, no_compile=True
    )
    if given.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here; --device cpu --tiny needs none.", file=sys.stderr)
        return 1
    head = list(header(given.device, given.rounds))
    print(*head, sep="\n", flush=True)
    sections: dict[str, str] = {}
    for name in given.cases:
        compiled = not given.no_compile
        sides = measure(name, given.device, given.tiny, given.rounds, compiled)
        title, *lines = rows(cases(given.tiny)[name], sides)
        print(title, *lines, sep="\n", flush=True)
        sections[title] = "\n".join(lines)
    if given.write:
        write("\n".join(head), sections)
    return 0


def write(head: str, sections: Mapping[str, str]) -> None:
    """Write the tables of these cases, and keep those of other cases that have the same sides."""
    file = RESULTS / "gpu_step.md"
    _, *before = file.read_text().split("\n## ") if file.exists() else ("",)
    kept = dict(section.split("\n", 1) for section in before)
    kept = {f"## {title}": text for title, text in kept.items() if next(iter(OURS)) in text}
    texts = [f"{title}\n{text.strip()}\n" for title, text in (kept | dict(sections)).items()]
    file.write_text("\n".join([head, *texts]))


if __name__ == "__main__":
    sys.exit(main())
