"""What people call on an `nn.Module` and a parallelized one has too, or refuses with what to write.

    model.to(torch.bfloat16)       # of its module, in place; gives the model
    model.to("cuda")               # PlanningError: a launch says which device the ranks have
    model(x)                       # TypeError: wrap the call in dt.compile
    AveragedModel(model)           # TypeError: AveragedModel(model.module)

Not here: what a parallelized module is (parallel.py).
"""

from __future__ import annotations

import copy
import sys
from typing import Any, NoReturn, Self

import torch
from torch import nn

from dtensor.errors import PlanningError, not_pickled


class AsModule:
    """Methods of `nn.Module`, by those of ``module``; what gives the module gives the model."""

    module: nn.Module

    def train(self, mode: bool = True) -> Self:
        """As torch's: puts the module in training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """As torch's: puts the module in evaluation mode."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As torch's, of all parameters."""
        self.module.requires_grad_(requires_grad)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """As torch's for a dtype. PlanningError for a device: a launch says which the ranks have,
        and the module stays where it is."""
        given = (*args, *kwargs.values())
        for device in (x for x in given if isinstance(x, str | int | torch.device)):
            number = isinstance(device, int)  # of a GPU; or a flag
            if isinstance(device, bool):
                continue
            if number or torch.device(device).type != "cpu":
                raise _moved(f"to({device!r})")
        self.module.to(*args, **kwargs)
        return self

    def cuda(self, device: object = None) -> Self:
        """Raises PlanningError: see `to`."""
        raise _moved("cuda()")

    def cpu(self) -> Self:
        """As torch's."""
        return self.to("cpu")

    def float(self) -> Self:
        """As torch's."""
        return self.to(torch.float32)

    def double(self) -> Self:
        """As torch's."""
        return self.to(torch.float64)

    def half(self) -> Self:
        """As torch's."""
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        """As torch's."""
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
        """Another model, of a copy of the module. TypeError in torch's AveragedModel, which would
        find no parameters in it and average nothing without a word."""
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
        raise not_pickled(
            f"a parallelized {type(self.module).__name__} cannot be pickled",
            'dt.save("checkpoint", model, optimizer); torch.save(model.state_dict(), "model.pt"); '
            "or pickle model.module",
        )


def _moved(call: str) -> PlanningError:
    return PlanningError(
        f"model.{call} does not move a parallelized model: its shards are where the ranks are, and "
        f"a launch says on which device.\n"
        f'fix: leave model.{call} out; dt.launch(mesh, device="cuda")'
    )
