"""A training step on one GPU: one rank of dtensor beside torch, eager, compiled and as DTensor.

    python -m benchmarks.gpu_step [--cases gpt llama small] [--rounds 10] [--write]
    python -m benchmarks.gpu_step --device cpu --tiny          # that it runs; its times say nothing

All sides have the same weights, batches and AdamW (torch's with `fused=True`), the batch in the
host's memory. PyTorch's DTensor has the linear layers cut as Megatron does, over a mesh of one
rank: its cost to the host. A timing is a few steps as in a training loop, the losses read at the
end. In a round each side is timed once, in turns; ratios are taken within a round. The first losses
are compared with eager torch's. Then two ranks of dtensor at tp=2 on the same GPU, in rounds of
their own: they compute one after the other there what one rank does, and exchange.

Besides times: the most memory that a side holds, and the host's waits for the device in a warm step
(`torch.cuda.set_sync_debug_mode`), with the lines of ours that make them. Not here: several GPUs.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
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
from benchmarks.smallest import parsed
from tests.models import GPT

RESULTS = Path(__file__).parent / "results"
LR = 1e-4
LOSS_RTOL, COMPARED = 2e-2, 20
"""Of 16 bits, for some steps: that a side computes something else shows as far more, and roundings
grow with the steps."""

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


def plain(case: Case, device: str, compiled: bool) -> Run:
    model = case.model().to(device)
    called = torch.compile(model) if compiled else model
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
    run: Run
    first_s: float
    peak: float
    """GiB, in the second call, above what all sides hold before it."""
    waits: Counter[str]
    times: list[float]


def prepared(make: Callable[[], Run], steps: int, device: str, losses: list[float]) -> Side:
    """Makes a side, takes its first steps, then looks at its memory and its waits."""
    begin = time.perf_counter()
    run = make()
    losses += run(steps)
    first = time.perf_counter() - begin
    if device != "cuda":
        return Side(run, first, 0.0, Counter(), [])
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    losses += run(1)
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30
    return Side(run, first, peak, waits_of(lambda: losses.extend(run(1))), [])


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


def measure(case: Case, device: str, rounds: int, compiled: bool) -> dict[str, Side]:
    makes: dict[str, Callable[[], Run]] = {"eager": lambda: plain(case, device, False)}
    if compiled:
        makes["compile"] = lambda: plain(case, device, True)
    makes["PyTorch's DTensor"] = lambda: torch_dtensor(case, device)
    losses: dict[str, list[float]] = {}
    sides: dict[str, Side] = {}
    mesh = dt.Mesh()
    with one_process(device), dt.launch(mesh, device=device, bring_home=False):
        makes["dtensor"] = lambda: ours(case, mesh)
        for name, make in makes.items():
            losses[name] = []
            sides[name] = prepared(make, case.steps, device, losses[name])
        for number in range(rounds):
            names = list(sides)
            shift = number % len(names)
            for name in (*names[shift:], *names[:shift]):
                begin = time.perf_counter()
                losses[name] += sides[name].run(case.steps)
                sides[name].times.append((time.perf_counter() - begin) / case.steps)
    del makes
    two = dt.Mesh(tp=2)
    with dt.launch(two, device=device, bring_home=False):
        name = "dtensor, tp=2 here"
        losses[name] = []
        sides[name] = prepared(lambda: ours(case, two), case.steps, device, losses[name])
        for _ in range(rounds):
            begin = time.perf_counter()
            losses[name] += sides[name].run(case.steps)
            sides[name].times.append((time.perf_counter() - begin) / case.steps)
    for name, found in losses.items():
        first = zip(found[:COMPARED], losses["eager"], strict=False)
        for number, (loss, wanted) in enumerate(first):
            assert abs(loss - wanted) < LOSS_RTOL * wanted, (name, number, loss, wanted)
    return sides


# -- the table -------------------------------------------------------------------------------------


def rows(case: Case, sides: Mapping[str, Side]) -> Iterator[str]:
    yield f"## {case.label}, {case.rows} x {case.tokens} tokens"
    yield ""
    yield "| side | ms a step | over eager | memory of a step, GiB | host waits | first steps, s |"
    yield "|---|---|---|---|---|---|"
    for name, side in sides.items():
        pairs = zip(side.times, sides["eager"].times, strict=True)
        ratios = sorted(a / b for a, b in pairs)
        spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        ms = statistics.median(side.times) * 1e3
        waits = sum(side.waits.values())
        yield f"| {name} | {ms:.2f} | {spread} | {side.peak:.2f} | {waits} | {side.first_s:.1f} |"
    yield ""
    for name in ("dtensor", "dtensor, tp=2 here"):
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
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
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
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--write", action="store_true", help="to benchmarks/results")
    given = parsed(
        parser, argv, cases=["small"], rounds=1, device="cpu", tiny=True, no_compile=True
    )
    if given.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here; --device cpu --tiny needs none.", file=sys.stderr)
        return 1
    lines: list[str] = []
    for line in header(given.device, given.rounds):
        print(line, flush=True)
        lines.append(line)
    for name in given.cases:
        case = cases(given.tiny)[name]
        sides = measure(case, given.device, given.rounds, not given.no_compile)
        for line in rows(case, sides):
            print(line, flush=True)
            lines.append(line)
        del sides
        gc.collect()
        if given.device == "cuda":
            torch.cuda.empty_cache()
    if given.write:
        (RESULTS / "gpu_step.md").write_text("\n".join(lines).rstrip() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
