"""`Loss`: the result of a training step, a future.

    loss = step(tokens, targets)     # a Loss; the step may still run
    loss.done()                      # False
    float(loss)                      # waits for the step

If the step failed, reading its loss raises the error.
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
    """The loss of a step that may still run. Reading it waits for the step, and raises its error.

    ``float(loss)`` and ``loss.tensor()`` are the value; ``loss.metrics`` the other results of
    loss_fn (name -> float); ``loss.grad_norm`` the norm of the gradients before clipping.
    ``loss.skipped`` is known once the loss was read: True if a gradient was not finite, so that the
    ``grad_scaler`` backed off and the step changed nothing; the loss is NaN then. A Loss adds,
    compares and prints like a float; each of these reads it.
    """

    def __init__(
        self,
        future: Future,
        planned: Planned,
        session: MeshSession,
        on_end: Callable[[bool], None],
        line: str | None,
    ) -> None:
        """Make the loss of a submitted step. ``on_end`` is called once: True means success."""
        self._line = line  # the user's line of `train_step`, for instructions without a line
        self._future = future
        self._planned = planned
        self._session = session
        self._on_end: Callable[[bool], None] | None = on_end
        self.was_read: bool = False
        self.skipped: bool = False

    def _read(self) -> list[dict[str, torch.Tensor]]:
        """Wait for the step and return each rank's results. Raises the error of a failed step."""
        was_read = self.was_read
        try:
            self.was_read = True
            return self.wait()
        except DaftError as error:
            self._session.launch.failure_was_read |= self._session.cluster.failure is not None
            if isinstance(error, TaskError) and self._line is not None:
                error.locate(self._line)
            raise self._session.with_loss_note(error) from error.__cause__
        except BaseException:  # an interrupt: the loss was not read
            self.was_read = was_read
            raise

    def wait(self) -> list[dict[str, torch.Tensor]]:
        """Wait for the step and return each rank's results, without marking the loss as read. []
        if the step was skipped. Raises the error of a failed step."""
        if self.skipped:
            return []
        try:
            results = self._future.get()
        except DaftError as error:
            if self._session.cluster.failure is None:
                self.skipped = self._planned.is_scaled and loss_scale.is_overflow(error)
                self._report_end(succeeded=False)
            if self.skipped:
                return []
            raise
        self._report_end(succeeded=True)
        return results

    def planned_results(self) -> tuple[Planned, list[dict[str, torch.Tensor]]]:
        """Return the plan of the step, and each rank's results after waiting for them."""
        return self._planned, self.wait()

    def _report_end(self, *, succeeded: bool) -> None:
        """Call ``on_end`` unless it was called already."""
        if self._on_end is None:
            return
        with CALL_LOCK:
            on_end, self._on_end = self._on_end, None
            if on_end is not None:
                on_end(succeeded)

    def _result(self, index: int) -> torch.Tensor:
        """Return a result of loss_fn from a rank that has it; NaN if the step was skipped."""
        name = f"result {index}"
        flow = self._planned.plan.flow
        value = next(o.value for o in flow.outputs if o.kind == "result" and o.of == index)
        ranks = self._read()
        if self.skipped:
            return torch.tensor(math.nan)
        for results in ranks:
            if name in results:  # 16-bit losses of microbatches are summed in float32
                return results[name].to(flow.metas[value].dtype)
        raise AssertionError(f"no rank returned {name}")

    @property
    def ended(self) -> bool:
        """Whether the end of the step was reported to the step's object."""
        return self._on_end is None

    def done(self) -> bool:
        """Return whether the step has ended, so that reading the loss does not wait."""
        return self._future.done()

    def tensor(self) -> torch.Tensor:
        """Return the loss as a scalar CPU tensor; NaN if the step was skipped."""
        if not self._planned.is_scaled:
            return self._result(0)
        return self._results()[1][loss_scale.UNSCALED]

    def _results(self) -> Any:
        """Return the results of the captured function, in their structure."""
        count = sum(1 for o in self._planned.plan.outputs if o.kind == "result")
        return self._planned.graph.unflatten([self._result(i) for i in range(count)])

    def item(self) -> float:
        """Return the loss as a float."""
        return float(self)

    def cpu(self) -> torch.Tensor:
        """Return the loss as a scalar CPU tensor; NaN if the step was skipped."""
        return self.tensor()

    def detach(self) -> Loss:
        """Return the Loss itself without reading it: it has no autograd graph."""
        return self

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that loss_fn returned with the loss, over the whole batch; {} if none."""
        results = self._results()
        if not isinstance(results, tuple):
            return {}
        unscaled = loss_scale.UNSCALED if self._planned.is_scaled else None
        return {name: float(value) for name, value in results[1].items() if name != unscaled}

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the gradients before clipping. None without ``clip_grad_norm`` and
        ``grad_scaler``, and for a skipped step."""
        for results in self._read():
            if "norm" in results:
                return float(results["norm"])
        return None

    def backward(self) -> None:
        """Raises TypeError: the step runs the backward itself."""
        raise TypeError(
            "a step has run forward, backward and the optimizer already; fix: remove the call. "
            "To accumulate gradients, pass the batches as one, with "
            "schedule=dt.GPipe(microbatches=...)"
        )

    def __float__(self) -> float:
        return float(self.tensor())

    def __str__(self) -> str:
        return f"{float(self)}{self._shown_metrics()}"

    def __repr__(self) -> str:
        if not self.done():
            return "Loss(running)"
        return f"Loss({float(self):.6g}{self._shown_metrics()})"

    def _shown_metrics(self) -> str:
        metrics = ", ".join(f"{name}={value:.6g}" for name, value in self.metrics.items())
        return metrics and f" ({metrics})"
