"""Tensors on simulated GPUs. Their values are computed on the CPU when their stream runs.

    x = torch.ones(4, device="cuda")    # a SimTensor, with its values in a CPU tensor
    y = x + 1                           # queued on the current stream
    y.tolist()                          # the host waits, the wait is counted: [2.0, ...]

Each ATen op of a SimTensor is one kernel on the current stream of its GPU. The host waits as in
ATen/native/cuda: for ops whose result shape depends on values (`nonzero`, a boolean index), for
reads of a value, and for copies to or from the host unless they are `non_blocking` with pinned
memory. Such a copy reads or writes the host's memory when its stream runs it. Tensors of two
devices in one op raise RuntimeError, except a CPU tensor without dims.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from dtensor.private_torch import (
    OpOverload,
    TorchDispatchMode,
    disable_current_modes,
    disabled_torch_function,
    dispatch_has_kernel_for_dispatch_key,
    make_wrapper_subclass,
    pytree,
)
from dtensor.sharding.ops.library import PLAIN
from dtensor.testing.gpus.cuda_ops import ON_CUDA
from dtensor.testing.gpus.host import (
    VisibleGpu,
    check_host_access,
    first_use,
    here,
    host_wait,
    line_here,
)
from dtensor.testing.gpus.memory import Access, Block, Uses, pinned_copy, pinned_uses
from dtensor.testing.gpus.world import Kernel

aten = torch.ops.aten

READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
DEPEND = {
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default,
    aten.unique_dim.default, aten.unique_consecutive.default, aten.repeat_interleave.Tensor,
    aten._linalg_check_errors.default,
}  # fmt: skip
"""Ops that wait for values: the shape of the result depends on them, or they check values. With an
``output_size`` they do not wait."""
INDEXED = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default,
    aten._unsafe_index.Tensor, aten._index_put_impl_.default,
}  # fmt: skip
SIZES = {
    op
    for name in (
        *("size", "stride", "numel", "storage_offset", "sym_size", "sym_stride", "sym_numel"),
        *("sym_storage_offset", "dim", "is_contiguous", "is_strides_like_format"),
        *("is_non_overlapping_and_dense", "sym_is_contiguous"),
    )
    if (packet := getattr(aten, name, None)) is not None
    for op in (getattr(packet, overload) for overload in packet.overloads())
}
"""Ops by which torch reads the size of an empty SimTensor, whose size is not fixed in C++."""
MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
VARYING = {
    aten.index_add.default, aten.index_add_.default, aten.scatter_add.default,
    aten.scatter_add_.default, aten.embedding_dense_backward.default, aten.cumsum.default,
    aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
}  # fmt: skip
"""Ops whose results differ from run to run on CUDA (`torch.use_deterministic_algorithms`)."""
EMPTY = {
    aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default,
    aten.empty_like.default, aten.new_empty_strided.default,
}  # fmt: skip


class SimTensor(Tensor):
    """A tensor of a simulated GPU. ``elem``: the CPU tensor with its values; ``block``: its
    memory; ``gpu``: its GPU."""

    elem: Tensor
    block: Block
    gpu: VisibleGpu

    @staticmethod
    def __new__(
        cls, elem: Tensor, block: Block, gpu: VisibleGpu, device: torch.device
    ) -> SimTensor:
        tensor = make_wrapper_subclass(
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(),
            dtype=elem.dtype, layout=elem.layout, device=device,
            dispatch_sizes_strides_policy=None if elem.numel() else "sizes",
        )  # fmt: skip
        tensor.elem, tensor.block, tensor.gpu = elem, block, gpu
        return cast(SimTensor, tensor)

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return simulate(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"SimTensor({self.dtype}{list(self.shape)}, {self.gpu.device})"

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.detach()

    @data.setter
    def data(self, other: SimTensor) -> None:
        Tensor.data.__set__(self, other)  # pyright: ignore
        self.elem, self.block, self.gpu = other.elem, other.block, other.gpu

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.elem.untyped_storage()

    def tolist(self) -> Any:
        host_wait("tolist()", self.gpu.stream)
        return self.elem.tolist()

    def record_stream(self, stream: Any) -> None:
        self.block.recorded[stream.sim.number] = stream.sim


class Simulated(TorchDispatchMode):
    """A mode in which also ops that create tensors on "cuda" are simulated."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return simulate(func, args, kwargs or {})


