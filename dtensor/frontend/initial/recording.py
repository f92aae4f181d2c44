"""Record how a model on the meta device initializes its parameters and buffers.

    recipes = record(model, "reset", key)         # call reset_parameters of each module
    recipes = record(model, init_weights, key)    # the same, then init_weights(model)
    recipes = record(model, lambda: GPT(config), key)     # run the constructor again
    recipes["embed.weight"]                       # Recipe: normal_(0, 1)

Ops run on meta tensors, so nothing is computed. A tensor's recipe has the ops on which its final
value depends; an op that overwrites a whole storage makes earlier ops irrelevant. Random ops are
numbered within their parameter: adding or removing a layer changes no other layer. An op that
cannot be recorded or needs too large a whole tensor raises an error, as does a read of unfilled
memory. In a recording `is_meta` is False, because torch.nn.init skips meta tensors.
"""

from __future__ import annotations

import inspect
import sys
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
MAX_CONSTANT = 1 << 20
"""Elements of the largest tensor that a recipe may copy from."""
MAX_WHOLE = 1 << 24
"""Elements that a rank may make in order to keep a part of them, if the recipe is not split."""
_EMPTY_OPS = {"empty", "empty_like", "new_empty"} | {
    f"{new}empty_{how}" for new in ("", "new_") for how in ("strided", "permuted")
}
_TRUNCATED = nn.init._no_grad_trunc_normal_
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray}


@runtime_checkable
class _Resets(Protocol):
    def reset_parameters(self) -> None: ...


def record(module: nn.Module, init: Init, key: Callable[[str], int]) -> dict[str, Recipe]:
    """Return a recipe for each parameter and buffer on the meta device, by name. All names of a
    tied tensor have the same recipe.

    Args:
        key: returns the 63-bit key of the random numbers of a parameter, given its name.
    """
    recorder = InitRecorder()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        truncated = mock.patch.object(nn.init, "_no_grad_trunc_normal_", recorder.truncated)
        for mode in (truncated, recorder, _AsIfReal()):
            stack.enter_context(mode)
        initialized = _initialize(module, init, stack)
    names, tensors = first_names(module), named_tensors(initialized)
    recipes: dict[str, Recipe] = {}
    for name, tensor in named_tensors(module).items():
        if not tensor.is_meta:
            continue
        first = names[name]
        if first not in recipes:
            result = tensors.get(first)
            if result is None or result.shape != tensor.shape or result.dtype != tensor.dtype:
                raise planning_error(
                    f"init= builds a model without {first} as this model has it.",
                    f"here: {list(tensor.shape)} {tensor.dtype}",
                    f"there: {'none' if result is None else (list(result.shape), result.dtype)}",
                    source=None,
                    fix="pass a callable that builds the same model, or init='reset'",
                )
            recipes[first] = recorder.recipe(first, result, key)
        recipes[name] = recipes[first]
    return recipes


def _initialize(module: nn.Module, init: Init, stack: ExitStack) -> nn.Module:
    """Run the initialization. Return the initialized module: ``module``, or a new module that
    ``init`` constructed."""
    if callable(init) and not _takes_arguments(init):
        stack.enter_context(torch.device("meta"))
        new_module = init()
        if not isinstance(new_module, nn.Module):
            raise PlanningError(
                f"init= without arguments gave {type(new_module).__name__}, not a module; "
                f"fix: init=lambda: GPT(config), or a function of the model"
            )
        hf = sys.modules.get("transformers")
        if hf is not None:  # its constructors leave out their initialisation on the meta device
            pretrained: list[Any] = [
                m for m in new_module.modules() if isinstance(m, hf.PreTrainedModel)
            ]
            for submodule in pretrained:  # of nested models, the outer one initializes the inner
                submodule.initialize_weights()
        return new_module
    # Submodules first, as in constructors. A tied weight keeps the values of its first module.
    for submodule in reversed(list(module.modules())):
        if isinstance(submodule, nn.MultiheadAttention):
            submodule._reset_parameters()
        elif isinstance(submodule, _Resets):
            submodule.reset_parameters()
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
    """Lets meta tensors say that `is_meta` is False, because torch.nn.init skips meta tensors, and
    records the data of torch.tensor(...), which torch writes without a dispatch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Report meta tensors as ordinary tensors, and keep data that constructors are given."""
        kwargs = kwargs or {}
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func in _FROM_DATA and _is_on_meta(kwargs) and not isinstance(args[0], Tensor):
            value = func(*args, **{**kwargs, "device": "cpu"})
            return torch.empty_like(value, device="meta").copy_(value)
        return func(*args, **kwargs)


