"""Tensors on simulated GPUs: real numbers, computed when their stream runs.

    x = torch.ones(4, device="cuda")    # a SimTensor; its memory is a CPU tensor's
    y = x + 1                           # queued on the current stream
    y.tolist()                          # the host waits, is counted, and sees [2.0, ...]

Each ATen op of a SimTensor is one kernel on the current stream of its GPU. Ops whose result's shape
depends on values (`nonzero`, a boolean index, `unique`) make the host wait, as they do in
ATen/native/cuda; so do reads of one value, copies to the host, and copies from the host's memory
unless that is pinned and the copy `non_blocking`. A view has the memory of what it views. Tensors
of two devices in one op raise RuntimeError, but for a CPU tensor without dims, as in torch.
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
from dtensor.testing.gpus.host import Seen, first_use, here, host_wait, line_here
from dtensor.testing.gpus.memory import Access, Block
from dtensor.testing.gpus.world import Kernel

aten = torch.ops.aten

READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
DEPEND = {
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default,
    aten.unique_dim.default, aten.unique_consecutive.default, aten.repeat_interleave.Tensor,
    aten._linalg_check_errors.default,
}  # fmt: skip
"""Ops whose results depend on values in their shapes, or that look at values."""
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
"""What torch asks of a tensor whose size is not fixed in C++."""
MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
VARYING = {
    aten.index_add.default, aten.index_add_.default, aten.scatter_add.default,
    aten.scatter_add_.default, aten.embedding_dense_backward.default, aten.cumsum.default,
    aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
}  # fmt: skip
"""Ops whose results differ from run to run on CUDA (`torch.use_deterministic_algorithms`)."""
EMPTY = {
    aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default,
    aten.empty_like.default, aten.new_empty_strided.default,
}  # fmt: skip


class SimTensor(Tensor):
    """A tensor of a simulated GPU. ``elem``: the CPU tensor that stands for it; ``block``: its
    memory."""

    elem: Tensor
    block: Block
    seen: Seen

    @staticmethod
    def __new__(cls, elem: Tensor, block: Block, seen: Seen, device: torch.device) -> SimTensor:
        made = make_wrapper_subclass(
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(),
            dtype=elem.dtype, layout=elem.layout, device=device,
            dispatch_sizes_strides_policy=None if elem.numel() else "sizes",
        )  # fmt: skip
        made.elem, made.block, made.seen = elem, block, seen
        return cast(SimTensor, made)

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return simulate(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"SimTensor({self.dtype}{list(self.shape)}, {self.seen.device})"

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.detach()

    @data.setter
    def data(self, other: SimTensor) -> None:
        Tensor.data.__set__(self, other)  # pyright: ignore
        self.elem, self.block, self.seen = other.elem, other.block, other.seen

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.elem.untyped_storage()

    def tolist(self) -> Any:
        host_wait("tolist()", self.seen.stream)
        return self.elem.tolist()

    def record_stream(self, stream: Any) -> None:
        self.block.recorded[stream.sim.number] = stream.sim


class Simulated(TorchDispatchMode):
    """Within, ops that make tensors on "cuda" are simulated too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return simulate(func, args, kwargs or {})


def simulate(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in SIZES:
        return func(args[0].elem, *args[1:])
    leaves = pytree.tree_leaves((args, kwargs))
    sims = [x for x in leaves if isinstance(x, SimTensor)]
    asked = kwargs.get("device")
    target = None if asked is None else torch.device(asked)
    to_cuda = target is not None and target.type == "cuda"
    if not sims and not to_cuda:
        return func(*args, **kwargs)
    if dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        with Simulated():
            return func.decompose(*args, **kwargs)
    if func in PLAIN:
        with Simulated():
            return PLAIN[func](*args, **kwargs)
    for x in sims:
        if x.seen.device.world is not here().world:
            _adopt(x)
    others = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, SimTensor)]
    if func in (aten._to_copy.default, aten.copy_.default):
        return _copied(func, args, kwargs)
    _refuse_mixed(func, sims, others)
    seen = sims[0].seen if not to_cuda or target is None else here().of(target)
    if func is aten.resize_.default:
        return _resized(args[0], tuple(args[1]))
    if func in READS:
        host_wait(str(func), seen.stream)
        return func(*_inner(args), **_inner(kwargs))
    if func in INDEXED and any(x.dim() for x in others):
        host_wait(f"copy of an index of {func} to the device", seen.stream)
    masks = func in INDEXED and any(
        isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)
        for x in pytree.tree_leaves(args[1])
    )
    if func in DEPEND or masks:
        host_wait(str(func), seen.stream)
        return pytree.tree_map_only(
            Tensor, lambda x: _filled(x, func, seen), func(*_inner(args), **_inner(kwargs))
        )
    return _queued(func, args, kwargs, sims, seen)


