"""Records how a model on the meta device initialises its parameters and buffers.

    recorded = record(model, "reset", key)        # each module's own reset_parameters
    recorded = record(model, init_weights, key)   # those, then init_weights(model)
    recorded = record(model, lambda: GPT(config), key)     # the constructor, once more
    recorded["embed.weight"]                      # Recipe: normal_(0, 1)

Nothing is computed: ops run on meta tensors and are recorded. A tensor's recipe has the ops on
which its last value depends: an op that writes all of a storage without reading it makes earlier
ops irrelevant. Random ops are numbered within their parameter, so adding or removing a layer
changes no other layer.

Invariants: torch.nn.init works as on real tensors (`is_meta` is False meanwhile). An op that cannot
be recorded, or would need too large a tensor whole, is an error that names the parameter; so is a
read of unfilled memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dtensor.errors import PlanningError
from dtensor.frontend.capture.refusals import planning_error
from dtensor.frontend.graph import first_names, named_tensors
from dtensor.frontend.initial.recipe import Fill, InitStep, Recipe, StorageView
from dtensor.frontend.source import source_here
from dtensor.private_torch import OpOverload, TorchDispatchMode, pytree
from dtensor.sharding.ops.philox import Key

Init = Literal["reset"] | Callable[..., Any]
MAX_CONSTANT = 1 << 20  # elements
MAX_WHOLE = 1 << 24  # elements that one rank may make whole, to keep a part of them
_EMPTY = {"empty", "empty_like", "new_empty"} | {
    f"{new}empty_{how}" for new in ("", "new_") for how in ("strided", "permuted")
}
_TRUNCATED = nn.init._no_grad_trunc_normal_
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray}


@runtime_checkable
class _Resets(Protocol):
    def reset_parameters(self) -> None: ...


def record(module: nn.Module, init: Init, key: Callable[[str], int]) -> dict[str, Recipe]:
    """A recipe for each parameter and buffer on the meta device, by name; aliases share one.

    Args:
        key: from a parameter's name to the 63-bit key of its random numbers.
    """
    recorder = InitRecorder()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        truncated = mock.patch.object(nn.init, "_no_grad_trunc_normal_", recorder.truncated)
        for mode in (truncated, recorder, _AsIfReal()):
            stack.enter_context(mode)
        built = _run(module, init, stack)
    names, tensors = first_names(module), named_tensors(built)
    recipes: dict[str, Recipe] = {}
    for name, tensor in named_tensors(module).items():
        if not tensor.is_meta:
            continue
        first = names[name]
        if first not in recipes:
            made = tensors.get(first)
            if made is None or made.shape != tensor.shape or made.dtype != tensor.dtype:
                raise planning_error(
                    f"init= builds a model without {first} as this model has it.",
                    f"here: {list(tensor.shape)} {tensor.dtype}",
                    f"there: {'none' if made is None else (list(made.shape), made.dtype)}",
                    source=None,
                    fix="pass a callable that builds the same model, or init='reset'",
                )
            recipes[first] = recorder.recipe(first, made, key)
        recipes[name] = recipes[first]
    return recipes


def _run(module: nn.Module, init: Init, stack: ExitStack) -> nn.Module:
    """Run the initialisation; returns the module whose tensors were initialised."""
    if callable(init) and not _takes_arguments(init):
        stack.enter_context(torch.device("meta"))
        built = init()
        if not isinstance(built, nn.Module):
            raise PlanningError(
                f"init= without arguments gave {type(built).__name__}, not a module; "
                f"fix: init=lambda: GPT(config), or a function of the model"
            )
        return built
    # Parts before the whole, as constructors do; a tied weight keeps the values of its first
    # module.
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


class _AsIfReal(TorchFunctionMode):
    """Tensors say that they are not on the meta device, and those made from data keep it.

    torch.nn.init skips meta tensors, and torch.tensor writes its data without any dispatch.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func in _FROM_DATA and _is_on_meta(kwargs) and not isinstance(args[0], Tensor):
            value = func(*args, **{**kwargs, "device": "cpu"})
            return torch.empty_like(value, device="meta").copy_(value)
        return func(*args, **kwargs)


@dataclass(slots=True)
class _Memory:
    """A storage while recording: the last step that wrote it, the bytes that have values."""

    storage: torch.UntypedStorage  # alive, as its address is its name
    number: int
    last: tuple[int, ...] = ()
    filled: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def is_filled(self, extent: tuple[int, int]) -> bool:
        start, stop = extent
        for low, high in sorted(self.filled):
            if low <= start:
                start = max(start, high)
        return start >= stop


