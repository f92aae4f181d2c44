"""`Loss`: the result of a training step, a future.

loss = step(tokens, targets)     # a Loss; the step may still run
loss.done()                      # False
float(loss)                      # waits for the step; raises its error if it failed
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dtensor.api.step import loss_scale
from dtensor.api.step.plan_call import Planned
from dtensor.api.store.session import MeshSession
from dtensor.api.values.reads_as_float import ReadsAsFloat
from dtensor.daft import DaftError, Future, TaskError
from dtensor.frontend.call_lock import CALL_LOCK


class Loss(ReadsAsFloat):
    """A step's loss, which may still be on its way. Reading it waits and raises what failed.

    ``float(loss)``; ``loss.metrics`` (what loss_fn returned beside it, name to float);
    ``loss.grad_norm`` (before clipping; None without ``clip_grad_norm`` or ``grad_scaler``);
    ``loss.tensor()``; ``loss.skipped``, once it was read: whether a gradient was not finite, so
    that a ``grad_scaler`` has backed off, and the step has changed nothing. It is NaN then.
    It adds, compares and prints as a float does, each of which reads it.
    """

    def __init__(
        self,
        future: Future,
        planned: Planned,
        session: MeshSession,
        ended: Callable[[bool], None],
        line: str | None,
    ) -> None:
        self._line = line  # of `train_step`, where an instruction has none
        self._future = future
        self._planned = planned
        self._session = session
        self._ended: Callable[[bool], None] | None = ended  # is told once whether it ended well
        self.was_read: bool = False
        self.skipped: bool = False

    def _get(self) -> list[dict[str, torch.Tensor]]:
        """What each rank returned."""
        was_read = self.was_read
        try:
            self.was_read = True
            return self.wait()
        except DaftError as error:
            self._session.launch.failure_was_read |= self._session.cluster.failure is not None
            if isinstance(error, TaskError) and self._line is not None:
                error.locate(self._line)
            raise self._session.told(error) from error.__cause__
        except BaseException:  # an interrupt, which has read nothing
            self.was_read = was_read
            raise

    def wait(self) -> list[dict[str, torch.Tensor]]:
        """What each rank returned; does not count as reading it."""
        if self.skipped:
            return []
        try:
            results = self._future.get()
        except DaftError as error:
            if self._session.cluster.failure is None:
                self.skipped = self._planned.is_scaled and loss_scale.is_overflow(error)
                self._tell(well=False)
            if self.skipped:
                return []
            raise
        self._tell(well=True)
        return results

    def _tell(self, *, well: bool) -> None:
        if self._ended is None:
            return
        with CALL_LOCK:
            ended, self._ended = self._ended, None
            if ended is not None:
                ended(well)

    def _result(self, index: int) -> torch.Tensor:
        name = f"result {index}"
        flow = self._planned.plan.flow
        value = next(o.value for o in flow.outputs if o.kind == "result" and o.of == index)
        ranks = self._get()
        if self.skipped:
            return torch.tensor(math.nan)
        for results in ranks:
            if name in results:  # a sum over microbatches of 16 bits comes in float32
                return results[name].to(flow.metas[value].dtype)
        raise AssertionError(f"no rank returned {name}")

    def done(self) -> bool:
        """Whether reading would not wait."""
        return self._future.done()

    def tensor(self) -> torch.Tensor:
        """The loss as a scalar CPU tensor; NaN of a step that was skipped."""
        if not self._planned.is_scaled:
            return self._result(0)
        return self._every()[1][loss_scale.UNSCALED]

    def _every(self) -> Any:
        """As loss_fn has returned it."""
        count = sum(1 for o in self._planned.plan.outputs if o.kind == "result")
        return self._planned.graph.unflatten([self._result(i) for i in range(count)])

    def item(self) -> float:
        """The loss as a float."""
        return float(self)

    def cpu(self) -> torch.Tensor:
        """As `tensor`."""
        return self.tensor()

    def detach(self) -> Loss:
        """Itself, unread: it has no graph behind it."""
        return self

    @property
    def metrics(self) -> dict[str, float]:
        """What loss_fn returned beside the loss, of the whole batch; {} where nothing."""
        outputs = self._every()
        if not isinstance(outputs, tuple):
            return {}
        own = loss_scale.UNSCALED if self._planned.is_scaled else None
        return {name: float(value) for name, value in outputs[1].items() if name != own}

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the gradients before clipping; None without ``clip_grad_norm`` or
        ``grad_scaler``, and of a step that was skipped."""
        for results in self._get():
            if "norm" in results:
                return float(results["norm"])
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

    def __str__(self) -> str:
        return f"{float(self)}{self._beside()}"

    def __repr__(self) -> str:
        return f"Loss({float(self):.6g}{self._beside()})" if self.done() else "Loss(running)"

    def _beside(self) -> str:
        """The metrics, where there are any."""
        metrics = ", ".join(f"{name}={value:.6g}" for name, value in self.metrics.items())
        return metrics and f" ({metrics})"
