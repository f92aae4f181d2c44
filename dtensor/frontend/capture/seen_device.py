"""Report CUDA devices to a program for CUDA that is captured on fake CPU tensors.

    x.device, x.is_cuda                     ->  device("cuda", 0), True
    x.cuda(), x.to("cuda"), x.to(y.device)  ->  x
    torch.arange(8, device=x.device)        ->  a fake tensor on the CPU

The index is 0 because each rank sees only one GPU. A device argument of the program's device type
is replaced by the CPU. Torch raises for other devices. torch.cuda.* functions still describe this
machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dtensor.frontend.call_lock import is_capturing
from dtensor.frontend.capture.thread_patches import patch_attributes
from dtensor.private_torch import DisableTorchFunction, FakeTensor, function_modes

_TENSOR: Any = torch.Tensor
_CPU = torch.device("cpu")
Call = tuple[tuple[Any, ...], dict[str, Any]]


class ProgramDevice:
    """Answers questions about devices. ``device``: the program's device type ("cuda")."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device, 0)

    def answer(self, func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any] | None:
        """Return a 1-tuple with the result of a call that asks for the device of a tensor or moves
        a tensor to the program's device; None for any other call."""
        if func == _TENSOR.device.__get__:  # `patch_fake_tensors` answers for fake tensors
            return (self.device,)
        if func == _TENSOR.is_cuda.__get__:
            return (self.device.type == "cuda",)
        if func == _TENSOR.is_cpu.__get__:
            return (False,)
        if func is _TENSOR.get_device:
            return (self.device.index,)
        if func is _TENSOR.cuda:
            return (args[0],)
        if func is _TENSOR.type and len(args) == 1:
            with DisableTorchFunction():
                return (args[0].type().replace("torch.", f"torch.{self.device.type}."),)
        return None

    def replace_devices(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with the program's device replaced by the CPU."""
        if func is torch.device:
            return args, dict(kwargs)
        new_args = [self._replace_device(value) for value in args]
        if func is _TENSOR.to and len(args) > 1:
            new_args[1] = self._replace_device(self._as_device(args[1]))
        new_kwargs = {name: self._replace_device(value) for name, value in kwargs.items()}
        if "device" in new_kwargs:
            new_kwargs["device"] = self._replace_device(self._as_device(new_kwargs["device"]))
        return tuple(new_args), new_kwargs

    def _as_device(self, value: Any) -> Any:
        """Convert an index or name of a device to a device, as torch does."""
        match value:
            case int():
                return torch.device(self.device.type, value)
            case str():
                return torch.device(value)
            case _:
                return value

    def _replace_device(self, value: Any) -> Any:
        is_program_device = isinstance(value, torch.device) and value.type == self.device.type
        return _CPU if is_program_device else value

    @contextmanager
    def patch_fake_tensors(self, mode: TorchFunctionMode) -> Iterator[None]:
        """In this context, `x.device` of a fake tensor is the program's device while ``mode`` is
        active. `FakeTensor.device` is a Python property, which modes do not intercept."""
        original: Any = vars(FakeTensor)["device"]

        def reported_device(x: FakeTensor) -> torch.device:
            if is_capturing() and mode in function_modes():
                return self.device
            return original.fget(x)

        with patch_attributes([(FakeTensor, "device", property(reported_device, original.fset))]):
            yield


class DeviceMode(TorchFunctionMode):
    """A mode that only applies `ProgramDevice`; code of torch runs under it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.devices = ProgramDevice(device)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        answered = self.devices.answer(func, args)
        if answered is not None:
            return answered[0]
        args, kwargs = self.devices.replace_devices(func, args, kwargs or {})
        with DisableTorchFunction():
            return func(*args, **kwargs)