class InitRecorder(TorchDispatchMode):
    """Writes down every op on meta tensors that makes or changes one."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[InitStep] = []
        self.after: list[set[int]] = []  # by step, the steps on which it builds
        self.memories: dict[int, _Memory] = {}  # by address
        self.keys: dict[int, Key] = {}  # of random steps: of the first parameter that needs one
        self.hollow: set[int] = set()  # steps that read unfilled memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            out = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not _meta_tensors((args, kwargs)):
                raise
            raise planning_error(
                "The initialisation depends on a tensor's value, which a model on the meta device "
                "does not have.",
                f"{func}: {str(error).splitlines()[0]}",
                source=source_here(),
                fix="initialise from random numbers and constants alone",
            ) from error
        op = func._schema.name.removeprefix("aten::")
        schema = func._schema.arguments
        given = {a.name: a.default_value for a in schema}
        given |= dict(zip(given, args, strict=False)) | kwargs
        tensors = _meta_tensors((args, kwargs))
        known = {self.memory(t).number for t in tensors}
        written = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
        changed = _meta_tensors([given[name] for name in written])
        made = _meta_tensors(out)
        anew = not changed and any(self.memory(t).number not in known for t in made)
        if changed or (anew and op not in _EMPTY):
            target, operands = func, (args, kwargs)
            fill = _fill_of(op, given)
            if fill is not None:
                target, *numbers = fill
                operands = (*(changed or made), *numbers), {}
            self.note(op, target, operands, tensors, changed or made, anew=anew)
        return out

    def truncated(
        self, tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Tensor:
        """Replaces torch's trunc_normal_, whose rejections depend on values."""
        if tensor.device.type != "meta":
            return _TRUNCATED(tensor, mean, std, a, b, generator)
        operands = (tensor, mean, std, a, b), {}
        self.note("truncated_normal", "truncated", operands, [tensor], [tensor], anew=False)
        return tensor

    def note(
        self,
        op: str,
        target: OpOverload | Fill,
        operands: tuple[tuple[Any, ...], dict[str, Any]],
        tensors: list[Tensor],
        writes: list[Tensor],
        *,
        anew: bool,
    ) -> None:
        """Record a step that takes ``tensors``, and changes ``writes`` or makes them anew."""
        number, source = len(self.steps), source_here()
        args, kwargs = pytree.tree_map(self.encoded, operands)
        fills = isinstance(target, str)
        self.steps.append(
            InitStep(
                op=op,
                target=target,
                args=args,
                kwargs=kwargs,
                made=tuple(map(self.view, writes)) if anew and not fills else (),
                source=f"{source}: {source.text.strip()}" if source else "",
            )
        )
        reads = [(self.memory(t), self.view(t)) for t in tensors if all(t is not w for w in writes)]
        if not fills and not all(memory.is_filled(view.extent) for memory, view in reads):
            self.hollow.add(number)
        only_writes = fills or _is_random(target) or op in ("copy_", "fill_") or "out" in kwargs
        self.after.append({i for memory, _ in reads for i in memory.last})
        for memory, view in [(self.memory(t), self.view(t)) for t in writes]:
            part = only_writes and view.in_order and len(writes) == 1
            alone = all(memory is not read for read, _ in reads)
            whole = anew or (part and alone and view.extent == (0, view.storage_bytes))
            if not whole:
                self.after[number].update(memory.last)
            memory.last = (number,)
            extent = (0, view.storage_bytes) if whole else view.extent
            if (whole or part) and not memory.is_filled(extent):
                memory.filled.append(extent)

    def encoded(self, value: Any) -> Any:
        match value:
            case Tensor() if value.device.type == "meta":
                return self.view(value)
            case Tensor():
                return _small(value)
            case _:
                return value

    def memory(self, t: Tensor) -> _Memory:
        storage = t.untyped_storage()
        number = len(self.memories)
        return self.memories.setdefault(storage._cdata, _Memory(storage, number))

    def view(self, t: Tensor) -> StorageView:
        memory = self.memory(t)
        return StorageView(
            storage=memory.number,
            storage_bytes=memory.storage.nbytes(),
            size=tuple(t.shape),
            stride=tuple(t.stride()),
            offset=int(t.storage_offset()),
            dtype=t.dtype,
            in_order=t.is_contiguous(),
        )

    # -- the recipes -------------------------------------------------------------------------

    def kept(self, memory: _Memory) -> list[int]:
        """The steps on which its last value depends, in order."""
        needed, ahead = set[int](), list(memory.last)
        while ahead:
            i = ahead.pop()
            if i not in needed:
                needed.add(i)
                ahead += self.after[i]
        return sorted(needed)

    def recipe(self, name: str, tensor: Tensor, key: Callable[[str], int]) -> Recipe:
        """The recipe of the tensor's present value."""
        memory, view = self.memory(tensor), self.view(tensor)

        def refused(fact: str, step: InitStep | None, fix: str) -> PlanningError:
            lines = [step.source] if step is not None and step.source else []
            operand = f"{name}: {list(view.size)} {view.dtype}"
            return planning_error(fact, operand, *lines, source=None, fix=fix)

        def cannot(step: InitStep | None, why: str) -> PlanningError:
            return refused(
                f"The initialisation of {name} cannot be done shard by shard: "
                f"{'a view' if step is None else step.op} {why}.",
                step,
                "initialise it element by element (normal_, uniform_, trunc_normal_, zero_, "
                "fill_), or load it with dt.load_state_dict",
            )

        steps: list[InitStep] = []
        num_random = 0
        for i in self.kept(memory):
            step = self.steps[i]
            if i in self.hollow:
                raise refused(
                    f"The initialisation of {name} reads memory that nothing has filled.",
                    step,
                    "fill it first; an index that is data is torch.tensor([0, 2]), not [0, 2]",
                )
            if _is_random(step.target):
                if step.kwargs.get("generator") is not None:
                    raise cannot(step, "draws from its own generator")
                raise cannot(step, "draws random numbers that have no counter")
            if isinstance(step.target, str) and step.target != "constant":
                random_key = self.keys.setdefault(i, Key(key(name), 0, num_random))
                num_random += 1
                step = replace(step, key=random_key)
            steps.append(step)
        if not memory.is_filled((0, view.storage_bytes)):
            raise refused(
                f"Nothing initialises all of {name}, which is on the meta device.",
                next(iter(steps), None),
                "give its module a reset_parameters, or pass init=lambda: Model(config), which "
                "records the constructor",
            )
        recipe = Recipe(name=name, view=view, steps=tuple(steps))
        storages = {v.storage: v.storage_bytes // v.dtype.itemsize for s in steps for v in s.views}
        if sum(storages.values()) > MAX_WHOLE and not recipe.split:
            needs = next((step for step in steps if not step.splits(view.size)), None)
            raise cannot(needs, "needs the whole tensor")
        return recipe


def _fill_of(op: str, given: dict[str, Any]) -> tuple[Any, ...] | None:
    """The fill of an op, and its numbers; None for an op that is no fill."""
    if given.get("generator") is not None:
        return None
    match op:
        case "zero_" | "zeros" | "zeros_like" | "new_zeros":
            return "constant", 0
        case "ones" | "ones_like" | "new_ones":
            return "constant", 1
        case "full" | "full_like" | "new_full":
            return "constant", given["fill_value"]
        case "fill_" if not isinstance(given["value"], Tensor):
            return "constant", given["value"]
        case "normal_":
            return "normal", given["mean"], given["std"]
        case "randn" | "randn_like":
            return "normal", 0.0, 1.0
        case "uniform_":
            return "uniform", given["from"], given["to"]
        case "rand" | "rand_like":
            return "uniform", 0.0, 1.0
        case _:
            return None


def _is_random(target: OpOverload | Fill) -> bool:
    return not isinstance(target, str) and torch.Tag.nondeterministic_seeded in target.tags


def _is_on_meta(kwargs: dict[str, Any]) -> bool:
    return torch.device(kwargs.get("device") or "cpu").type == "meta"


def _meta_tensors(value: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(value)
    return [t for t in leaves if isinstance(t, Tensor) and t.device.type == "meta"]


def _small(value: Tensor) -> Tensor:
    if value.numel() > MAX_CONSTANT:
        raise planning_error(
            "The initialisation copies from a tensor too large to be sent to every rank.",
            f"{list(value.shape)} {value.dtype}, above {MAX_CONSTANT} elements",
            source=source_here(),
            fix="load it with dt.load_state_dict, which sends each rank its shard",
        )
    return value.detach().cpu().clone()
