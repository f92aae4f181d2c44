"""One call of the user's function as an `nn.Module` of tensors only, made of fake parameters.

    loss_fn(model, tokens, targets)  ->  CallAsModule with child module_0 = model,
                                         forward(tokens, targets) -> flat tuple of tensors

`torch.export` takes a root module and tensors; the user has a function whose arguments are modules,
pytrees and numbers. The root module rebuilds the arguments, calls the function, flattens the result
and records its structure. During capture, and only for the thread that captures, parameters,
buffers and arguments are fake tensors on the CPU: a capture takes no memory and needs no GPU.

Invariants: other threads see the user's modules unchanged. `fake_state` restores them at its end.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.nn.utils.rnn import PackedSequence

from dtensor.errors import PlanningError, check_dense
from dtensor.frontend.call_lock import CaptureLocalDict, is_capturing
from dtensor.frontend.capture.autocast import Surrounding, autocast_region
from dtensor.frontend.capture.packed_sequences import StandIn
from dtensor.frontend.capture.refusals import (
    RefusalMode,
    assigned_attribute_error,
    buffer_grad_error,
    data_assignment_error,
    gradient_hooks_error,
    packed_data_error,
    planning_error,
    storing_hook,
)
from dtensor.frontend.capture.thread_patches import patch_attributes
from dtensor.frontend.graph import Arg, OutTree, type_text
from dtensor.frontend.guards.executed_code import CodeRecorder
from dtensor.frontend.guards.program_writes import ProgramWrites, is_alone
from dtensor.frontend.guards.raw_access import BACKWARD_HOOKS, PLAIN, has_hooks
from dtensor.frontend.guards.reached_state import Roots
from dtensor.frontend.guards.side_effects import Change, StateBefore
from dtensor.frontend.source import Source, source_of_callable
from dtensor.private_torch import FakeTensorMode, pytree

Grads = Literal["none", "loss", "tangents"]

_GLOBAL_BACKWARD_HOOKS = (
    torch_modules._global_backward_pre_hooks,
    torch_modules._global_backward_hooks,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatCall:
    """A call with flattened arguments. `args` describes the tensors among `leaves`. `modules` maps
    names of children of the root module to the user's modules, and `prefixes` maps them to the
    user's prefix ("" if there is one module). `roots` are the objects that guards start from."""

    fn: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    args: tuple[Arg, ...]
    modules: dict[str, nn.Module]
    prefixes: dict[str, str]
    roots: Roots

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.leaves[a.index] for a in self.args)


