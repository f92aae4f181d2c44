"""A loop with accelerate: everything is prepared, and the module too, before it is parallelized.

net, opt, loader, scheduler = accelerator.prepare(net, opt, loader, scheduler)
model = dt.parallelize(net, mesh, placements)
step = dt.train_step(model, loss_fn, opt)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from torch.utils.data import DataLoader

import dtensor as dt
from tests.integrations.cases import (
    Case,
    Outcome,
    Trained,
    compared,
    folder,
    on_two,
    raises,
    texts,
    tiny,
    weights,
)


# begin
def loss_fn(model, batch):
    return model(**batch).loss


def train(accelerator, net, opt, loader, scheduler, parallelize):
    net, opt, loader, scheduler = accelerator.prepare(net, opt, loader, scheduler)
    model = parallelize(net)
    step = dt.train_step(model, loss_fn, opt, clip_grad_norm=1.0)
    for batch in loader:
        loss = step(batch)
        scheduler.step()
        yield float(loss)


# end


def by_hand(accelerator: Any, net: Any, opt: Any, loader: Any, scheduler: Any) -> Iterator[float]:
    """The loop that accelerate's documentation has."""
    net, opt, loader, scheduler = accelerator.prepare(net, opt, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(net):
            loss = net(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            scheduler.step()
            opt.zero_grad()
        yield loss.item()


def parts(rows: int = 24) -> tuple[Any, Any, Any, Any]:
    net = tiny()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10)
    return net, opt, DataLoader(texts(rows), batch_size=4), scheduler  # type: ignore[arg-type]


@contextmanager
def accelerating(**options: Any) -> Iterator[Accelerator]:
    """Its state is one for the process."""
    try:
        yield Accelerator(cpu=True, **options)
    finally:
        GradientState._reset_state()


def by_torch() -> Trained:
    with accelerating() as accelerator:
        net, *others = parts()
        return Trained(list(by_hand(accelerator, net, *others)), weights(net))


def by_ranks() -> Trained:
    with accelerating() as accelerator:
        net, *others = parts()
        with dt.launch(dt.Mesh(tp=2)):
            losses = list(train(accelerator, net, *others, on_two))
        return Trained(losses, weights(net))


def resumed() -> Outcome:
    """`save_state` after three steps, `load_state` into all that is made anew, three more."""
    path = str(folder("accelerate") / "state")
    losses: list[float] = []
    with dt.launch(dt.Mesh(tp=2)):
        with accelerating() as accelerator:
            net, *others = parts()
            steps = train(accelerator, net, *others, on_two)
            losses += [next(steps) for _ in range(3)]
            accelerator.save_state(path)
        with accelerating() as accelerator:
            net, opt, loader, scheduler = accelerator.prepare(*parts())
            model = on_two(net)
            step = dt.train_step(model, loss_fn, opt, clip_grad_norm=1.0)
            accelerator.load_state(path)
            for batch in accelerator.skip_first_batches(loader, 3):
                losses.append(float(step(batch)))
                scheduler.step()
    return compared(by_torch(), Trained(losses, weights(net)))


def saved_without_weights() -> Outcome:
    """What a parallelized model that was prepared itself leaves on the disk."""
    path = folder("unprepared") / "state"
    with accelerating() as accelerator:
        net, opt, loader, _ = parts()
        model = on_two(net)
        prepared, opt, loader = accelerator.prepare(model, opt, loader)
        assert prepared is model
        accelerator.save_state(str(path))
    names = sorted(p.name for p in Path(path).iterdir())
    assert "optimizer.bin" in names and not any(n.startswith("model") for n in names), names
    return Outcome(raised="no error: save_state wrote no weights, " + ", ".join(names))


def accumulating() -> Outcome:
    def run(accelerator: Any, net: Any, step: Any, batch: Any) -> None:
        with accelerator.accumulate(net):
            step(batch)

    given = dict(gradient_accumulation_steps=4)
    return raises(lambda: with_first(run, **given), dt.PlanningError, "accumulating")


def with_first(run: Any, **options: Any) -> Any:
    with accelerating(**options) as accelerator:
        net, opt, loader, _ = accelerator.prepare(*parts())
        step = dt.train_step(on_two(net), loss_fn, opt)
        with dt.launch(dt.Mesh(tp=2)):
            return run(accelerator, net, step, next(iter(loader)))


def backward() -> Outcome:
    def run(accelerator: Any, net: Any, step: Any, batch: Any) -> None:
        accelerator.backward(step(batch))

    return raises(lambda: with_first(run), AttributeError, "backward")


def clipping() -> Outcome:
    def run(accelerator: Any, net: Any, step: Any, batch: Any) -> None:
        step(batch)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)

    return raises(lambda: with_first(run), dt.PlanningError, "clip_grad_norm=1.0")


CASES = (
    Case("loop, tp=2", lambda: compared(by_torch(), by_ranks())),
    Case("`save_state`, `load_state`", resumed, slow=True),
    Case("`prepare` of a parallelized model, `save_state`", saved_without_weights),
    Case("`with accelerator.accumulate(net)`", accumulating, slow=True),
    Case("`accelerator.backward(loss)`", backward, slow=True),
    Case("`accelerator.clip_grad_norm_`", clipping, slow=True),
)
