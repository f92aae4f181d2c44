"""Lazy remote values: a tensor, or an optimizer's state, whose first read or write fetches them.

    evict(net.weight, holder, "weight")          # the same object; its memory is no longer read
    net.weight.shape                             # no fetch
    net.weight.sum()                             # holder.bring((net.weight,)), then torch's sum
    type(net.weight)                             # nn.Parameter again

A lazy tensor has a class whose `__torch_function__` torch calls before any operation. Shapes,
dtypes and gradients need no fetch. For any other operation, the holder (store/home.py) first writes
the value into the tensor's memory and makes the tensor plain again. If the value is lost, only a
write of the full tensor works, such as `copy_` in `load_state_dict`. Reads below this hook are not
noticed: docs/state.md lists them.
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
    """An object that has the values of lazy tensors."""

    @property
    def gone(self) -> str:
        """Why the values are permanently lost, or ""."""
        ...

    def bring(self, tensors: Sequence[Tensor]) -> None:
        """Fetch the values and make the tensors plain. Raises RuntimeError if they are lost."""
        ...

    def give_up(self, tensor: Tensor) -> None:
        """Make the tensor plain without a fetch, because all of it is about to be written."""
        ...


@dataclass(frozen=True, slots=True)
class _Remote:
    holder: ValueHolder
    label: str
    kind: type[Tensor]  # the class of the plain tensor


class LazyTensor:
    """A base of a tensor's class while its value is remote."""

    _remote_value: _Remote
    _kind: type[Any]  # the class of the plain tensor

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a tensor of the plain class, for `type(p)(data)`."""
        return cls._kind(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a torch function: directly if it needs no value, else after fetching the values. A
        full write of a lost value needs no fetch."""
        kwargs = kwargs or {}
        if func in _WITHOUT_FETCH and not (func == Tensor.type and len(args) + len(kwargs) > 1):
            if func == _GET_GRAD:
                _check_gradient_read()
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if (
            func in _FULL_WRITES
            and isinstance(first, LazyTensor)
            and first._remote_value.holder.gone
        ):
            return _overwrite(func, first, args, kwargs)
        if not fault_in((args, kwargs)):
            raise RuntimeError(
                f"{func} reads a parameter whose value is on the ranks, where it cannot be fetched "
                f"(for example under torch.compile).\n"
                f"fix: module.state_dict() before, which fetches all until the next step"
            )
        return func(*args, **kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch the value first: torch does not call `__torch_function__` for `set_`, which
        `parametrize.register_parametrization` uses."""
        fault_in((self, args, kwargs))
        return Tensor.set_(self, *args, **kwargs)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_fetch(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _fetch(self).__reduce_ex__(protocol)

    def __repr__(self, **options: Any) -> str:
        return repr(_fetch(self))


def evict(tensor: Tensor, holder: ValueHolder, label: str) -> None:
    """Make the tensor lazy: ``holder`` has the value under ``label``."""
    kind = tensor._remote_value.kind if isinstance(tensor, LazyTensor) else type(tensor)
    if not isinstance(tensor, LazyTensor):
        tensor.__class__ = _lazy_class(kind)
    tensor._remote_value = _Remote(holder, label, kind)  # type: ignore[attr-defined]


def make_plain(tensor: Tensor) -> None:
    """Make the tensor plain again, with the present contents of its memory."""
    assert isinstance(tensor, LazyTensor)
    kind = tensor._remote_value.kind
    del tensor._remote_value
    tensor.__class__ = kind  # type: ignore[assignment]


def holder_of(tensor: Tensor) -> ValueHolder | None:
    """Return the holder of the value; None for a plain tensor."""
    return tensor._remote_value.holder if isinstance(tensor, LazyTensor) else None


def label_of(tensor: Tensor) -> str:
    assert isinstance(tensor, LazyTensor)
    return tensor._remote_value.label


def fault_in(values: Any) -> bool:
    """Fetch the lazy tensors in a pytree. Return whether there were any."""
    lazy = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, LazyTensor)]
    with CALL_LOCK:
        for holder, tensors in by_holder(lazy):
            holder.bring(tensors)
    return bool(lazy)


def by_holder(tensors: Iterable[Any]) -> list[tuple[ValueHolder, list[Tensor]]]:
    """Group the lazy tensors by holder, each tensor once."""
    groups: dict[int, tuple[ValueHolder, dict[int, Tensor]]] = {}
    for tensor in tensors:
        if isinstance(tensor, LazyTensor):
            holder = tensor._remote_value.holder
            groups.setdefault(id(holder), (holder, {}))[1][id(tensor)] = tensor  # type: ignore[assignment]
    return [(holder, list(group.values())) for holder, group in groups.values()]


@contextmanager
def without_fetch() -> Iterator[None]:
    """Return a context in which lazy tensors are read and written without a fetch, and no mode of
    torch (fake tensors, a default device, vmap, jit.trace) changes operations."""
    with ExitStack() as stack:
        tracing = get_tracing_state()
        stack.callback(set_tracing_state, tracing)  # type: ignore[attr-defined]
        set_tracing_state(None)  # type: ignore[attr-defined]
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(disable_current_modes())
        stack.enter_context(DisableTorchFunction())
        stack.enter_context(torch.no_grad())
        yield


def without_hook() -> Any:
    """Return a context in which reading shapes, dtypes and the like skips `__torch_function__`."""
    return DisableTorchFunctionSubclass()


@cache
def _lazy_class(kind: type[Tensor]) -> type[Any]:
    name = f"Away{kind.__name__}"
    return types.new_class(name, (LazyTensor, kind), exec_body=lambda body: body.update(_kind=kind))


def _fetch(tensor: Any) -> Any:
    fault_in(tensor)
    return tensor


def _overwrite(
    func: Callable[..., Any], tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``func``, which writes the full tensor, without fetching its lost value, and return the
    result. The tensor becomes plain, or stays lazy if ``func`` raises."""
    fault_in((args[1:], kwargs))
    remote: _Remote = tensor._remote_value
    make_plain(tensor)
    try:
        result = func(*args, **kwargs)
    except BaseException:
        evict(tensor, remote.holder, remote.label)
        raise
    remote.holder.give_up(tensor)
    return result


def _check_gradient_read() -> None:
    """Raise PlanningError if torch's gradient clipping reads ``.grad``, because it would silently
    clip nothing. Warn other readers outside torch, once per line."""
    reader: types.FrameType | None = sys._getframe(2)
    name = reader.f_globals.get("__name__", "")
    if not name.startswith("torch."):
        warnings.warn(
            "the parameter's .grad is None: its value is on the ranks, and so was its gradient, "
            "which the step has consumed.\n"
            "fix: step.gradients(*batch), or dt.train_step(..., keep_gradients=True) and "
            "step.gradients()",
            stacklevel=3,
        )
    if name == "torch.nn.utils.clip_grad":
        while reader is not None and not reader.f_code.co_name.startswith("clip_"):
            reader = reader.f_back  # a comprehension, or a helper
        name = reader.f_code.co_name if reader is not None else "clip_grad"
        raise PlanningError(
            f"torch.nn.utils.{name} finds no gradients: they are on the ranks, and the step has "
            f"consumed them\n"
            f"fix: dt.train_step(..., clip_grad_norm=1.0), which clips within the step; "
            f"step.gradients(*batch) returns them"
        )


# -- operations without a fetch --------------------------------------------------------------------

_PROPERTIES = """
    shape dtype device requires_grad is_leaf grad grad_fn ndim layout names output_nr retains_grad
    itemsize nbytes _version _backward_hooks _post_accumulate_grad_hooks is_cpu is_cuda is_ipu
    is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr
    is_vulkan is_xla is_xpu
"""
# dim and is_floating_point are missing on purpose: vmap and jvp read them last before they wrap the
# tensor, so the fetch must happen there.
_METHODS = """
    size ndimension numel nelement stride is_complex is_signed element_size
    __len__ register_hook register_post_accumulate_grad_hook __hash__ requires_grad_ get_device
    is_contiguous storage_offset is_same_size is_conj is_neg is_inference type
"""
_ATTRIBUTES = {**vars(TensorBase), **vars(Tensor)}  # of tensors in this version of torch
_WITHOUT_FETCH = frozenset(
    {
        *(_ATTRIBUTES[name].__get__ for name in _PROPERTIES.split() if name in _ATTRIBUTES),
        *(_ATTRIBUTES[name] for name in _METHODS.split() if name in _ATTRIBUTES),
        *(_ATTRIBUTES[name].__set__ for name in ("grad", "requires_grad")),
        _ATTRIBUTES["grad"].__delete__,
        torch.numel,
        torch.is_complex,
        torch.is_signed,
        torch.is_same_size,
    }
)
_GET_GRAD = _ATTRIBUTES["grad"].__get__
_FULL_WRITES = frozenset(
    {Tensor.copy_, Tensor.fill_, Tensor.zero_, Tensor.normal_, Tensor.uniform_}
    | {_ATTRIBUTES["data"].__set__}
)


# -- the state of an optimizer ---------------------------------------------------------------------

Entries = dict[Tensor, dict[str, Any]]


class LazyOptimizerState(MutableMapping[Tensor, dict[str, Any]]):
    """torch's ``optimizer.state`` (parameter -> its entries) while the ranks or files have it.

    entries: the entries on the controller. stale: newer entries are on the ranks, or in the files
    of ``on_disk``. touched: the user has read the state, and may have changed it. gone: why the
    entries are permanently lost, or "". by_text: entries under text keys, which stay here.
    """

    def __init__(
        self, entries: Entries, fetch: Callable[[], Entries], on_disk: Entries | None = None
    ) -> None:
        self.by_text: dict[Any, Any] = {k: v for k, v in entries.items() if isinstance(k, str)}
        self.entries: Entries = {k: v for k, v in entries.items() if not isinstance(k, str)}
        self.fetch = fetch
        self.on_disk = on_disk
        self.stale: bool = on_disk is not None
        self.touched: bool = False
        self.gone = ""

    def refresh(self) -> Entries:
        """Return the current entries, fetching them if they are stale. ``touched`` is unchanged.
        Raises RuntimeError if they are lost."""
        if self.gone:
            raise RuntimeError(self.gone)
        if self.stale:
            with CALL_LOCK:
                self.entries = self.fetch()
                self.stale, self.on_disk = False, None
        return self.entries

    def to_place(self) -> Entries:
        """Return the entries to put on ranks; if they are in files, their `OnDisk` records."""
        return {**self.by_text, **(self.refresh() if self.on_disk is None else self.on_disk)}

    def changed(self) -> None:
        """Record that the ranks have newer entries."""
        self.stale = True
        self.entries = {}

    def plain(self) -> defaultdict[Tensor, Any]:
        """Return the current entries in torch's class. ``touched`` is unchanged."""
        return defaultdict(dict, {**self.by_text, **self.refresh()})

    def _read(self) -> defaultdict[Tensor, Any]:
        self.touched = True
        return self.plain()

    def _dict_of(self, key: object) -> dict[Any, Any]:
        """Return the dict of the entries under keys of this kind, for reads and writes."""
        if isinstance(key, str):
            return self.by_text
        self.touched = True
        return self.refresh()

    def __getitem__(self, key: Tensor) -> dict[str, Any]:
        return self._dict_of(key).setdefault(key, {})

    def __setitem__(self, key: Tensor, value: dict[str, Any]) -> None:
        self._dict_of(key)[key] = value

    def __delitem__(self, key: Tensor) -> None:
        del self._dict_of(key)[key]

    def __contains__(self, key: object) -> bool:
        return key in self._dict_of(key)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return repr(self._read())

    def __deepcopy__(self, memo: dict[int, Any]) -> defaultdict[Tensor, Any]:
        return copy.deepcopy(self._read(), memo)

    def __copy__(self) -> defaultdict[Tensor, Any]:
        return self._read()

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self._read()))