def flat_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    main: nn.Module | None = None,
) -> FlatCall:
    """Return the flattened call. ``main``: the module whose names get no prefix."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    names = leaf_names(fn, args, kwargs)
    assert len(names) == len(leaves)
    owner = fn.__self__ if isinstance(fn, MethodType) else fn
    modules: dict[str, nn.Module] = {"module": owner} if isinstance(owner, nn.Module) else {}
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, nn.Module) and not any(leaf is m for m in modules.values()):
            modules[name] = leaf
    # The parameters of a submodule are named by the outer module.
    inner = {id(s) for m in modules.values() for s in m.modules() if s is not m}
    roots = {k: m for k, m in modules.items() if id(m) not in inner}
    children = {f"module_{i}": m for i, m in enumerate(roots.values())}
    prefixes = {
        child: "" if len(roots) == 1 or root is main else name
        for child, (name, root) in zip(children, roots.items(), strict=True)
    }
    return FlatCall(
        fn=fn,
        leaves=tuple(leaves),
        spec=spec,
        args=tuple(
            Arg(i, names[i]) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)
        ),
        modules=children,
        prefixes=prefixes,
        roots=(
            *((prefixes[child], module) for child, module in children.items()),
            (str(getattr(fn, "__name__", type(fn).__name__)), fn),
            *(
                (names[i], leaf)
                for i, leaf in enumerate(leaves)
                if not isinstance(leaf, (torch.Tensor, nn.Module, *PLAIN))
            ),
        ),
    )


def leaf_names(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_leaf: Callable[[Any], bool] | None = None,
) -> list[str]:
    """Return a name for each leaf: the parameter of ``fn`` and the path inside the argument
    (`tokens`, `batch.0`, `batch.ids`)."""
    try:
        parameters = list(
            inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters.values()
        )
    except ValueError:  # a builtin without a signature
        parameters = []
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "arg")
    names: list[str] = []
    for path, _ in pytree.tree_flatten_with_path((args, kwargs), is_leaf=is_leaf)[0]:
        keys = [_key_text(k) for k in path]
        if keys[0] == "0":
            i = int(keys[1])
            head = positional[i] if i < len(positional) else f"{variadic}.{i - len(positional)}"
        else:
            head = keys[1]
        names.append(".".join([head, *keys[2:]]))
    return names


def _key_text(key: Any) -> str:
    match key:
        case pytree.SequenceKey(idx=idx):
            return str(idx)
        case pytree.MappingKey(key=name):
            return str(name)
        case pytree.GetAttrKey(name=name):
            return name
        case _:
            return str(key).strip(".[]'\"")


class _Notes:
    """What forward recorded. A separate object, because the export restores attributes of the root.
    ``changes``: the Python objects that the call changed; ``values``: pairs of a tensor whose value
    its Python read, and the value."""

    out_tree: OutTree

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.writes: ProgramWrites | None = None  # None until forward has run


class CallAsModule(nn.Module):
    """The root module that is exported. Its forward records the user's output tree in `notes`."""

    def __init__(
        self, call: FlatCall, grads: Grads, before: StateBefore, surrounding: Surrounding
    ) -> None:
        super().__init__()
        for name, module in call.modules.items():
            self.add_module(name, module)
        self.call = call
        self.grads = grads
        self.surrounding = surrounding
        self.before = before
        self.notes: _Notes = _Notes()
        self.recorder: CodeRecorder = CodeRecorder()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = list(self.call.leaves)
        for arg, tensor in zip(self.call.args, tensors, strict=True):
            leaves[arg.index] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.call.spec)
        tensors_before = _module_tensors(self.call)
        parameters = [tensor for tensor in tensors_before.values() if tensor is not None]
        watch = RefusalMode(self.recorder, parameters, tensors, self.surrounding.device)
        try:
            with self.recorder, watch, _device_context(watch), autocast_region(self.surrounding):
                out = self.call.fn(*args, **kwargs)
        finally:
            self.notes.writes = ProgramWrites(self.recorder, alone=self.before.alone and is_alone())
            self.notes.changes += filter(self.notes.writes.may, self.before.changes())
            self.notes.values += watch.values.pairs()
        if watch.assignments is not None:
            remaining = [*pytree.tree_leaves(out), *_module_tensors(self.call).values()]
            if (stale := watch.assignments.stale_at_end(remaining)) is not None:
                raise data_assignment_error(stale, source_of_callable(self.call.fn))
        self._check_assignments(tensors_before)
        if self.grads == "loss":
            self._check_loss(out)
        flat, spec = pytree.tree_flatten(out)
        if any(isinstance(leaf, (StandIn, PackedSequence)) for leaf in flat):
            raise packed_data_error(source=source_of_callable(self.call.fn))
        is_tensor = tuple(isinstance(leaf, torch.Tensor) for leaf in flat)
        self.notes.out_tree = OutTree(
            spec=spec,
            leaves=tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in flat),
            is_tensor=is_tensor,
        )
        results = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        # Torch gives no tangent to a result that is an input or another result, so each result is
        # cloned. simplify.py erases the clones.
        if self.grads == "loss":
            return (results[0].clone(), *(r.detach().clone() for r in results[1:]))
        return tuple(r.clone() for r in results)

    def _check_assignments(self, before: dict[tuple[str, str], torch.Tensor | None]) -> None:
        """Turn the assignment of a new tensor to a buffer into an in-place copy. Raises
        PlanningError if forward assigned any other attribute, because that assignment would be
        lost."""
        after = _module_tensors(self.call)
        source = source_of_callable(self.call.fn)
        if assigned := sorted(f"{path}{name}" for path, name in after.keys() - before.keys()):
            raise stored_tensor_error(self.call, assigned, source)
        modules = _modules_by_path(self.call)
        for (path, name), old in before.items():
            new = after.get((path, name))
            if new is old:
                continue
            shapes = [(x.shape, x.dtype) if x is not None else None for x in (old, new)]
            if name in modules[path]._parameters or old is None or shapes[0] != shapes[1]:
                raise stored_tensor_error(self.call, [f"{path}{name}"], source)
            assert new is not None
            if new.requires_grad:
                raise buffer_grad_error(f"{path}{name}", source)
            with torch.no_grad():
                old.copy_(new)
            modules[path]._buffers[name] = old

    def _check_loss(self, out: Any) -> None:
        """Raise PlanningError unless ``out`` is a scalar that requires grad, or (scalar, dict)."""
        source = source_of_callable(self.call.fn)
        loss, aux = out if isinstance(out, tuple) and len(out) == 2 else (out, {})
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            loss_attr = getattr(out, "loss", None)  # for example, a ModelOutput of transformers
            has_loss = isinstance(loss_attr, torch.Tensor) and loss_attr.dim() == 0
            raise planning_error(
                "A loss is one number: loss_fn returns a scalar or (scalar, {name: scalar}).",
                f"it returned {_returned_text(out)}",
                source=source,
                fix="return its loss, as in `return out.loss`"
                if has_loss
                else "reduce the loss inside loss_fn, as in loss.mean() or loss.sum()",
            )
        if not loss.requires_grad:
            raise planning_error(
                "The loss does not depend on any parameter that requires grad.",
                f"it returned {type_text(loss)}",
                source=source,
                fix="pass the model as an argument of loss_fn, and do not detach its output",
            )
        if not isinstance(aux, dict) or not all(
            isinstance(v, torch.Tensor) and v.dim() == 0 for v in aux.values()
        ):
            raise planning_error(
                "What loss_fn returns beside the loss is a dict of scalar tensors by name.",
                f"it returned {_returned_text(aux)}",
                source=source,
                fix="return (loss, {'accuracy': accuracy}), each value reduced to a scalar",
            )


