"""What a program for CUDA sees of devices, while it is captured on fake CPU tensors.

    x.device, x.is_cuda                    ->  device("cuda", 0), True
    x.cuda(), x.to("cuda"), x.to(y.device) ->  x: all of a program is on its device
    torch.arange(8, device=x.device)       ->  on the CPU, as all that is captured

A rank sees one GPU, its own, so the index is 0. A device that a call is given is the CPU to it
where it is the program's; any other stays, and torch refuses it. Not here: torch.cuda, which asks
this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dtensor.frontend.call_lock import is_capturing
from dtensor.frontend.capture.thread_patches import replaced
from dtensor.private_torch import DisableTorchFunction, FakeTensor, function_modes

_TENSOR: Any = torch.Tensor
_CPU = torch.device("cpu")
Call = tuple[tuple[Any, ...], dict[str, Any]]


class DevicesOfCalls:
    """``device``: the type of the program's, which is not "cpu"."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device, 0)

    def answer(self, func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any] | None:
        """What a question about a tensor's device gives, in a tuple; None for any other call."""
        if func == _TENSOR.device.__get__:  # of a tensor that is no fake one
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

    def on_the_cpu(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, in which the program's device is the CPU."""
        if func is torch.device:
            return args, dict(kwargs)
        moved = [self._moved(value) for value in args]
        if func is _TENSOR.to and len(args) > 1:
            moved[1] = self._moved(self._device(args[1]))
        named = {name: self._moved(value) for name, value in kwargs.items()}
        if "device" in named:
            named["device"] = self._moved(self._device(named["device"]))
        return tuple(moved), named

    def _device(self, value: Any) -> Any:
        """As torch reads what stands for a device."""
        match value:
            case int():
                return torch.device(self.device.type, value)
            case str():
                return torch.device(value)
            case _:
                return value

    def _moved(self, value: Any) -> Any:
        is_ours = isinstance(value, torch.device) and value.type == self.device.type
        return _CPU if is_ours else value

    @contextmanager
    def of_fakes(self, mode: TorchFunctionMode) -> Iterator[None]:
        """Within, fake tensors say it to who asks while the mode is in force: to the program. Their
        device is an attribute in Python, which no mode sees."""
        plain: Any = vars(FakeTensor)["device"]

        def said(x: FakeTensor) -> torch.device:
            if is_capturing() and mode in function_modes():
                return self.device
            return plain.fget(x)

        with replaced([(FakeTensor, "device", property(said, plain.fset))]):
            yield


class DevicesAlone(TorchFunctionMode):
    """Within, nothing else is seen of what a function of torch's asks and moves."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.devices = DevicesOfCalls(device)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        answered = self.devices.answer(func, args)
        if answered is not None:
            return answered[0]
        args, kwargs = self.devices.on_the_cpu(func, args, kwargs or {})
        with DisableTorchFunction():
            return func(*args, **kwargs)
