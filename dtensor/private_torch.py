"""All private names of torch that dtensor uses, without their underscores.

    from dtensor.private_torch import FakeTensorMode, OpOverload, pytree

A new version of torch may move or change any of these names; `make versions` tests each supported
version. A name whose import would load torch's compiler is returned by a function.

Other files use no private names of torch, except ops (``torch.ops.aten._softmax``), an op's
``_schema``, the functions that a capture patches (frontend/capture/patches.py) and the settings of
kernels (kernel_flags.py). Ray's private names are in daft/ray/bootstrap/private_ray.py.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._C._functorch import get_unwrapped as get_unwrapped
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
from torch._functorch import eager_transforms as eager_transforms
from torch._functorch import predispatch as predispatch
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack as temporarily_clear_interpreter_stack,
)
from torch._library.custom_ops import OPDEFS as OPDEFS
from torch._library.custom_ops import CustomOpDef as CustomOpDef
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._ops import _OpNamespace
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
)
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.autograd import forward_ad as forward_ad
from torch.fx.graph import _Namespace
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.transformer import _detect_is_causal_mask
from torch.overrides import _get_current_function_mode_stack as function_modes  # noqa: F401
from torch.utils import _pytree
from torch.utils._mode_utils import no_dispatch as no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
)

BatchNorm = _BatchNorm
detect_is_causal_mask = _detect_is_causal_mask
Namespace = _Namespace
OpNamespace = _OpNamespace
disable_current_modes = _disable_current_modes
dispatch_modes = _get_current_dispatch_mode_stack
pop_dispatch_mode = _pop_mode
pytree = _pytree

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
pop_function_mode = _C._pop_torch_function_stack
functorch_depth = _C._functorch.get_dynamic_layer_stack_depth
pop_functorch_levels = _C._functorch.pop_dynamic_layer_stack_and_undo_to_depth

_torch: Any = torch  # its type stubs lack some names

# -- C++'s side of torch ---------------------------------------------------------------------------

TensorBase: Any = _C.TensorBase
DisableTorchFunction: Any = _C.DisableTorchFunction
DisableTorchFunctionSubclass: Any = _C.DisableTorchFunctionSubclass
below_autograd: Any = _C._AutoDispatchBelowAutograd
current_graph_task_id: Any = _C._current_graph_task_id
dispatch_dump: Any = _C._dispatch_dump
dispatch_get_all_op_names: Any = _C._dispatch_get_all_op_names
dispatch_has_kernel_for_dispatch_key: Any = _C._dispatch_has_kernel_for_dispatch_key
get_operation_overload: Any = _C._get_operation_overload
get_tracing_state: Any = _C._get_tracing_state
set_tracing_state: Any = _C._set_tracing_state
is_alias_of: Any = _C._is_alias_of
cuda_bindings: Any = _C
disabled_torch_function: Any = _C._disabled_torch_function_impl
jit_get_schemas_for_operator: Any = _C._jit_get_schemas_for_operator
make_subclass: Any = _torch.Tensor._make_subclass
make_wrapper_subclass: Any = _torch.Tensor._make_wrapper_subclass


def keys_of(device_type: str) -> Any:
    """Return the dispatch keys with which `OpOverload.redispatch` calls the kernel for this type of
    device, wherever the arguments are."""
    return _C.DispatchKeySet(getattr(_C.DispatchKey, _C._dispatch_key_for_device(device_type)))


# -- kernels ---------------------------------------------------------------------------------------

foreach_add_: Any = _torch._foreach_add_
foreach_copy_: Any = _torch._foreach_copy_
pack_padded: Any = _torch._pack_padded_sequence
pad_packed: Any = _torch._pad_packed_sequence
fused_adam_: Any = _torch._fused_adam_
fused_adamw_: Any = _torch._fused_adamw_
fused_sgd_: Any = _torch._fused_sgd_
gelu: Any = _C._nn.gelu
silu: Any = _C._nn.silu
flash_attention_for_cpu: Any = _torch._scaled_dot_product_flash_attention_for_cpu

# -- loaded at the first use -----------------------------------------------------------------------

_COMPILER = "torch._dynamo"


@contextmanager
def without_compiler() -> Generator[None]:
    """Keep torch's optimizers from loading torch's compiler, which takes 1 s, within the block.

    The optimizers use the compiler only to mark functions that it must not compile. If the compiler
    is already loaded, nothing changes.
    """
    if _COMPILER in sys.modules:
        yield
        return
    disabled: list[Any] = []

    def disable(function: Any, *_: object, **__: object) -> Any:
        disabled.append(function)
        return function

    stand_in: Any = ModuleType(_COMPILER)
    stand_in.graph_break, stand_in.disable = (lambda: None), disable
    sys.modules[_COMPILER] = torch._dynamo = stand_in
    try:
        yield
    finally:
        del sys.modules[_COMPILER], torch._dynamo
        for function in disabled:  # so that it is marked again once the compiler is loaded
            vars(function).pop("__dynamo_disable", None)


@contextmanager
def without_trace() -> Generator[None]:
    """Turn off torch's structured trace within the block, unless TORCH_TRACE asks for it.

    torch writes the trace if its logger has any handler. pytest attaches a handler to it, so each
    failing test would show the empty lines of the trace.
    """
    log = logging.getLogger("torch.__trace")
    is_wanted = any(getattr(handler, "root_dir", None) for handler in log.handlers)
    before, log.disabled = log.disabled, log.disabled or not is_wanted
    try:
        yield
    finally:
        log.disabled = before


def decomposition_table() -> Any:
    """Return torch's decompositions of ops below autograd: {overload: function}."""
    from torch._decomp import global_decomposition_table

    return global_decomposition_table["post_autograd"]


