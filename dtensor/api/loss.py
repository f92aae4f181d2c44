"""What a training step returns: its loss, as a future that reads like a number.

    loss = step(tokens, targets)           # does not wait
    float(loss), loss.metrics, loss.grad_norm

Reading waits, and raises what failed. Not here: the step (training.py).
"""

from __future__ import annotations

import torch

from dtensor.api.plan_call import Planned
from dtensor.api.session import Session
from dtensor.daft import DaftError, Future


class Loss:
    """A step's loss, which may still be on its way. Reading it waits and raises what failed.

    ``float(loss)``; ``loss.metrics`` (what loss_fn returned beside it, name to float);
    ``loss.grad_norm`` (before clipping; None without ``clip_grad_norm``); ``loss.tensor()``.
    """

    def __init__(self, future: Future, planned: Planned, session: Session) -> None:
        self._future = future
        self._planned = planned
        self._session = session
        self.was_read = False

    def _get(self) -> list[dict[str, torch.Tensor]]:
        """What each rank returned."""
        self.was_read = True
        try:
            return self._future.get()
        except DaftError:
            self._session.failure_was_read = True
            raise

    def _result(self, index: int) -> torch.Tensor:
        name = f"result {index}"
        flow = self._planned.plan.flow
        value = next(o.value for o in flow.outputs if o.kind == "result" and o.of == index)
        for found in self._get():
            if name in found:  # a sum over microbatches of 16 bits comes in float32
                return found[name].to(flow.metas[value].dtype)
        raise AssertionError(f"no rank returned {name}")

    def done(self) -> bool:
        """Whether reading would not wait."""
        return self._future.done()

    def tensor(self) -> torch.Tensor:
        """The loss as a scalar CPU tensor."""
        return self._result(0)

    def item(self) -> float:
        return float(self)

    @property
    def metrics(self) -> dict[str, float]:
        count = sum(1 for o in self._planned.plan.outputs if o.kind == "result")
        tensors = [self._result(i) for i in range(count)]
        outputs = self._planned.graph.unflatten(tensors)
        if not isinstance(outputs, tuple):
            return {}
        return {name: float(value) for name, value in outputs[1].items()}

    @property
    def grad_norm(self) -> float | None:
        for found in self._get():
            if "norm" in found:
                return float(found["norm"])
        return None

    def backward(self) -> None:
        """Raises: the step has done it."""
        raise TypeError(
            "a step has run forward, backward and the optimizer already; fix: remove the call. "
            "To accumulate gradients, pass the batches as one, with "
            "schedule=dt.GPipe(microbatches=...)"
        )

    def __float__(self) -> float:
        return float(self.tensor())

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        return f"Loss({float(self):.6g})" if self.done() else "Loss(running)"