def simulate(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op: queue it as a kernel if it has SimTensors or creates a tensor on "cuda"."""
    if func in SIZES:
        return func(args[0].elem, *args[1:])
    leaves = pytree.tree_leaves((args, kwargs))
    sims = [x for x in leaves if isinstance(x, SimTensor)]
    device = kwargs.get("device")
    target = None if device is None else torch.device(device)
    to_cuda = target is not None and target.type == "cuda"
    if not sims and not to_cuda:
        if kwargs.get("pin_memory"):
            return pinned_copy(func(*args, **{**kwargs, "pin_memory": False}))
        pinned = [x for x in leaves if isinstance(x, Tensor) and is_pinned(x)]
        if pinned and not _is_view(func):
            written = {id(x) for x in _written(func, args, kwargs)}
            for x in pinned:
                check_host_access(x, str(func), writes=id(x) in written)
        return func(*args, **kwargs)
    if dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        with Simulated():
            return func.decompose(*args, **kwargs)
    if func in PLAIN:
        with Simulated():
            return PLAIN[func](*args, **kwargs)
    for x in sims:
        if x.gpu.device.world is not here().world:
            _adopt(x)
    cpu_tensors = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, SimTensor)]
    if func in (aten._to_copy.default, aten.copy_.default):
        return _copy(func, args, kwargs)
    _check_one_device(func, sims, cpu_tensors)
    gpu = sims[0].gpu if not to_cuda or target is None else here().of(target)
    if func is aten.resize_.default:
        return _resize(args[0], tuple(args[1]))
    if func in READS:
        host_wait(str(func), gpu.stream)
        return func(*_elems(args), **_elems(kwargs))
    if func in INDEXED and any(x.dim() for x in cpu_tensors):
        host_wait(f"copy of an index of {func} to the device", gpu.stream)
    has_mask = func in INDEXED and any(
        isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)
        for x in pytree.tree_leaves(args[1])
    )
    if (func in DEPEND and kwargs.get("output_size") is None) or has_mask:
        host_wait(str(func), gpu.stream)
        results = func(*_elems(args), **_elems(kwargs))
        return pytree.tree_map_only(Tensor, lambda x: _put_result(x, func, gpu), results)
    return _queue(func, args, kwargs, sims, gpu)


def _adopt(x: SimTensor) -> None:
    """Move a tensor that is left from an earlier simulation to the current GPUs."""
    x.gpu = here().of(x.device)
    made = Access("an earlier simulation", line_here(), f"{x.gpu.device}, main")
    x.block = Block(x.gpu.memory, x.gpu.device.main, x.elem.untyped_storage(), made)


def _check_one_device(func: OpOverload, sims: list[SimTensor], cpu_tensors: list[Tensor]) -> None:
    """Raise RuntimeError for tensors on several devices, as torch's TensorIterator does."""
    devices = {str(x.gpu.device) for x in sims}
    if len(devices) > 1 or (sims and func not in INDEXED and any(x.dim() for x in cpu_tensors)):
        tensors = [(str(x.gpu.device), list(x.shape)) for x in sims]
        tensors += [(str(x.device), list(x.shape)) for x in cpu_tensors]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} has {tensors} "
            f"({line_here()})"
        )


def _queue(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sims: list[SimTensor],
    gpu: VisibleGpu,
) -> Any:
    """Queue an op as a kernel on the current stream and return its results."""
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    cpu_args, cpu_kwargs = _elems(args), _elems(kwargs)
    returns = func._schema.returns
    line = line_here()
    now = Access(str(func), line, f"{gpu.device}, {gpu.stream.name}")
    if _is_view(func):
        block = sims[0].block  # a view needs no kernel and has the memory of its base
        views = func(*cpu_args, **cpu_kwargs)
        return pytree.tree_map_only(Tensor, lambda x: SimTensor(x, block, gpu, _device(gpu)), views)
    if func in MATMULS:
        first_use("cuBLAS", gpu.device)
    run = ON_CUDA.get(func, func)
    if func in VARYING and here().world.varies and not torch.are_deterministic_algorithms_enabled():
        run = with_random_last_bits(run, here().world.rng)
    reads = {id(x.block): x.block.used for x in sims}
    if written := [x for x in _written(func, args, kwargs) if isinstance(x, SimTensor)]:
        gpu.stream.put(Kernel(str(func), line, gpu.stream, _call(run, cpu_args, cpu_kwargs)))
        writes = {id(x.block): x.block.used for x in written}
        only_read = [block for key, block in reads.items() if key not in writes]
        gpu.memory.access(gpu.stream, only_read, writes.values(), now)
        return None if not returns else written[0] if len(returns) == 1 else tuple(written)
    metas = _meta_results(func, args, kwargs)
    returned = pytree.tree_map_only(Tensor, lambda meta: _allocate(meta, gpu, now), metas)
    if func in EMPTY:
        return returned
    results = [x for x in pytree.tree_leaves(returned) if isinstance(x, SimTensor)]
    elems = [x.elem for x in results]

    def compute() -> None:
        values = [
            x for x in pytree.tree_leaves(run(*cpu_args, **cpu_kwargs)) if isinstance(x, Tensor)
        ]
        for elem, value in zip(elems, values, strict=True):
            assert (elem.shape, elem.dtype) == (value.shape, value.dtype), func
            elem.copy_(value)

    gpu.stream.put(Kernel(str(func), line, gpu.stream, without_modes(compute)))
    gpu.memory.access(gpu.stream, reads.values(), [x.block.used for x in results], now)
    return returned


