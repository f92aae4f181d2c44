"""Records how a model on the meta device initialises its parameters and buffers.

    recorded = record(model, "reset", key)        # each module's own reset_parameters
    recorded = record(model, init_weights, key)   # those, then init_weights(model)
    recorded = record(model, lambda: GPT(config), key)     # the constructor, once more
    recorded["embed.weight"]                      # Recipe: normal_(0, 1)

Nothing is computed: ops run on meta tensors and are written down. A tensor's recipe is what is
left of them going back from it, an op that a later one overwrites left out. Random ops are numbered
within the parameter that they are drawn for, so a layer more or less changes no other layer.

Invariants: torch.nn.init works as on real tensors (`is_meta` is False meanwhile). What cannot be
written down, or would need too large a tensor whole, is an error that names the parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, Protocol, runtime_checkable
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor.errors import PlanningError
from dtensor.frontend.capture.refusals import planning_error
from dtensor.frontend.initial.recipe import Constant, Recipe, Step, View, truncated_normal
from dtensor.frontend.initial.slicing import Known, recipe_of
from dtensor.frontend.source import source_here

Init = Literal["reset"] | Callable[..., Any]
MAX_CONSTANT = 1 << 20  # elements
_EMPTY = {"empty", "empty_like", "new_empty"} | {
    f"{new}empty_{how}" for new in ("", "new_") for how in ("strided", "permuted")
}


@runtime_checkable
class _Resets(Protocol):
    def reset_parameters(self) -> None: ...


def record(
    module: nn.Module, init: Init, key: Callable[[str], int], names: Mapping[str, str]
) -> dict[str, Recipe]:
    """A recipe for each parameter and buffer on the meta device, by name; aliases share one.

    Args:
        key: from a parameter's name to the 63-bit key of its random numbers.
        names: every name to the first of the same tensor.
    """
    recorder = _Recorder()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_real_init(recorder))
        built = _run(module, init, stack)
    found = {**dict(built.named_parameters(remove_duplicate=False)), **dict(built.named_buffers())}
    known: Known = Known(recorder.steps, recorder.sizes, {})
    recipes: dict[str, Recipe] = {}
    for name, tensor in _meta_tensors(module).items():
        first = names[name]
        if first not in recipes:
            made = found.get(first)
            if made is None or made.shape != tensor.shape or made.dtype != tensor.dtype:
                raise planning_error(
                    f"init= builds a model without {first} as this model has it.",
                    f"here: {list(tensor.shape)} {tensor.dtype}",
                    f"there: {'none' if made is None else (list(made.shape), made.dtype)}",
                    source=None,
                    fix="pass a callable that builds the same model, or init='reset'",
                )
            recipes[first] = recipe_of(first, recorder.view(made), known, key)
        recipes[name] = recipes[first]
    return recipes


def _meta_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    return {name: t for name, t in tensors.items() if t.is_meta}


def _run(module: nn.Module, init: Init, stack: ExitStack) -> nn.Module:
    """Calls what initialises, and gives the module whose tensors were initialised."""
    if callable(init) and not _takes_arguments(init):
        stack.enter_context(torch.device("meta"))
        built = init()
        if not isinstance(built, nn.Module):
            raise PlanningError(
                f"init= without arguments gave {type(built).__name__}, not a module; "
                f"fix: init=lambda: GPT(config), or a function of the model"
            )
        return built
    # Parts before the whole, as constructors do; a tied weight keeps what its first module does.
    for part in reversed(list(module.modules())):
        if isinstance(part, nn.MultiheadAttention):
            part._reset_parameters()
        elif isinstance(part, _Resets):
            part.reset_parameters()
    if callable(init):
        init(module)
    elif init != "reset":
        raise PlanningError(f'init={init!r}: it is "reset", a function of the model, or a builder')
    return module


def _takes_arguments(fn: Callable[..., Any]) -> bool:
    parameters = inspect.signature(fn).parameters.values()
    return any(
        p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters
    )


@contextmanager
def _real_init(recorder: _Recorder) -> Iterator[None]:
    """torch.nn.init skips meta tensors and samples by rejection: here it does neither."""

    def truncated(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> torch.Tensor:
        recorder.note(truncated_normal, (tensor, mean, std, a, b), {}, (tensor,), made=False)
        return tensor

    with mock.patch.object(nn.init, "_no_grad_trunc_normal_", truncated), recorder, _NotMeta():
        yield


class _NotMeta(TorchFunctionMode):
    """Tensors say that they are not on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Writes down every op on meta tensors that makes or changes one."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.sizes: dict[int, tuple[int, torch.dtype]] = {}
        self.numbers: dict[int, int] = {}
        self.alive: list[Any] = []  # storages: their addresses are their names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            out = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not any(t.device.type == "meta" for t in _tensors((args, kwargs))):
                raise
            raise planning_error(
                "The initialisation depends on a tensor's value, which a model on the meta device "
                "does not have.",
                f"{func}: {str(error).splitlines()[0]}",
                source=source_here(),
                fix="initialise from random numbers and constants alone",
            ) from error
        results = [t for t in _tensors(out) if t.device.type == "meta"]
        if results and func._schema.name.removeprefix("aten::") not in _EMPTY:
            changed = _tensors(_changed(func, args, kwargs))
            before = {self.number(t) for t in _tensors((args, kwargs)) if t.device.type == "meta"}
            if changed:
                self.note(func, args, kwargs, tuple(changed), made=False)
            elif any(self.number(t) not in before for t in results):
                self.note(func, args, kwargs, tuple(results), made=True)
        return out

    def note(
        self, target: Any, args: Any, kwargs: Any, writes: tuple[torch.Tensor, ...], made: bool
    ) -> None:
        source = source_here()
        self.steps.append(
            Step(
                target=target,
                args=self.encode(args),
                kwargs=tuple((k, self.encode(v)) for k, v in kwargs.items()),
                writes=tuple(self.view(t) for t in writes),
                made=made,
                source=f"{source}: {source.text.strip()}" if source else "",
            )
        )

    def encode(self, value: Any) -> Any:
        match value:
            case torch.Tensor() if value.device.type == "meta":
                return self.view(value)
            case torch.Tensor():
                return Constant(_small(value))
            case tuple() | list():
                return tuple(self.encode(v) for v in value)
            case _:
                return value

    def number(self, t: torch.Tensor) -> int:
        storage = t.untyped_storage()
        if storage._cdata not in self.numbers:
            number = self.numbers[storage._cdata] = len(self.numbers)
            self.sizes[number] = (storage.nbytes() // t.dtype.itemsize, t.dtype)
            self.alive.append(storage)
        return self.numbers[storage._cdata]

    def view(self, t: torch.Tensor) -> View:
        number = self.number(t)
        return View(number, tuple(t.shape), tuple(t.stride()), int(t.storage_offset()), t.dtype)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _changed(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an op changes in place."""
    schema = func._schema.arguments
    values = {a.name: v for a, v in zip(schema, args, strict=False)} | kwargs
    return [
        values[a.name]
        for a in schema
        if a.alias_info is not None and a.alias_info.is_write and a.name in values
    ]


def _small(value: torch.Tensor) -> torch.Tensor:
    if value.numel() > MAX_CONSTANT:
        raise planning_error(
            "The initialisation copies from a tensor too large to be sent to every rank.",
            f"{list(value.shape)} {value.dtype}, above {MAX_CONSTANT} elements",
            source=source_here(),
            fix="load it with dt.load_state_dict, which sends each rank its shard",
        )
    return value.detach().cpu().clone()