def _adopt(x: SimTensor) -> None:
    """What the process has kept of earlier simulated GPUs lies in the memory of these ones."""
    x.seen = here().of(x.device)
    made = Access("an earlier simulation", line_here(), f"{x.seen.device}, main")
    x.block = Block(x.seen.memory, x.seen.device.main, x.elem.untyped_storage(), made)


def _refuse_mixed(func: OpOverload, sims: list[SimTensor], others: list[Tensor]) -> None:
    """Raises RuntimeError as torch's TensorIterator does."""
    devices = {str(x.seen.device) for x in sims}
    if len(devices) > 1 or (sims and func not in INDEXED and any(x.dim() for x in others)):
        given = [(str(x.seen.device), list(x.shape)) for x in sims]
        given += [(str(x.device), list(x.shape)) for x in others]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} has {given} ({line_here()})"
        )


def _queued(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sims: list[SimTensor],
    seen: Seen,
) -> Any:
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    inner_args, inner_kwargs = _inner(args), _inner(kwargs)
    returns = func._schema.returns
    line = line_here()
    now = Access(str(func), line, f"{seen.device}, {seen.stream.name}")
    if returns and any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        block = sims[0].block  # a view: no kernel
        made = func(*inner_args, **inner_kwargs)
        return pytree.tree_map_only(
            Tensor, lambda x: SimTensor(x, block, seen, _device(seen)), made
        )
    if func in MATMULS:
        first_use("cuBLAS", seen.device)
    run = ON_CUDA.get(func, func)
    if func in VARYING and here().world.varies and not torch.are_deterministic_algorithms_enabled():
        run = varying(run, here().world.rng)
    reads = {id(x.block): x.block for x in sims}
    if written := _written(func, args, kwargs):
        seen.stream.put(Kernel(str(func), line, seen.stream, _call(run, inner_args, inner_kwargs)))
        writes = {id(x.block): x.block for x in written}
        only_read = [block for at, block in reads.items() if at not in writes]
        seen.memory.access(seen.stream, only_read, writes.values(), now)
        return None if not returns else written[0] if len(returns) == 1 else tuple(written)
    like = _meta(func, args, kwargs)
    made = pytree.tree_map_only(Tensor, lambda m: _allocated(m, seen, now), like)
    if func in EMPTY:
        return made
    results = [x for x in pytree.tree_leaves(made) if isinstance(x, SimTensor)]
    elems = [x.elem for x in results]

    def compute() -> None:
        values = [
            x for x in pytree.tree_leaves(run(*inner_args, **inner_kwargs)) if isinstance(x, Tensor)
        ]
        for elem, value in zip(elems, values, strict=True):
            assert (elem.shape, elem.dtype) == (value.shape, value.dtype), func
            elem.copy_(value)

    seen.stream.put(Kernel(str(func), line, seen.stream, alone(compute)))
    seen.memory.access(seen.stream, reads.values(), [x.block for x in results], now)
    return made


def varying(run: Callable[..., Any], rng: random.Random) -> Callable[..., Any]:
    """Its floats are larger by one in the last place, or not, as is drawn."""

    def varied(*args: Any, **kwargs: Any) -> Any:
        made = run(*args, **kwargs)
        for x in pytree.tree_leaves(made):
            if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
                drawn = torch.rand(
                    x.shape, generator=torch.Generator().manual_seed(rng.getrandbits(32))
                )
                x.copy_(torch.where(drawn < 0.5, x * (1 + torch.finfo(x.dtype).eps), x))
        return made

    return varied


def alone(call: Callable[[], Any]) -> Callable[[], None]:
    def alone() -> None:
        with torch.no_grad(), disable_current_modes():
            call()

    return alone


def _call(run: Callable[..., Any], args: Any, kwargs: Any) -> Callable[[], None]:
    return alone(lambda: run(*args, **kwargs))


def _device(seen: Seen) -> torch.device:
    return torch.device("cuda", next(i for i, each in enumerate(here().seen) if each is seen))


def _allocated(like: Tensor, seen: Seen, made: Access) -> SimTensor:
    elem, block = seen.memory.allocate(seen.stream, like.shape, like.stride(), like.dtype, made)
    return SimTensor(elem, block, seen, _device(seen))


def _filled(value: Tensor, func: OpOverload, seen: Seen) -> SimTensor:
    """A result that was computed already."""
    now = Access(str(func), line_here(), f"{seen.device}, {seen.stream.name}")
    made = _allocated(value.contiguous(), seen, now)
    elem = made.elem
    seen.stream.put(Kernel(str(func), now.line, seen.stream, alone(lambda: elem.copy_(value))))
    seen.memory.access(seen.stream, [], [made.block], now)
    return made


