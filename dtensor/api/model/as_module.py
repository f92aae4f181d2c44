"""Methods of `nn.Module` that a parallelized module has too, or refuses with a fix.

model.to(torch.bfloat16)       # casts model.module in place; returns the model
model.to("cuda")               # PlanningError: a launch states the device of the ranks
model(x)                       # TypeError: wrap the call in dt.compile
AveragedModel(model)           # TypeError: AveragedModel(model.module)
"""

from __future__ import annotations

import copy
import sys
from typing import Any, NoReturn, Self

import torch
from torch import nn

from dtensor.errors import PlanningError, pickling_error


class AsModule:
    """The methods of `nn.Module` that a parallelized model has: they act on ``module`` or raise."""

    module: nn.Module

    def train(self, mode: bool = True) -> Self:
        """Put the module in training mode, as in torch."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Put the module in evaluation mode, as in torch."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set ``requires_grad`` of all parameters, as in torch."""
        self.module.requires_grad_(requires_grad)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Cast the module to a dtype, as in torch. Raises PlanningError for a GPU: a launch states
        the device of the ranks, and the module stays on the controller."""
        values = (*args, *kwargs.values())
        for device in (x for x in values if isinstance(x, str | int | torch.device)):
            if isinstance(device, bool):  # non_blocking, copy
                continue
            if isinstance(device, int) or torch.device(device).type != "cpu":
                raise _device_error(f"to({device!r})")
        self.module.to(*args, **kwargs)
        return self

    def cuda(self, device: object = None) -> Self:
        """Raises PlanningError: a launch states the device of the ranks."""
        raise _device_error("cuda()")

    def cpu(self) -> Self:
        """Return the model: its module is on the CPU."""
        return self.to("cpu")

    def float(self) -> Self:
        """Cast the module to float32."""
        return self.to(torch.float32)

    def double(self) -> Self:
        """Cast the module to float64."""
        return self.to(torch.float64)

    def half(self) -> Self:
        """Cast the module to float16."""
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        """Cast the module to bfloat16."""
        return self.to(torch.bfloat16)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "a parallelized model cannot be called directly; wrap the call in dt.compile, or "
            "call it in the loss_fn of dt.train_step.\n"
            "fix: dt.compile(lambda model, x: model(x), mesh)(model, x)"
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "a parallelized module generates on its ranks: gen = dt.generator(model, slots=8, "
            "length=256), then gen(prompts, max_new_tokens=64); model.module.generate runs here"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a model over a copy of the module. Raises TypeError in torch's AveragedModel,
        which would find no parameters and silently average nothing."""
        if sys._getframe(2).f_globals.get("__name__") == "torch.optim.swa_utils":
            raise TypeError(
                "AveragedModel finds no parameters in a parallelized model: its module has them.\n"
                "fix: AveragedModel(model.module), and update_parameters(model.module) after a step"
            )
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce__(self) -> NoReturn:
        raise pickling_error(
            f"a parallelized {type(self.module).__name__} cannot be pickled",
            'dt.save("checkpoint", model, optimizer); torch.save(model.state_dict(), "model.pt"); '
            "or pickle model.module",
        )


def _device_error(call: str) -> PlanningError:
    return PlanningError(
        f"model.{call} does not move a parallelized model: its shards are where the ranks are, and "
        f"a launch says on which device.\n"
        f'fix: leave model.{call} out; dt.launch(mesh, device="cuda")'
    )