def with_random_last_bits(run: Callable[..., Any], rng: random.Random) -> Callable[..., Any]:
    """Return a function that calls ``run`` and increases random floats of its results by one unit
    in the last place."""

    def run_and_vary(*args: Any, **kwargs: Any) -> Any:
        results = run(*args, **kwargs)
        for x in pytree.tree_leaves(results):
            if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
                drawn = torch.rand(
                    x.shape, generator=torch.Generator().manual_seed(rng.getrandbits(32))
                )
                x.copy_(torch.where(drawn < 0.5, x * (1 + torch.finfo(x.dtype).eps), x))
        return results

    return run_and_vary


def without_modes(call: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that calls ``call`` without autograd and dispatch modes, as a kernel runs
    in the thread of any host."""

    def run() -> None:
        with torch.no_grad(), disable_current_modes():
            call()

    return run


def _call(run: Callable[..., Any], args: Any, kwargs: Any) -> Callable[[], None]:
    return without_modes(lambda: run(*args, **kwargs))


def _device(gpu: VisibleGpu) -> torch.device:
    return torch.device("cuda", next(i for i, each in enumerate(here().gpus) if each is gpu))


def _allocate(like: Tensor, gpu: VisibleGpu, made: Access) -> SimTensor:
    """Return a poisoned tensor with the shape, strides and dtype of ``like``."""
    elem, block = gpu.memory.allocate(gpu.stream, like.shape, like.stride(), like.dtype, made)
    return SimTensor(elem, block, gpu, _device(gpu))


def _put_result(value: Tensor, func: OpOverload, gpu: VisibleGpu) -> SimTensor:
    """Return a tensor with a value that is computed already; a kernel fills it."""
    now = Access(str(func), line_here(), f"{gpu.device}, {gpu.stream.name}")
    result = _allocate(value.contiguous(), gpu, now)
    elem = result.elem
    gpu.stream.put(
        Kernel(str(func), now.line, gpu.stream, without_modes(lambda: elem.copy_(value)))
    )
    gpu.memory.access(gpu.stream, [], [result.block.used], now)
    return result


def _resize(x: SimTensor, size: tuple[int, ...]) -> SimTensor:
    """Resize an empty tensor in place. The size of a tensor with elements is fixed in C++."""
    if x.elem.numel() and x.shape != size:
        raise NotImplementedError(f"resize_ of a simulated tensor with elements ({line_here()})")
    if x.shape == size:
        return x
    now = Access("aten.resize_", line_here(), f"{x.gpu.device}, {x.gpu.stream.name}")
    resized = _allocate(torch.empty(size, dtype=x.dtype, device="meta"), x.gpu, now)
    x.elem, x.block = resized.elem, resized.block
    return x


def _elems(values: Any) -> Any:
    return pytree.tree_map_only(SimTensor, lambda x: x.elem, values)


def _meta_results(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run the op on meta tensors and return its results."""

    def meta(x: Tensor) -> Tensor:
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")

    if "device" in kwargs or not any(isinstance(x, Tensor) for x in pytree.tree_leaves(args)):
        kwargs = {**kwargs, "device": torch.device("meta")}
    return func(
        *pytree.tree_map_only(Tensor, meta, args), **pytree.tree_map_only(Tensor, meta, kwargs)
    )


def _is_view(func: OpOverload) -> bool:
    """Return whether the results are views of an argument, so that the op reads no values."""
    aliases = [r.alias_info for r in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that the op writes in place."""
    arguments = func._schema.arguments
    by_keyword = [(a, kwargs[a.name]) for a in arguments if a.name in kwargs]
    return [
        x
        for argument, value in (*zip(arguments, args), *by_keyword)
        if argument.alias_info is not None and argument.alias_info.is_write
        for x in pytree.tree_leaves(value)
        if isinstance(x, Tensor)
    ]


# -- copies between devices ------------------------------------------------------------------------


def _copy(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``copy_`` or ``_to_copy``, which may copy between devices."""
    if func is aten.copy_.default:
        to, source = args[0], args[1]
        waits = not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking")
        if not isinstance(to, SimTensor):
            return _to_host(to, source, waits)
        _put_copy(to, source, waits)
        return to
    source, device = args[0], kwargs.get("device")
    target = None if device is None else torch.device(device)
    waits = not kwargs.get("non_blocking")
    where = ("device", "non_blocking", "pin_memory")
    meta = _meta_results(func, (source,), {k: v for k, v in kwargs.items() if k not in where})
    if isinstance(source, SimTensor) and target is not None and target.type == "cpu":
        with disable_current_modes():
            to = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
        # ATen/native/TensorConversions.cpp: a result that is not waited for is pinned
        return _to_host(to if waits else pinned_copy(to), source, waits)
    gpu = source.gpu if target is None else here().of(target)
    now = Access(str(func), line_here(), f"{gpu.device}, {gpu.stream.name}")
    result = _allocate(meta, gpu, now)
    _put_copy(result, source, waits)
    return result


def _to_host(to: Tensor, source: SimTensor, waits: bool) -> Tensor:
    """Queue a copy to a CPU tensor. The host waits, unless not ``waits`` and the memory is
    pinned."""
    stream, elem, pinned = source.gpu.stream, source.elem, pinned_uses(to)
    now = Access("copy to the host", line_here(), f"{source.gpu.device}, {stream.name}")
    stream.put(Kernel(now.what, now.line, stream, without_modes(lambda: to.copy_(elem))))
    writes = [] if pinned is None else [pinned]
    source.gpu.memory.access(stream, [source.block.used], writes, now)
    if waits or pinned is None or not _is_memcpy(to, elem):
        host_wait("copy to the host", stream)
    return to


def _put_copy(to: SimTensor, source: Tensor, waits: bool) -> None:
    """Queue a copy from the same GPU, another GPU or the host. The host waits for a copy from its
    memory, unless not ``waits`` and the memory is pinned."""
    elem, gpu, between_gpus, host_waits = to.elem, to.gpu, False, False
    reads: list[Uses] = []
    if isinstance(source, SimTensor):
        value, what = source.elem, "copy_"
        reads.append(source.block.used)
        between_gpus = source.gpu is not gpu
        if between_gpus:  # ATen/native/cuda/Copy.cu uses the source's stream; both streams wait
            what = "copy between GPUs"
            _order(gpu, source.gpu)
            gpu = source.gpu
    else:
        pinned = pinned_uses(source) if _is_memcpy(source, elem) else None
        what, host_waits = "copy from the host", waits or pinned is None
        if pinned is None:  # CUDA reads memory that is not pinned before the call returns
            check_host_access(source, what, writes=False)
            with disable_current_modes():
                value = source.clone()
        else:
            value = source
            reads.append(pinned)
    stream = gpu.stream
    now = Access(what, line_here(), f"{gpu.device}, {stream.name}")
    stream.put(Kernel(what, now.line, stream, without_modes(lambda: elem.copy_(value))))
    to.gpu.memory.access(stream, reads, [to.block.used], now)
    if between_gpus:
        _order(gpu, to.gpu)
    if host_waits:
        host_wait(what, stream)


def _order(first: VisibleGpu, then: VisibleGpu) -> None:
    """Make the current stream of the second GPU wait for the current stream of the first."""
    then.stream.wait_for(first.stream.point)


def _is_memcpy(x: Tensor, other: Tensor) -> bool:
    """Return whether a copy is one `cudaMemcpyAsync`. Other copies go through pageable memory
    (`copy_requires_temporaries` in ATen/native/cuda/Copy.cu)."""
    return x.dtype == other.dtype and x.is_contiguous() and other.is_contiguous()


def is_pinned(x: Tensor) -> bool:
    return pinned_uses(x) is not None
