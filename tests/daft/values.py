"""Tensors and containers of tensors whose metadata must survive sending, and a description of
them.

for name, value in kinds().items():
    assert parts(sent(value)) == parts(value), name
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Tagged(Tensor):
    pass


class TaggedParameter(nn.Parameter):
    pass


def kinds() -> dict[str, Any]:
    torch.manual_seed(0)
    matrix, decayed = torch.arange(12.0).view(3, 4), nn.Parameter(torch.randn(3, 2))
    decayed.no_decay = True  # type: ignore[attr-defined]
    tagged = torch.ones(2).as_subclass(Tagged)
    tagged.tag = "x"  # type: ignore[attr-defined]
    tied, frozen = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(2, 2)
    trained = nn.LSTM(2, 3)
    tied[1].weight = tied[0].weight
    frozen.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(trained.parameters())
    trained(torch.ones(1, 2))[0].sum().backward()
    optimizer.step()
    graded = {
        "a subclass with a gradient": torch.ones(2).as_subclass(Tagged).requires_grad_(),
        "a parameter of a subclass": nn.Parameter(torch.ones(2).as_subclass(Tagged)),
        "a subclass of Parameter": TaggedParameter(torch.ones(2)),
        "a frozen parameter with a gradient": nn.Parameter(torch.ones(2)),
        "a sparse parameter": nn.Parameter(torch.eye(2).to_sparse()),
    }
    for name, leaf in graded.items():
        leaf.grad = torch.eye(2).to_sparse() if "sparse" in name else torch.ones(2)
    graded["a frozen parameter with a gradient"].requires_grad_(False)
    return {
        "a parameter with an attribute": decayed,
        "a frozen parameter": nn.Parameter(torch.ones(2), False),
        "a leaf": torch.ones(2, requires_grad=True),
        "a buffer": nn.Buffer(torch.ones(2)),
        "transposed": matrix.t(),
        "with a step": matrix[:, ::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "channels last": torch.randn(1, 2, 3, 3).contiguous(memory_format=torch.channels_last),
        "views": [matrix, matrix[1], matrix[:, 1:3], matrix.view(torch.int32)],
        "two columns": [matrix[:, 1], matrix[:, 2]],
        "twice": [decayed, decayed, decayed.data],
        "a subclass": tagged,
        "a subclass that is a view": [matrix, matrix[0].as_subclass(Tagged)],
        **graded,
        "conjugated": torch.full((2,), 1j).conj(),
        "bf16": torch.ones(3, 2, dtype=torch.bfloat16).t(),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "no dims": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(3).to_sparse(),
        "a tied module": tied,
        "a module with a frozen weight": frozen,
        "batch norm": nn.BatchNorm1d(3),
        "a module and its optimizer": [trained, optimizer],
    }


def parts(value: Any, seen: dict[Any, int] | None = None) -> Any:
    """Return types, attributes, strides, elements and gradients, and which tensors are the same or
    share memory."""
    seen = {} if seen is None else seen
    match value:
        case Tensor() if id(value) in seen:
            return "again", seen[id(value)]
        case Tensor():
            seen[id(value)] = len(seen)
            plain = value.layout == torch.strided
            at = value.untyped_storage().data_ptr() if plain else 0
            return (
                (type(value), isinstance(value, nn.Parameter), isinstance(value, nn.Buffer)),
                (value.dtype, tuple(value.shape), value.stride() if plain else None),
                (value.requires_grad, {k: str(v) for k, v in vars(value).items()}),
                value.detach().to_dense().tolist(),
                seen.setdefault(("storage", at), len(seen)) if at else None,
                parts(value.grad, seen),
            )
        case nn.Module():
            held = [*value.named_parameters(remove_duplicate=False), *value.named_buffers()]
            return type(value).__name__, value.training, [(n, parts(x, seen)) for n, x in held]
        case torch.optim.Optimizer():
            return parts([value.param_groups, list(value.state.values())], seen)
        case dict():
            return {key: parts(held, seen) for key, held in value.items()}
        case list() | tuple():
            return [parts(held, seen) for held in value]
        case _:
            return value
