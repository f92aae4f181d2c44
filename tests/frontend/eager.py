"""Runs a captured graph on real values and compares it with eager autograd.

    check(loss_fn, (model, tokens, targets), grads="loss")     # results and every gradient

The interpreter is the simplest possible: node by node, whole tensors, no placements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from dtensor.frontend.capture.capture import capture
from dtensor.frontend.graph import (
    Arg,
    Const,
    Grad,
    Graph,
    ModuleBuffer,
    Mutation,
    Param,
    Result,
    Tangent,
)


def modules_of(fn: Any, args: tuple[Any, ...]) -> list[nn.Module]:
    found = [fn] if isinstance(fn, nn.Module) else []
    return found + [a for a in pytree.tree_leaves(args) if isinstance(a, nn.Module)]


def run_graph(
    graph: Graph, model: nn.Module | None, args: tuple[Any, ...], tangents: dict[int, Any]
) -> dict[Any, torch.Tensor]:
    """Return the value of each of graph.outputs. `model` owns the parameters under their own
    names."""
    leaves = pytree.tree_leaves((args, {}))
    env: dict[fx.Node, Any] = {}
    for node, what in zip(graph.placeholders, graph.inputs, strict=True):
        match what:
            case Param(name):
                assert model is not None
                env[node] = model.get_parameter(name).detach()
            case ModuleBuffer(name):
                assert model is not None
                env[node] = model.get_buffer(name).clone()
            case Arg(index):
                env[node] = leaves[index].detach()
            case Const(value=value):
                env[node] = value
            case Tangent(output):
                env[node] = tangents[output]
    for node in graph.nodes:
        args_ = fx.map_arg(node.args, env.__getitem__)
        env[node] = node.target(*args_, **fx.map_arg(node.kwargs, env.__getitem__))  # type: ignore[operator]
        vals = node.meta["val"] if isinstance(node.meta["val"], tuple) else (node.meta["val"],)
        outs = env[node] if isinstance(env[node], (tuple, list)) else (env[node],)
        for val, out in zip(vals, outs, strict=True):
            if val is None or out is None:  # a gradient that was not asked for
                continue
            assert val.shape == out.shape and val.dtype == out.dtype, node.format_node()
    return {what: env[node] for what, node in zip(graph.outputs, graph.output_nodes, strict=True)}


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Check that a equals b within `tolerance` of the largest magnitude of b (at least 1e-3 of
    1)."""
    a, b = a.detach(), b.detach()
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    scale = max(1e-3, float(b.double().abs().max())) if b.numel() else 1.0
    error = float((a.double() - b.double()).abs().max()) if b.numel() else 0.0
    assert error <= tolerance * scale, f"error {error} at scale {scale}"


def check(fn: Any, args: tuple[Any, ...], *, grads: Any = "loss", tolerance: float = 3e-6) -> Graph:
    """Capture fn(*args), run the graph, and compare results, gradients and buffers with eager
    torch."""
    graph = capture(fn, args, grads=grads)
    owners = modules_of(fn, args)
    model = owners[0] if owners else None
    before = {} if model is None else {k: v.clone() for k, v in model.named_buffers()}
    out = fn(*args)
    results = [r for r in pytree.tree_leaves(out) if isinstance(r, torch.Tensor)]
    after = {} if model is None else dict(model.named_buffers())
    wanted: dict[Any, torch.Tensor] = {Mutation(k): after[k].clone() for k in before}
    tangents: dict[int, torch.Tensor] = {}
    if grads != "none":
        generator = torch.Generator().manual_seed(7)
        chosen = results[:1] if grads == "loss" else results
        chosen_ids = [i for i, r in enumerate(chosen) if r.requires_grad]
        for i in chosen_ids:
            r = results[i]
            random = torch.randn(r.shape, generator=generator, dtype=r.dtype)
            tangents[i] = torch.ones_like(r) if grads == "loss" else random
        leaves: dict[Any, torch.Tensor] = {}
        if model is not None:
            leaves.update({Param(n): p for n, p in model.named_parameters() if p.requires_grad})
        flat = pytree.tree_leaves((args, {}))
        for what in graph.inputs:
            if isinstance(what, Arg) and flat[what.index].requires_grad:
                leaves[what] = flat[what.index]
        found = torch.autograd.grad(
            [results[i] for i in chosen_ids],
            list(leaves.values()),
            [tangents[i] for i in chosen_ids],
            allow_unused=True,
        )
        wanted.update({Grad(k): g for k, g in zip(leaves, found, strict=True) if g is not None})
    if model is not None:
        with torch.no_grad():
            for name, value in before.items():
                model.get_buffer(name).copy_(value)
    got = run_graph(graph, model, args, tangents)
    for i, result in enumerate(results):
        close(got[Result(i)], result.detach(), tolerance)
    grads_got = {k for k in got if isinstance(k, Grad)}
    assert grads_got == {k for k in wanted if isinstance(k, Grad)}
    for what in got:
        if not isinstance(what, Result):
            close(got[what], wanted[what], tolerance)
    return graph
