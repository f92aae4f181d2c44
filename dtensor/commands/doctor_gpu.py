"""`dtensor doctor --gpu`: whether the GPUs here do what dtensor asks of them, part by part.

    $ dtensor doctor --gpu
    ok       cuda:0        NVIDIA H100, 79 of 80 GiB free       copied there and back
    ok       streams       cuda:0: waits and events             side streams wait as they should
    ok       rms_norm      off by 6e-08 of the op on the CPU    triton
    ...

Devices, streams, a communicator of NCCL for each pair of GPUs, the numbers of each built-in kernel,
and training: on one GPU, and on two where there are two. A part that fails is named, and the others
go on. On one H100 it is to take two minutes, most of them Triton's compiler; it has run on
simulated GPUs alone (`dt.testing.simulated_gpus`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dtensor.commands.checks import Check, first_line

LIMIT = 2e-5
"""Of float32 kernels: the largest error over the largest value."""

Operands: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]


def on_gpus() -> Iterator[Check]:
    if not torch.cuda.is_available():
        found = f"torch {torch.__version__} sees none"
        yield Check("wrong", "cuda", found, "a machine with a GPU, and torch for CUDA")
        return
    count = torch.cuda.device_count()
    for index in range(count):
        yield from _checked(f"cuda:{index}", lambda index=index: _device(index))
        yield from _checked("streams", lambda index=index: _streams(index))
    yield from _kernels()
    yield from _checked("one GPU", lambda: _training(1))
    for pair in itertools.combinations(range(count), 2):
        yield from _checked("pair", lambda pair=pair: _copies(*pair))
    if count > 1:
        yield from _checked("two GPUs", lambda: _training(2))


def _checked(name: str, check: Callable[[], tuple[str, str]]) -> Iterator[Check]:
    """`check` gives what was found, and a note."""
    try:
        found, note = check()
    except Exception as error:
        yield Check("wrong", name, first_line(error), "report it, with this table")
        return
    yield Check("ok", name, found, note)


def _device(index: int) -> tuple[str, str]:
    facts, device = torch.cuda.get_device_properties(index), torch.device("cuda", index)
    free, total = torch.cuda.mem_get_info(index)
    x = torch.arange(1 << 16, dtype=torch.int32)
    if not torch.equal(x.to(device).cpu(), x):
        raise RuntimeError("what was copied there and back is another")
    memory = f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    return f"{facts.name}, {facts.major}.{facts.minor}, {memory}", "copied there and back"


def _streams(index: int) -> tuple[str, str]:
    """A chain over two streams, each waiting for the other in turn."""
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        x = torch.zeros(1 << 20, device=device)
        for _ in range(8):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                x.add_(1)
                done = torch.cuda.Event()
                done.record()
            main.wait_event(done)
            x.mul_(2)
        if not bool((x == 510).all()):
            raise RuntimeError(f"a chain over two streams gave {x.unique().tolist()}, not 510")
    return f"cuda:{index}: waits and events", "side streams wait as they should"


def _copies(first: int, second: int) -> tuple[str, str]:
    x = torch.arange(1 << 16, device=torch.device("cuda", first))
    if not torch.equal(x.to(torch.device("cuda", second)).cpu(), x.cpu()):
        raise RuntimeError(f"what was copied from cuda:{first} to cuda:{second} is another")
    return f"cuda:{first} to cuda:{second}", "copied"


def _training(ranks: int) -> tuple[str, str]:
    """A rank on each of so many GPUs; over NCCL where they are several."""
    import dtensor as dt
    from dtensor.commands.selftest import ON_A_GPU, STEPS, difference, losses

    mesh = dt.Mesh(tp=ranks)
    here = losses("inprocess", mesh)
    backend = "inprocess" if ranks == 1 else "ray"
    there = losses(backend, mesh, device="cuda", ranks_per_actor=1)
    off = difference(there, here)
    if not off <= ON_A_GPU:
        raise RuntimeError(f"losses are {off:.1e} off the CPU's: {there} and {here}")
    by = "" if ranks == 1 else ", over NCCL"
    return f"{STEPS} steps at tp={ranks}{by}", f"losses are the CPU's, but for {off:.0e}"


# -- kernels ---------------------------------------------------------------------------------------


def _kernels() -> Iterator[Check]:
    """Each built-in kernel beside its op on the CPU."""
    import dtensor.sharding.ops.registered  # noqa: F401 - the ops
    from dtensor.kernels.registry import kernel_of

    device = torch.device("cuda", torch.cuda.current_device())
    for name, (args, kwargs) in _operands().items():
        namespace, _, op_name = name.partition("::")
        op = getattr(getattr(torch.ops, namespace), op_name).default
        kernel = kernel_of(op, device)
        if kernel is None:
            yield Check("warning", op_name, "no kernel here", "pip install 'dtensor[kernels]'")
            continue

        def check(op: Any = op, kernel: Any = kernel, args: Any = args, given: Any = kwargs) -> Any:
            wanted = _results(op, args, given, torch.device("cpu"))
            made = _results(kernel.function, args, given, device)
            off = max(map(_error, made, wanted))
            if not off <= LIMIT:
                raise RuntimeError(f"off by {off:.1e} of its largest value")
            return f"off by {off:.0e} of the op on the CPU", kernel.name

        yield from _checked(op_name, check)


def _results(call: Any, args: Sequence[Any], kwargs: Any, device: torch.device) -> list[Tensor]:
    """What it gives, or has written to its arguments."""

    def there(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, copy=True)
        return [there(each) for each in value] if isinstance(value, list) else value

    given = [there(arg) for arg in args]
    made = call(*given, **{name: there(value) for name, value in kwargs.items()})
    flat = made if made is not None else [x for arg in given if isinstance(arg, list) for x in arg]
    results = [flat] if isinstance(flat, Tensor) else list(flat)
    return [x.cpu() for x in results if isinstance(x, Tensor)]


def _error(made: Tensor, wanted: Tensor) -> float:
    if made.shape != wanted.shape:
        return float("inf")
    difference = (made.double() - wanted.double()).abs().max() if made.numel() else torch.zeros(())
    off = difference / wanted.double().abs().max().clamp(min=1e-30)
    return float("inf") if bool(off.isnan()) else float(off)


def _operands() -> dict[str, Operands]:
    """Of each op with a built-in kernel: two blocks and a rest of a block long."""
    random = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    x, y, z, weight, bias = make(6, 260), make(6, 260), make(6, 260), make(260), make(260)
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    norm = (1e-6, 1.0, torch.float32, torch.float32)
    heads, cos, sin = make(2, 3, 5, 16), make(5, 16), make(5, 16)
    target = torch.tensor([0, 3, -100, 259, 7, 100])
    at = {"at_seed": 11, "at_step": 7, "op": 3}
    stats = torch.ops.dt.ce_stats(x, target, -100)
    kept = torch.ops.dt.dropout(x, 0.3, **at)[1]
    rates = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
    state = [[make(300)], [make(300)], [make(300)], [make(300).abs()], [], [torch.ones(())]]
    return {
        "aten::_fused_adamw_": (state, {**rates, "amsgrad": False, "maximize": False}),
        "dt::rms_norm": ((x, weight, *norm), {}),
        "dt::add_rms_norm": ((x, y, weight, *norm), {}),
        "dt::rms_norm_backward": ((y, x, rstd, weight, 1.0), {}),
        "dt::add_layer_norm": ((x, y, weight, bias, 1e-5), {}),
        "dt::gated": ((x, y, "silu"), {}),
        "dt::gated_backward": ((z, x, y, "gelu_tanh"), {}),
        "dt::bias_gelu": ((x, bias, "gelu"), {}),
        "dt::bias_gelu_backward": ((z, x, bias, "gelu"), {}),
        "dt::rope": ((heads, cos, sin), {}),
        "dt::rope_backward": ((heads, cos, sin, torch.float32), {}),
        "dt::ce_stats": ((x, target, -100), {}),
        "dt::ce_backward": ((make(6), x, stats, target, -100), {}),
        "dt::dropout": ((x, 0.3), at),
        "dt::dropout_add": ((x, y, 0.3), at),
        "dt::dropout_backward": ((x, kept, 0.3), {}),
        "dt::attention": ((heads, heads + 1, heads - 1, True, 0.25), {}),
    }