def _device_context(watch: RefusalMode) -> AbstractContextManager[object]:
    """Return a context in which fake tensors report the program's device instead of the CPU."""
    return nullcontext() if watch.devices is None else watch.devices.patch_fake_tensors(watch)


def stored_tensor_error(call: FlatCall, names: Sequence[str], line: Source | None) -> PlanningError:
    """Return the error for attributes (``names``: paths) in which forward stores tensors.
    ``line``: the assignment, or None if unknown."""
    modules = _modules_by_path(call)
    for path in names:
        owner, dot, name = path.rpartition(".")
        module = modules.get(f"{owner}{dot}")
        if module is not None and (hook := storing_hook(module, name)) is not None:
            return assigned_attribute_error(names, source_of_callable(call.fn), hook)
    return assigned_attribute_error(names, line or source_of_callable(call.fn))


def _modules_by_path(call: FlatCall) -> dict[str, nn.Module]:
    """Return all modules by path. Paths end with a dot; the path of a root module may be ""."""
    return {
        f"{path}." if path else "": module
        for child, root in call.modules.items()
        for path, module in root.named_modules(prefix=call.prefixes[child])
    }


def _module_tensors(call: FlatCall) -> dict[tuple[str, str], torch.Tensor | None]:
    """Return the parameters and buffers that are not None, by module path and name."""
    return {
        (path, name): tensor
        for path, module in _modules_by_path(call).items()
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None
    }