@dataclass(slots=True)
class _Memory:
    """The state of a storage during a recording."""

    storage: torch.UntypedStorage  # kept alive, because its address identifies it
    number: int
    last_steps: tuple[int, ...] = ()  # the step that wrote to it last, if any
    filled: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # byte ranges

    def is_filled(self, extent: tuple[int, int]) -> bool:
        """Return whether the filled ranges cover this range of bytes."""
        start, stop = extent
        for low, high in sorted(self.filled):
            if low <= start:
                start = max(start, high)
        return start >= stop


class InitRecorder(TorchDispatchMode):
    """Records every op that creates or changes a meta tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[InitStep] = []
        self.dependencies: list[set[int]] = []  # the numbers of the steps on which a step depends
        self.memories: dict[int, _Memory] = {}  # by address
        self.keys: dict[int, Key] = {}  # of a random step; from the first parameter that needs it
        self.reads_unfilled: set[int] = set()  # steps that read unfilled memory

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
        arguments = {a.name: a.default_value for a in schema}
        arguments |= dict(zip(arguments, args, strict=False)) | kwargs
        inputs = _meta_tensors((args, kwargs))
        input_memories = {self.memory(t).number for t in inputs}
        written = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
        changed = _meta_tensors([arguments[name] for name in written])
        results = _meta_tensors(out)
        creates = not changed and any(self.memory(t).number not in input_memories for t in results)
        if changed or (creates and op not in _EMPTY_OPS):
            target, operands = func, (args, kwargs)
            fill = _fill_of(op, arguments)
            if fill is not None:
                target, *numbers = fill
                operands = (*(changed or results), *numbers), {}
            self.record(op, target, operands, inputs, changed or results, creates=creates)
        return out

    def truncated(
        self, tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Tensor:
        """Record trunc_normal_ as one step. Torch's version rejects values outside of the bounds,
        which meta tensors do not have."""
        if tensor.device.type != "meta":
            return _TRUNCATED(tensor, mean, std, a, b, generator)
        operands = (tensor, mean, std, a, b), {}
        self.record("truncated_normal", "truncated", operands, [tensor], [tensor], creates=False)
        return tensor

    def record(
        self,
        op: str,
        target: OpOverload | Fill,
        operands: tuple[tuple[Any, ...], dict[str, Any]],
        inputs: list[Tensor],
        writes: list[Tensor],
        *,
        creates: bool,
    ) -> None:
        """Record a step with input tensors ``inputs``. It changes or ``creates`` the tensors
        ``writes``."""
        number, source = len(self.steps), source_here()
        args, kwargs = pytree.tree_map(self.encode, operands)
        fills = isinstance(target, str)
        self.steps.append(
            InitStep(
                op=op,
                target=target,
                args=args,
                kwargs=kwargs,
                made=tuple(map(self.view, writes)) if creates and not fills else (),
                source=f"{source}: {source.text.strip()}" if source else "",
            )
        )
        reads = [(self.memory(t), self.view(t)) for t in inputs if all(t is not w for w in writes)]
        if not fills and not all(memory.is_filled(view.extent) for memory, view in reads):
            self.reads_unfilled.add(number)
        only_writes = fills or _is_random(target) or op in ("copy_", "fill_") or "out" in kwargs
        self.dependencies.append({i for memory, _ in reads for i in memory.last_steps})
        for memory, view in [(self.memory(t), self.view(t)) for t in writes]:
            fills_view = only_writes and view.in_order and len(writes) == 1
            is_read = any(memory is read_memory for read_memory, _ in reads)
            is_whole = view.extent == (0, view.storage_bytes)
            fills_storage = creates or (fills_view and not is_read and is_whole)
            if not fills_storage:
                self.dependencies[number].update(memory.last_steps)
            memory.last_steps = (number,)
            extent = (0, view.storage_bytes) if fills_storage else view.extent
            if (fills_storage or fills_view) and not memory.is_filled(extent):
                memory.filled.append(extent)

    def encode(self, value: Any) -> Any:
        match value:
            case Tensor() if value.device.type == "meta":
                return self.view(value)
            case Tensor():
                return _constant(value)
            case _:
                return value

    def memory(self, t: Tensor) -> _Memory:
        storage = t.untyped_storage()
        number = len(self.memories)
        return self.memories.setdefault(storage._cdata, _Memory(storage, number))

    def view(self, t: Tensor) -> StorageView:
        """Return the description of a meta tensor's storage range, shape and strides."""
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

    def needed_steps(self, memory: _Memory) -> list[int]:
        """Return the numbers of the steps on which the contents of a storage depend, in order."""
        needed, pending = set[int](), list(memory.last_steps)
        while pending:
            i = pending.pop()
            if i not in needed:
                needed.add(i)
                pending += self.dependencies[i]
        return sorted(needed)

    def recipe(self, name: str, tensor: Tensor, key: Callable[[str], int]) -> Recipe:
        """Return the recipe of the present value of a tensor. Raises PlanningError if memory is
        unfilled, or if the steps do not split and the tensor is too large."""
        memory, view = self.memory(tensor), self.view(tensor)

        def error(fact: str, step: InitStep | None, fix: str) -> PlanningError:
            lines = [step.source] if step is not None and step.source else []
            operand = f"{name}: {list(view.size)} {view.dtype}"
            return planning_error(fact, operand, *lines, source=None, fix=fix)

        def not_by_shard(step: InitStep | None, why: str) -> PlanningError:
            """Return the error for an initialisation that cannot be computed shard by shard."""
            return error(
                f"The initialisation of {name} cannot be done shard by shard: "
                f"{'a view' if step is None else step.op} {why}.",
                step,
                "initialise it element by element (normal_, uniform_, trunc_normal_, zero_, "
                "fill_), or load it with dt.load_state_dict",
            )

        steps: list[InitStep] = []
        num_random = 0
        for i in self.needed_steps(memory):
            step = self.steps[i]
            if i in self.reads_unfilled:
                raise error(
                    f"The initialisation of {name} reads memory that nothing has filled.",
                    step,
                    "fill it first; an index that is data is torch.tensor([0, 2]), not [0, 2]",
                )
            if _is_random(step.target):
                if step.kwargs.get("generator") is not None:
                    raise not_by_shard(step, "draws from its own generator")
                raise not_by_shard(step, "draws random numbers that have no counter")
            if isinstance(step.target, str) and step.target != "constant":
                random_key = self.keys.setdefault(i, Key(key(name), 0, num_random))
                num_random += 1
                step = replace(step, key=random_key)
            steps.append(step)
        if not memory.is_filled((0, view.storage_bytes)):
            raise error(
                f"Nothing initialises all of {name}, which is on the meta device.",
                next(iter(steps), None),
                "give its module a reset_parameters, or pass init=lambda: Model(config), which "
                "records the constructor",
            )
        recipe = Recipe(name=name, view=view, steps=tuple(steps))
        storages = {v.storage: v.storage_bytes // v.dtype.itemsize for s in steps for v in s.views}
        if sum(storages.values()) > MAX_WHOLE and not recipe.split:
            first = next((step for step in steps if not step.splits(view.size)), None)
            raise not_by_shard(first, "needs the whole tensor")
        return recipe


def _fill_of(op: str, arguments: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return the `Fill` that an op does, and its numbers; None for any other op."""
    if arguments.get("generator") is not None:
        return None
    match op:
        case "zero_" | "zeros" | "zeros_like" | "new_zeros":
            return "constant", 0
        case "ones" | "ones_like" | "new_ones":
            return "constant", 1
        case "full" | "full_like" | "new_full":
            return "constant", arguments["fill_value"]
        case "fill_" if not isinstance(arguments["value"], Tensor):
            return "constant", arguments["value"]
        case "normal_":
            return "normal", arguments["mean"], arguments["std"]
        case "randn" | "randn_like":
            return "normal", 0.0, 1.0
        case "uniform_":
            return "uniform", arguments["from"], arguments["to"]
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


def _constant(value: Tensor) -> Tensor:
    """Return a copy for the recipe. Raises PlanningError for more than `MAX_CONSTANT` elements."""
    if value.numel() > MAX_CONSTANT:
        raise planning_error(
            "The initialisation copies from a tensor too large to be sent to every rank.",
            f"{list(value.shape)} {value.dtype}, above {MAX_CONSTANT} elements",
            source=source_here(),
            fix="load it with dt.load_state_dict, which sends each rank its shard",
        )
    return value.detach().cpu().clone()
