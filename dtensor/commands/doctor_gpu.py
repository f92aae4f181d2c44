"""`dtensor doctor --gpu`: checks the GPUs of this machine, part by part.

    $ dtensor doctor --gpu
    ok       cuda:0        NVIDIA H100, 79 of 80 GiB free       copied there and back
    ok       streams       cuda:0: waits and events             side streams wait as they should
    ok       rms_norm      off by 6e-08 of the op on the CPU    triton
    ...

The parts are devices, streams, copies between each pair of GPUs, the results of each built-in
kernel, and training on one GPU and on two. If a part fails, the other parts still run. It has run
on simulated GPUs only (`dt.testing.simulated_gpus`). On an H100 it should take two minutes, mostly
in Triton's compiler.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dtensor.commands.checks import Check, first_line

MAX_ERROR = 2e-5
"""The maximum error of a float32 kernel, divided by the largest value of its result."""

Operands: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]


def on_gpus() -> Iterator[Check]:
    """Run all checks of the GPUs."""
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
    """Return the result of a check, which returns what it found and a note. An exception is the
    result "wrong"."""
    try:
        found, note = check()
    except Exception as error:
        yield Check("wrong", name, first_line(error), "report it, with this table")
        return
    yield Check("ok", name, found, note)


def _device(index: int) -> tuple[str, str]:
    """Copy values to the GPU and back."""
    properties, device = torch.cuda.get_device_properties(index), torch.device("cuda", index)
    free, total = torch.cuda.mem_get_info(index)
    x = torch.arange(1 << 16, dtype=torch.int32)
    if not torch.equal(x.to(device).cpu(), x):
        raise RuntimeError("values that were copied there and back are different")
    memory = f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    found = f"{properties.name}, {properties.major}.{properties.minor}, {memory}"
    return found, "copied there and back"


def _streams(index: int) -> tuple[str, str]:
    """Run a chain of ops on two streams that wait for each other in turn."""
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        x = torch.zeros(1 << 20, device=device)
        for _ in range(8):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                x.add_(1)
                event = torch.cuda.Event()
                event.record()
            main.wait_event(event)
            x.mul_(2)
        if not bool((x == 510).all()):
            raise RuntimeError(f"a chain over two streams gave {x.unique().tolist()}, not 510")
    return f"cuda:{index}: waits and events", "side streams wait as they should"


def _copies(first: int, second: int) -> tuple[str, str]:
    x = torch.arange(1 << 16, device=torch.device("cuda", first))
    if not torch.equal(x.to(torch.device("cuda", second)).cpu(), x.cpu()):
        raise RuntimeError(f"values that were copied from cuda:{first} to cuda:{second} differ")
    return f"cuda:{first} to cuda:{second}", "copied"


def _training(ranks: int) -> tuple[str, str]:
    """Train with one rank on each of ``ranks`` GPUs; several ranks communicate over NCCL."""
    import dtensor as dt
    from dtensor.commands.selftest import GPU_TOLERANCE, STEPS, difference, losses

    mesh = dt.Mesh(tp=ranks)
    cpu_losses = losses("inprocess", mesh)
    backend = "inprocess" if ranks == 1 else "ray"
    gpu_losses = losses(backend, mesh, device="cuda", ranks_per_actor=1)
    off = difference(gpu_losses, cpu_losses)
    if not off <= GPU_TOLERANCE:
        raise RuntimeError(f"losses are {off:.1e} off the CPU's: {gpu_losses} and {cpu_losses}")
    over_nccl = "" if ranks == 1 else ", over NCCL"
    return f"{STEPS} steps at tp={ranks}{over_nccl}", f"losses are the CPU's, but for {off:.0e}"


# -- kernels ---------------------------------------------------------------------------------------


def _kernels() -> Iterator[Check]:
    """Compare each built-in kernel with its op on the CPU."""
    import dtensor.sharding.ops.registered  # noqa: F401 - registers the ops
    from dtensor.kernels.registry import kernel_of

    device = torch.device("cuda", torch.cuda.current_device())
    for name, (args, kwargs) in _operands().items():
        namespace, _, op_name = name.partition("::")
        op = getattr(getattr(torch.ops, namespace), op_name).default
        kernel = kernel_of(op, device)
        if kernel is None:
            yield Check("warning", op_name, "no kernel here", "pip install 'dtensor[kernels]'")
            continue

        def check(
            op: Any = op, kernel: Any = kernel, args: Any = args, kwargs: Any = kwargs
        ) -> tuple[str, str]:
            wanted = _results(op, args, kwargs, torch.device("cpu"))
            results = _results(kernel.function, args, kwargs, device)
            off = max(map(_error, results, wanted))
            if not off <= MAX_ERROR:
                raise RuntimeError(f"off by {off:.1e} of its largest value")
            return f"off by {off:.0e} of the op on the CPU", kernel.name

        yield from _checked(op_name, check)


def _results(call: Any, args: Sequence[Any], kwargs: Any, device: torch.device) -> list[Tensor]:
    """Return the results of the call on the device, copied to the CPU. If the call returns None,
    its results are the tensors in its lists of arguments, which it writes in place."""

    def to_device(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, copy=True)
        return [to_device(each) for each in value] if isinstance(value, list) else value

    args = [to_device(arg) for arg in args]
    returned = call(*args, **{name: to_device(value) for name, value in kwargs.items()})
    if returned is None:
        returned = [x for arg in args if isinstance(arg, list) for x in arg]
    results = [returned] if isinstance(returned, Tensor) else list(returned)
    return [x.cpu() for x in results if isinstance(x, Tensor)]


def _error(result: Tensor, wanted: Tensor) -> float:
    """Return the largest error divided by the largest value; infinity for NaN or another shape."""
    if result.shape != wanted.shape:
        return float("inf")
    if not result.numel():
        return 0.0
    difference = (result.double() - wanted.double()).abs().max()
    off = difference / wanted.double().abs().max().clamp(min=1e-30)
    return float("inf") if bool(off.isnan()) else float(off)


def _operands() -> dict[str, Operands]:
    """Return arguments for each op with a built-in kernel. Rows of 260 elements cover two full
    blocks and a partial block."""
    random = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    x, y, z, weight, bias = make(6, 260), make(6, 260), make(6, 260), make(260), make(260)
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    norm = (1e-6, 1.0, torch.float32, torch.float32)
    heads, cos, sin = make(2, 3, 5, 16), make(5, 16), make(5, 16)
    target = torch.tensor([0, 3, -100, 259, 7, 100])
    random_state = {"at_seed": 11, "at_step": 7, "op": 3}
    stats = torch.ops.dt.ce_stats(x, target, -100)
    mask = torch.ops.dt.dropout(x, 0.3, **random_state)[1]
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
        "dt::dropout": ((x, 0.3), random_state),
        "dt::dropout_add": ((x, y, 0.3), random_state),
        "dt::dropout_backward": ((x, mask, 0.3), {}),
        "dt::attention": ((heads, heads + 1, heads - 1, True, 0.25), {}),
    }
