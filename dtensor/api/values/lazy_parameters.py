"""Lazy remote values: a tensor, or an optimizer's state, whose first read or write fetches them.

    evict(net.weight, holder, "weight")          # the same object; its memory is no longer read
    net.weight.shape                             # no fetch
    net.weight.sum()                             # holder.bring((net.weight,)), then torch's sum
    type(net.weight)                             # nn.Parameter again

A lazy tensor has another class, and torch calls that class before any operation on such a tensor.
Requests for a shape, a dtype or a gradient are answered without a fetch. Any other operation
touches the value, as a read, a write or both: the holder fetches the value into the tensor's own
memory and makes it a plain tensor again, and then the operation runs. So views, `.data`,
`.numpy()`, deepcopy, pickle and fused kernels see current values, and tensors keep their identity.

A holder whose values are lost raises; then only a write of the whole tensor (`copy_`, as in
`load_state_dict`) works, without them.

Reads of torch below that hook are not seen: `torch.tensor(p)`, `p` under `torch.func.grad`, memory
that others share (docs/state.md lists them). Not here: the objects that hold values (home.py).
"""

from __future__ import annotations

import copy
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from dtensor.errors import PlanningError
from dtensor.frontend.call_lock import CALL_LOCK
from dtensor.private_torch import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    TensorBase,
    disable_current_modes,
    get_tracing_state,
    pytree,
    set_tracing_state,
    temporarily_clear_interpreter_stack,
)


class ValueHolder(Protocol):
    """The object that holds values."""

    @property
    def gone(self) -> str:
        """Why the values are lost for good, or ""."""
        ...

    def bring(self, tensors: Sequence[Tensor]) -> None:
        """Make the tensors plain, with current memory. RuntimeError if ``gone``."""
        ...

    def give_up(self, tensor: Tensor) -> None:
        """Make the tensor plain without a fetch: all of it is about to be written."""
        ...


@dataclass(frozen=True, slots=True)
class _Whereabouts:
    holder: ValueHolder
    label: str
    kind: type[Tensor]  # the class of the plain tensor