def _returned_text(out: Any) -> str:
    match out:
        case torch.Tensor():
            return type_text(out)
        case dict():
            items = ", ".join(f"{k!r}: {_returned_text(v)}" for k, v in out.items())
            return f"{{{items}}}"
        case tuple() | list():
            return f"({', '.join(_returned_text(v) for v in out)})"
        case _:
            return f"{out!r} ({type(out).__name__})"


def refuse_hooks(call: FlatCall, grads: Grads) -> None:
    """Raise PlanningError if a module or tensor has hooks on gradients: capture calls none."""
    hooked: list[str] = []
    for path, module in _modules_by_path(call).items() if grads != "none" else ():
        attributes = vars(module)
        if any(attributes.get(kind) for kind in BACKWARD_HOOKS):
            hooked.append(path.rstrip(".") or type(module).__name__)
        for name, x in [*module._parameters.items(), *module._buffers.items()]:
            if x is not None and has_hooks(x):
                hooked.append(f"{path}{name}")
    if hooked or (grads != "none" and any(_GLOBAL_BACKWARD_HOOKS)):
        raise gradient_hooks_error(hooked or ["every module"], source_of_callable(call.fn))


@contextmanager
def fake_state(
    call: FlatCall, grads: Grads, mode: FakeTensorMode
) -> Iterator[tuple[torch.Tensor, ...]]:
    """In this context, modules hold fake parameters and buffers for this thread only; yields the
    fake tensor arguments. Other threads see the real ones, and their assignments persist."""
    fakes: dict[int, torch.Tensor] = {}

    def fake(x: torch.Tensor) -> torch.Tensor:
        with mode:
            y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
        grad = x.requires_grad and grads != "none"
        return nn.Parameter(y, grad) if isinstance(x, nn.Parameter) else y.requires_grad_(grad)

    modules = list({m: None for root in call.modules.values() for m in root.modules()})
    saved = [
        (module, name, tensor)
        for module in modules
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None
    ]
    for _, name, tensor in saved:
        check_dense(name, tensor)
    with thread_local_parameters(modules):
        for module, name, tensor in saved:
            if id(tensor) not in fakes:
                fakes[id(tensor)] = fake(tensor)
            setattr(module, name, fakes[id(tensor)])  # setattr updates the list of nn.LSTM, too
        # A tensor that is passed twice gets two fakes: the next call may pass two tensors.
        yield tuple(fake(t) for t in call.tensors)


@contextmanager
def thread_local_parameters(modules: Sequence[nn.Module]) -> Iterator[None]:
    """In this context, only the thread that captures sees the parameters and buffers that it
    assigns to the modules. The assignments are dropped at the end."""
    saved = [(vars(m), n, vars(m)[n]) for m in modules for n in ("_parameters", "_buffers")]
    try:
        for attributes, name, tensors in saved:
            attributes[name] = CaptureLocalDict(tensors)
        with patch_attributes([(nn.RNNBase, "_flat_weights", _FlatWeights())]):
            yield
    finally:
        for attributes, name, tensors in saved:
            attributes[name] = tensors


class _FlatWeights:
    """A descriptor for `_flat_weights`, the second list of parameters of nn.RNNBase modules. The
    thread that captures gets a copy of the list, because C++ kernels read the list directly."""

    def __init__(self) -> None:
        self._copies: dict[int, list[Any]] = {}

    def __get__(self, module: nn.Module | None, _kind: type) -> Any:
        if module is None:
            return self
        space = vars(module)
        if "_flat_weights" not in space:
            raise AttributeError("_flat_weights")
        if not is_capturing():
            return space["_flat_weights"]
        return self._copies.setdefault(id(module), list(space["_flat_weights"]))

    def __set__(self, module: nn.Module, value: list[Any]) -> None:
        if is_capturing() and "_flat_weights" in vars(module):
            self._copies[id(module)] = value
        else:
            vars(module)["_flat_weights"] = value