def node_of_tensor(x: torch.Tensor) -> tuple[Any, Any]:
    """Return the node of a tensor in the graph that is being traced, and the module that holds the
    graph's constants; (None, None) if the tensor is not traced."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    if mode is None or (slot := get_proxy_slot(x, mode.tracer, None)) is None:
        return None, None
    return slot.proxy.node, mode.tracer.root


def aot_descriptors() -> Any:
    """Return the module with the classes of ``meta["desc"]`` in a joint graph."""
    from torch._functorch._aot_autograd import descriptors

    return descriptors


def export_trace() -> Any:
    """Return torch.export's module that creates fake inputs and guards."""
    from torch.export import _trace

    return _trace


def symbol_source(name: str) -> Any:
    """Return torch's record of the origin of a symbol in a shape. Here it is only a name."""
    from torch._dynamo.source import ConstantSource

    return ConstantSource(name)


def compile_lock() -> Any:
    """Return the lock that torch.compile holds while it compiles."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def flatten_state_dict() -> Any:
    """Return torch.distributed.checkpoint's function that names the entries of nested dicts."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return flatten_state_dict


def cpp_compiler() -> Any:
    """Return `get_cpp_compiler`, and the exception that it raises if there is no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    return get_cpp_compiler, InvalidCxxCompiler


def standalone_compile(settings: Mapping[str, object]) -> Any:
    """Return torch's function that compiles one graph, and a context with these settings of the
    compiler; a setting that this version of torch lacks is left out."""
    from torch._inductor import config, standalone_compile

    known: Any = config._config  # type: ignore[attr-defined]
    return standalone_compile, config.patch({k: v for k, v in settings.items() if k in known})


def loaded_artifact(path: str) -> Callable[[list[Any]], Any]:
    """Return the function of an artifact of `standalone_compile`. It takes its arguments out of the
    list that it gets."""
    from torch._inductor.standalone_compile import CompiledArtifact

    artifact: Any = CompiledArtifact.load(path=path, format="binary")
    inner = inspect.getclosurevars(artifact._compiled_fn).nonlocals.get("compiled_fn")
    return inner or (lambda values: artifact(*values))