class LazyTensor:
    """The first base of a tensor's class while its value is remote."""

    _whereabouts: _Whereabouts
    _kind: type[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """`type(p)(data)` returns a tensor of the plain class."""
        return cls._kind(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS_NOTHING and not (func == Tensor.type and len(args) + len(kwargs) > 1):
            if func == _GRAD:
                _asked_for_gradient()
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if func in _WRITES_ALL and isinstance(first, LazyTensor) and first._whereabouts.holder.gone:
            return _write_all(func, first, args, kwargs)
        if not fault_in((args, kwargs)):
            raise RuntimeError(
                f"{func} reads a parameter whose value is on the ranks, where it cannot be fetched "
                f"(for example under torch.compile).\n"
                f"fix: module.state_dict() before, which fetches all until the next step"
            )
        return func(*args, **kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Torch does not call the hook for it; `parametrize.register_parametrization` calls it."""
        fault_in((self, args, kwargs))
        return Tensor.set_(self, *args, **kwargs)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_home(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _home(self).__reduce_ex__(protocol)

    def __repr__(self, **options: Any) -> str:
        return repr(_home(self))


def evict(tensor: Tensor, holder: ValueHolder, label: str) -> None:
    """Make the tensor lazy: ``holder`` has the value, under the name ``label``."""
    kind = tensor._whereabouts.kind if isinstance(tensor, LazyTensor) else type(tensor)
    if not isinstance(tensor, LazyTensor):
        tensor.__class__ = _away_kind(kind)
    tensor._whereabouts = _Whereabouts(holder, label, kind)  # type: ignore[attr-defined]


def make_plain(tensor: Tensor) -> None:
    """Make the tensor plain again, with the present contents of its memory."""
    assert isinstance(tensor, LazyTensor)
    kind = tensor._whereabouts.kind
    del tensor._whereabouts
    tensor.__class__ = kind  # type: ignore[assignment]


def holder_of(tensor: Tensor) -> ValueHolder | None:
    """The holder of the value; None for a plain tensor."""
    return tensor._whereabouts.holder if isinstance(tensor, LazyTensor) else None


def label_of(tensor: Tensor) -> str:
    assert isinstance(tensor, LazyTensor)
    return tensor._whereabouts.label


def fault_in(values: Any) -> bool:
    """Fetch the lazy tensors in a pytree; returns whether there were any."""
    away = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, LazyTensor)]
    with CALL_LOCK:
        for holder, tensors in by_holder(away):
            holder.bring(tensors)
    return bool(away)


def by_holder(tensors: Iterable[Any]) -> list[tuple[ValueHolder, list[Tensor]]]:
    """The lazy tensors, each once, by their holders."""
    tensors_by_holder: dict[int, tuple[ValueHolder, dict[int, Tensor]]] = {}
    for tensor in tensors:
        if isinstance(tensor, LazyTensor):
            holder = tensor._whereabouts.holder
            tensors_by_holder.setdefault(id(holder), (holder, {}))[1][id(tensor)] = tensor  # type: ignore[assignment]
    return [(holder, list(held.values())) for holder, held in tensors_by_holder.values()]


@contextmanager
def plainly() -> Iterator[None]:
    """Within, lazy tensors are read and written without a fetch, and no mode of torch's (fake
    tensors, a default device, vmap, jit.trace) changes the operations."""
    with ExitStack() as stack:
        tracing = get_tracing_state()
        stack.callback(set_tracing_state, tracing)  # type: ignore[attr-defined]
        set_tracing_state(None)  # type: ignore[attr-defined]
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(disable_current_modes())
        stack.enter_context(DisableTorchFunction())
        stack.enter_context(torch.no_grad())
        yield


def as_it_is() -> Any:
    """Within, own code reads shapes and the like of tensors without the hook."""
    return DisableTorchFunctionSubclass()


@cache
def _away_kind(kind: type[Tensor]) -> type[Any]:
    name = f"Away{kind.__name__}"
    return types.new_class(name, (LazyTensor, kind), exec_body=lambda own: own.update(_kind=kind))


def _home(tensor: Any) -> Any:
    fault_in(tensor)
    return tensor


def _write_all(
    func: Callable[..., Any], tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Write all of the tensor without its lost values; it stays lazy if torch refuses."""
    fault_in((args[1:], kwargs))
    where: _Whereabouts = tensor._whereabouts
    make_plain(tensor)
    try:
        result = func(*args, **kwargs)
    except BaseException:
        evict(tensor, where.holder, where.label)
        raise
    where.holder.give_up(tensor)
    return result


def _asked_for_gradient() -> None:
    """PlanningError if torch's own clipping reads the gradient: it would find none, and silently
    clip nothing. Other readers outside torch get a warning, once per line; torch's own `zero_grad`
    gets none."""
    asks: types.FrameType | None = sys._getframe(2)
    name = asks.f_globals.get("__name__", "")
    if not name.startswith("torch."):
        warnings.warn(
            "the parameter's .grad is None: its value is on the ranks, and so was its gradient, "
            "which the step has consumed.\n"
            "fix: step.gradients(*batch), or dt.train_step(..., keep_gradients=True) and "
            "step.gradients()",
            stacklevel=3,
        )
    if name == "torch.nn.utils.clip_grad":
        while asks is not None and not asks.f_code.co_name.startswith("clip_"):
            asks = asks.f_back  # a comprehension, or a helper
        name = asks.f_code.co_name if asks is not None else "clip_grad"
        raise PlanningError(
            f"torch.nn.utils.{name} finds no gradients: they are on the ranks, and the step has "
            f"consumed them\n"
            f"fix: dt.train_step(..., clip_grad_norm=1.0), which clips within the step; "
            f"step.gradients(*batch) returns them"
        )


# -- operations without a fetch
# ------------------------------------------------------------------------------

_PROPERTIES = """
    shape dtype device requires_grad is_leaf grad grad_fn ndim layout names output_nr retains_grad
    itemsize nbytes _version _backward_hooks _post_accumulate_grad_hooks is_cpu is_cuda is_ipu
    is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr
    is_vulkan is_xla is_xpu
"""
# Not dim and is_floating_point: they are vmap's and jvp's last reads before they wrap the present
# tensor.
_METHODS = """
    size ndimension numel nelement stride is_complex is_signed element_size
    __len__ register_hook register_post_accumulate_grad_hook __hash__ requires_grad_ get_device
    is_contiguous storage_offset is_same_size is_conj is_neg is_inference type
"""
_FOUND = {**vars(TensorBase), **vars(Tensor)}  # those that this torch has
_ASKS_NOTHING = frozenset(
    {
        *(_FOUND[name].__get__ for name in _PROPERTIES.split() if name in _FOUND),
        *(_FOUND[name] for name in _METHODS.split() if name in _FOUND),
        *(_FOUND[name].__set__ for name in ("grad", "requires_grad")),
        _FOUND["grad"].__delete__,
        torch.numel,
        torch.is_complex,
        torch.is_signed,
        torch.is_same_size,
    }
)
_GRAD = _FOUND["grad"].__get__
_WRITES_ALL = frozenset(
    {Tensor.copy_, Tensor.fill_, Tensor.zero_, Tensor.normal_, Tensor.uniform_}
    | {_FOUND["data"].__set__}
)


# -- the state of an optimizer ---------------------------------------------------------------------

Entries = dict[Tensor, dict[str, Any]]


class LazyOptimizerState(MutableMapping[Tensor, dict[str, Any]]):
    """torch's ``optimizer.state``, parameter to its entries, while the ranks have it.

    ``stale``: the ranks have newer entries than ``entries``; ``on_disk``: or files have them, until
    the first read; ``touched``: the user has read them, and may have written; ``gone``: why they
    are lost for good, or "".
    """

    def __init__(
        self, entries: Entries, fetch: Callable[[], Entries], on_disk: Entries | None = None
    ) -> None:
        self.entries: Entries = entries
        self.fetch = fetch
        self.on_disk = on_disk
        self.stale: bool = on_disk is not None
        self.touched: bool = False
        self.gone = ""

    def refresh(self) -> Entries:
        """The current entries; it does not count as a touch. RuntimeError if they are lost."""
        if self.gone:
            raise RuntimeError(self.gone)
        if self.stale:
            with CALL_LOCK:
                self.entries = self.fetch()
                self.stale, self.on_disk = False, None
        return self.entries

    def to_place(self) -> Entries:
        """The entries to put on ranks; for those on disk, their places in files."""
        return dict(self.refresh() if self.on_disk is None else self.on_disk)

    def changed(self) -> None:
        """From now on the ranks have newer entries."""
        self.stale = True
        self.entries = {}

    def plain(self) -> defaultdict[Tensor, Any]:
        """A current state of torch's class; it does not count as a touch."""
        return defaultdict(dict, self.refresh())

    def _looked(self) -> Entries:
        self.touched = True
        return self.refresh()

    def __getitem__(self, key: Tensor) -> dict[str, Any]:
        return self._looked().setdefault(key, {})

    def __setitem__(self, key: Tensor, value: dict[str, Any]) -> None:
        self._looked()[key] = value

    def __delitem__(self, key: Tensor) -> None:
        del self._looked()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._looked()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._looked())

    def __len__(self) -> int:
        return len(self._looked())

    def __repr__(self) -> str:
        return repr(defaultdict(dict, self._looked()))

    def __deepcopy__(self, memo: dict[int, Any]) -> defaultdict[Tensor, Any]:
        return copy.deepcopy(defaultdict(dict, self._looked()), memo)

    def __copy__(self) -> defaultdict[Tensor, Any]:
        return defaultdict(dict, self._looked())

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self._looked()))