def _resized(x: SimTensor, size: tuple[int, ...]) -> SimTensor:
    """Of an empty one alone the size is not fixed in C++."""
    if x.elem.numel() and x.shape != size:
        raise NotImplementedError(f"resize_ of a simulated tensor with elements ({line_here()})")
    if x.shape == size:
        return x
    now = Access("aten.resize_", line_here(), f"{x.seen.device}, {x.seen.stream.name}")
    made = _allocated(torch.empty(size, dtype=x.dtype, device="meta"), x.seen, now)
    x.elem, x.block = made.elem, made.block
    return x


def _inner(values: Any) -> Any:
    return pytree.tree_map_only(SimTensor, lambda x: x.elem, values)


def _meta(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """The results on "meta"."""

    def meta(x: Tensor) -> Tensor:
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")

    if "device" in kwargs or not any(isinstance(x, Tensor) for x in pytree.tree_leaves(args)):
        kwargs = {**kwargs, "device": torch.device("meta")}
    return func(
        *pytree.tree_map_only(Tensor, meta, args), **pytree.tree_map_only(Tensor, meta, kwargs)
    )


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[SimTensor]:
    arguments = func._schema.arguments
    named = [(a, kwargs[a.name]) for a in arguments if a.name in kwargs]
    return [
        x
        for argument, value in (*zip(arguments, args), *named)
        if argument.alias_info is not None and argument.alias_info.is_write
        for x in pytree.tree_leaves(value)
        if isinstance(x, SimTensor)
    ]


# -- copies between devices ------------------------------------------------------------------------


def _copied(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten.copy_.default:
        to, source = args[0], args[1]
        waits = not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking")
        if not isinstance(to, SimTensor):
            return _to_host(to, source, waits)
        _put_copy(to, source, waits)
        return to
    source, asked = args[0], kwargs.get("device")
    target = None if asked is None else torch.device(asked)
    waits = not kwargs.get("non_blocking")
    rest = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking", "pin_memory")}
    if isinstance(source, SimTensor) and target is not None and target.type == "cpu":
        like = _meta(func, (source,), rest)
        with disable_current_modes():
            to = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        return _to_host(to, source, waits)
    seen = source.seen if target is None else here().of(target)
    like = _meta(func, (source,), rest)
    now = Access(str(func), line_here(), f"{seen.device}, {seen.stream.name}")
    made = _allocated(like, seen, now)
    _put_copy(made, source, waits)
    return made


def _to_host(to: Tensor, source: SimTensor, waits: bool) -> Tensor:
    stream, elem = source.seen.stream, source.elem
    now = Access("copy to the host", line_here(), f"{source.seen.device}, {stream.name}")
    stream.put(Kernel(now.what, now.line, stream, alone(lambda: to.copy_(elem))))
    source.seen.memory.access(stream, [source.block], [], now)
    if waits or not is_pinned(to):
        host_wait("copy to the host", stream)
    return to


def _put_copy(to: SimTensor, source: Tensor, waits: bool) -> None:
    elem, seen, between, waited = to.elem, to.seen, False, False
    if isinstance(source, SimTensor):
        value, reads, what = source.elem, [source.block], "copy_"
        between = source.seen is not seen
        if between:  # on the source's stream, between waits of both: ATen/native/cuda/Copy.cu
            what = "copy between GPUs"
            _cross(seen, source.seen)
            seen = source.seen
    else:
        pinned = is_pinned(source)
        with disable_current_modes():
            value = source if pinned else source.clone()  # pageable: staged before the call returns
        reads, what, waited = list[Block](), "copy from the host", waits or not pinned
    stream = seen.stream
    now = Access(what, line_here(), f"{seen.device}, {stream.name}")
    stream.put(Kernel(what, now.line, stream, alone(lambda: elem.copy_(value))))
    to.seen.memory.access(stream, reads, [to.block], now)
    if between:
        _cross(seen, to.seen)
    if waited:
        host_wait(what, stream)


def _cross(source: Seen, to: Seen) -> None:
    last = source.stream.last
    to.stream.follow(source.stream.clock)
    if last is not None and not last.is_done:
        to.stream.put(
            Kernel(f"waits for {last.what}", last.line, to.stream, None, lambda: last.is_done)
        )


def is_pinned(x: Tensor) -> bool:
    """Of the host's memory, as `pin_memory` marked it."""
    return getattr(x, "_dtensor_pinned", False)
