"""A small causal model whose layers, parameters and buffers change between steps as users change
them; its training in plain torch and under a placement.

    way, place = WAYS["a layer replaced"], PLACES["tp2"]
    plain, placed = Plain(way.net()), Placed(way.net(), place)
    with dt.launch(place.mesh):
        for number in way.steps(plain, placed):  # before, between and after its changes
            plain.take(number), placed.take(number)
        assert not differences(placed, plain)

A way is a generator over a `Plain` or a `Placed`; it yields where a step is to be taken. Both draw
the same random numbers. Values are float64, so any difference is an error.
"""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils import _pytree as pytree

import dtensor as dt

VOCAB, WIDTH, HIDDEN, HEADS = 12, 8, 16, 2
Optimizer = torch.optim.Optimizer


# -- the model -------------------------------------------------------------------------------------


class Mix(nn.Module):
    """Attention, with or without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            part.view(b, t, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        if cache is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k, v = cache.update(0, k, v)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=cache.mask())
        return x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))


class Block(nn.Module):
    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, hidden), linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """tokens [b t] -> logits [b t v]; with a cache, as in docs/generation.md.

    ``mixes``: tokens attend to earlier tokens; without it, the programs are half as long. ``head``
    may be a child of ``tail``, ``gain`` may be named ``factor`` and ``shift`` ``offset``.
    """

    def __init__(self, tied: bool = False, mixes: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)
        self.mix = Mix() if mixes else None
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.gain = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.register_buffer("shift", torch.full((WIDTH,), 0.25, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.head = linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, cache: Any = None, pos: Tensor | None = None) -> Tensor:
        if self.training:
            self.seen.add_(1)
        x = self.embed(tokens)
        if self.mix is not None:
            x = self.mix(x, cache)
        for block in self.blocks:
            x = block(x)
        gain = self.gain if hasattr(self, "gain") else self.factor
        shift = self.shift if hasattr(self, "shift") else self.offset
        head = self.head if hasattr(self, "head") else self.tail.head
        return head(x * gain + shift)


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)


def parameter(like: Tensor) -> nn.Parameter:
    return nn.Parameter(like.detach().clone())


def loss_fn(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def batch(number: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCAB, (4, 6), generator=drawn)
    return tokens[:, :-1], tokens[:, 1:]


def adamw(net: nn.Module) -> Optimizer:
    """Return an AdamW with two groups: the parameters of the blocks, and the others."""
    blocks = [p for n, p in net.named_parameters() if n.startswith("blocks")]
    inside = set(map(id, blocks))
    rest = [p for p in net.parameters() if id(p) not in inside]
    groups = [{"params": blocks}, {"params": rest, "lr": 2e-2, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=5e-2)


CLIP = 0.5  # below every norm here


# -- what trains -----------------------------------------------------------------------------------


@dataclass
class Plain:
    """Training in plain torch: the reference. ``record``: the results of steps (loss, norm) and
    evaluations, in order."""

    net: Any
    optimizer: Optimizer = field(init=False)
    record: list[Any] = field(default_factory=list[Any])

    def __post_init__(self) -> None:
        self.optimizer = adamw(self.net)

    def train_with(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def take(self, number: int) -> None:
        """Take one step on `batch(number)`."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(self.net, *batch(number))
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        if loss.requires_grad:  # else torch has nothing to go backward through
            loss.backward()
        norm = nn.utils.clip_grad_norm_(held, CLIP)
        self.optimizer.step()
        self.record.append((loss.item(), norm.item()))

    def evaluate(self) -> None:
        with torch.no_grad():
            self.record.append(self.net(batch(99)[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A mesh, placements and options for a `Net`."""

    mesh: dt.Mesh
    placements: Mapping[str, Any] = field(default_factory=dict[str, Any])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    inputs: Mapping[str, Any] | None = None


PLACES = {
    "tp2": Place(
        mesh=dt.Mesh(tp=2),
        placements={
            "blocks.*.up.weight": dict(tp=dt.Row()),
            "blocks.*.down.weight": dict(tp=dt.Column()),
            "head.weight": dict(tp=dt.Row()),
        },
    ),
    "dp2, ZeRO-3": Place(
        mesh=dt.Mesh(dp=2), options=dict(zero={"dp": 3}), inputs=dict(dp=dt.Row())
    ),
    "pp2": Place(
        mesh=dt.Mesh(pp=2),
        options=dict(
            stages={
                "pp": [
                    ["{embed,mix}*", "seen", "blocks.[0-1].*"],
                    ["blocks.[2-9].*", "gain", "shift", "head*"],
                ]
            }
        ),
    ),
}


@dataclass
class Placed:
    """Training under a placement. ``record`` contains futures until `read` is called."""

    net: Any
    place: Place
    optimizer: Optimizer = field(init=False)
    model: dt.ParallelModule = field(init=False)
    step: dt.TrainStep = field(init=False)
    logits: Any = field(init=False)
    record: list[Any] = field(default_factory=list[Any])

    def __post_init__(self) -> None:
        mesh, placements = self.place.mesh, dict(self.place.placements)
        self.model = dt.parallelize(self.net, mesh, placements, **self.place.options)
        self.logits = dt.compile(lambda model, tokens: model(tokens), mesh)
        self.train_with(adamw(self.net))

    def train_with(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.step = dt.train_step(
            self.model, loss_fn, optimizer, inputs=self.place.inputs, clip_grad_norm=CLIP
        )

    def take(self, number: int) -> None:
        self.record.append(self.step(*batch(number)))

    def evaluate(self) -> None:
        self.record.append(self.logits(self.model, batch(99)[0]))

    def read(self) -> None:
        """Wait for the recorded futures and replace them by their values."""
        self.record = list(map(_read, self.record))


Trained = Plain | Placed


def differences(placed: Placed, plain: Plain) -> list[str]:
    """Return one line for each difference from plain torch; reads all results and state."""
    placed.read()
    found = unlike(placed.record, plain.record, "record")
    found += unlike(dict(placed.net.state_dict()), dict(plain.net.state_dict()), "in the model")
    return found + unlike(
        optimizer_state(placed.optimizer), optimizer_state(plain.optimizer), "in the optimizer"
    )


def _read(one: Any) -> Any:
    """Return the value of a recorded future, or the value itself."""
    if isinstance(one, dt.DTensor):
        return one.full_tensor()
    return (float(one), one.grad_norm) if isinstance(one, dt.Loss) else one


def optimizer_state(optimizer: Optimizer) -> Any:
    """Return the optimizer's state_dict, or a note that torch cannot make one because a state
    belongs to no group."""
    try:
        return copy.deepcopy(optimizer.state_dict())
    except KeyError:
        return "KeyError"


def unlike(found: Any, expected: Any, where: str) -> list[str]:
    """Return the differences of two trees by path, ignoring the order of keys."""
    (a, _), (b, _) = map(pytree.tree_flatten_with_path, (found, expected))
    a, b = (sorted(leaves, key=lambda leaf: pytree.keystr(leaf[0])) for leaves in (a, b))
    of_a, of_b = ([pytree.keystr(path) for path, _ in leaves] for leaves in (a, b))
    if of_a != of_b:
        missing, more = [n for n in of_b if n not in of_a], [n for n in of_a if n not in of_b]
        return [f"{where}: without {missing}, and with {more}"]
    lines: list[str] = []
    for (path, x), (_, y) in zip(a, b, strict=True):
        same = type(x) is type(y)
        if same and isinstance(y, Tensor):
            same = x.shape == y.shape and x.dtype == y.dtype
            same = same and torch.allclose(x.double(), y.double(), rtol=1e-7, atol=1e-9)
        elif same and isinstance(y, float):
            same = abs(x - y) <= 1e-9 + 1e-7 * abs(y)
        else:
            same = same and x == y
        if not same:
            lines.append(f"{where}{pytree.keystr(path)}: {_short(x)} for {_short(y)}")
    return lines


def _short(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() > 3:
        return f"{list(value.shape)} of norm {value.double().norm():.6g}"
    return str(value)


# -- the ways --------------------------------------------------------------------------------------

Change = Callable[[Any], Iterator[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to change a model. ``tied``: the model starts with its head tied to the embedding.
    ``refused``: the expected error by place, for places where the change is refused."""

    change: Change
    tied: bool = False
    refused: Mapping[str, str] = field(default_factory=dict[str, str])

    def net(self, seed: int = 0, *, mixes: bool = False) -> Net:
        torch.manual_seed(seed)
        return Net(self.tied, mixes)

    def steps(self, *all_of: Trained) -> Iterator[int]:
        """Yield the number of each step to take: before the first change, after each change, and
        one more. Each change draws the same random numbers for all models."""
        yield 0
        number, changes = 1, [self.change(each) for each in all_of]
        going = True
        while going:
            for each in changes:
                torch.manual_seed(1000 + number)
                going = next(each, self) is None
            yield number
            number += 1


def _all(*parts: nn.Module | nn.Parameter) -> list[nn.Parameter]:
    return [
        p for each in parts for p in ([each] if isinstance(each, Tensor) else each.parameters())
    ]


def replaced(of: Trained) -> Iterator[None]:
    """Replace a layer; the optimizer still holds the old one, so the new one is not trained."""
    of.net.blocks[1].down = linear(HIDDEN, WIDTH)
    yield


def replaced_and_added(of: Trained) -> Iterator[None]:
    of.net.blocks[1].down = new = linear(HIDDEN, WIDTH)
    of.optimizer.add_param_group({"params": _all(new), "lr": 3e-2})
    yield


def replaced_by_another_shape(of: Trained) -> Iterator[None]:
    block = of.net.blocks[1]
    block.up, block.down = linear(WIDTH, HIDDEN // 2), linear(HIDDEN // 2, WIDTH)
    of.optimizer.add_param_group({"params": _all(block)})
    yield


def replaced_and_old_dropped(of: Trained) -> Iterator[None]:
    """Replace a layer, and remove the old one and its state from the optimizer."""
    old, new = of.net.blocks[1].down, linear(HIDDEN, WIDTH)
    of.net.blocks[1].down = new
    group = of.optimizer.param_groups[0]
    gone = set(map(id, _all(old)))
    group["params"] = [p for p in group["params"] if id(p) not in gone] + _all(new)
    for each in _all(old):
        of.optimizer.state.pop(each, None)
    yield


class Adapter(nn.Module):
    """LoRA written by hand: the base layer plus a low-rank product."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(base.out_features, rank, dtype=torch.float64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def wrapped(of: Trained) -> Iterator[None]:
    block = of.net.blocks[1]
    block.up = new = Adapter(block.up)
    of.optimizer.add_param_group({"params": [new.a, new.b]})
    yield


def adapters_by_hand(of: Trained) -> Iterator[None]:
    """Add LoRA to all blocks and freeze the rest; later merge the adapters into the base."""
    of.net.requires_grad_(False)
    for block in of.net.blocks:
        block.up, block.down = Adapter(block.up), Adapter(block.down)
    new = [p for p in of.net.parameters() if p.requires_grad]
    of.optimizer.add_param_group({"params": new, "lr": 3e-2})
    yield
    yield
    for block in of.net.blocks:
        for name in ("up", "down"):
            adapter = getattr(block, name)
            with torch.no_grad():
                adapter.base.weight += adapter.b @ adapter.a
            setattr(block, name, adapter.base)
    of.net.requires_grad_(True)
    yield


def adapters_of_peft(of: Trained) -> Iterator[None]:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, of.net)
    new = [p for n, p in of.net.named_parameters() if "lora_" in n]
    of.optimizer.add_param_group({"params": new, "lr": 3e-2})
    yield


def model_of_peft(of: Trained) -> Iterator[None]:
    """Wrap with peft and a new optimizer, as in peft's examples; the base module is trained."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["up", "head"])
    peft.get_peft_model(of.net, config)
    of.train_with(torch.optim.AdamW([p for p in of.net.parameters() if p.requires_grad], lr=3e-2))
    yield


def moved(of: Trained) -> Iterator[None]:
    head = of.net.head
    del of.net.head
    of.net.tail = nn.Module()
    of.net.tail.head = head
    yield


def moved_into_a_container(of: Trained) -> Iterator[None]:
    of.net.blocks[1] = nn.Sequential(of.net.blocks[1])
    yield


def swapped(of: Trained) -> Iterator[None]:
    """Swap two layers of one stage."""
    one, other = of.net.blocks[0], of.net.blocks[1]
    one.up, other.up = other.up, one.up
    yield


def swapped_over_stages(of: Trained) -> Iterator[None]:
    one, other = of.net.blocks[1], of.net.blocks[2]
    one.up, other.up = other.up, one.up
    yield


def reordered(of: Trained) -> Iterator[None]:
    one, two, three = of.net.blocks
    of.net.blocks = nn.ModuleList([two, one, three])
    yield


def deleted_and_back(of: Trained) -> Iterator[None]:
    """Delete a layer and add it again; meanwhile it keeps its value and its state."""
    block = of.net.blocks[1]
    del of.net.blocks[1]
    yield
    yield
    of.net.blocks.insert(1, block)
    yield


def appended(of: Trained) -> Iterator[None]:
    of.net.blocks.append(new := Block())
    of.optimizer.add_param_group({"params": _all(new)})
    yield


def appended_twice(of: Trained) -> Iterator[None]:
    """Append a layer twice, with steps between."""
    for _ in range(2):
        of.net.blocks.append(new := Block())
        of.optimizer.param_groups[0]["params"].extend(_all(new))
        yield


def another_name(of: Trained) -> Iterator[None]:
    gain = of.net.gain
    del of.net.gain
    of.net.register_parameter("factor", gain)
    yield


def registered_again(of: Trained) -> Iterator[None]:
    """Register a parameter again under the same name, after the bias."""
    up = of.net.blocks[1].up
    weight = up.weight
    del up.weight
    up.register_parameter("weight", weight)
    yield


def set_to_none_and_back(of: Trained) -> Iterator[None]:
    up = of.net.blocks[1].up
    bias, up.bias = up.bias, None
    yield
    yield
    up.bias = bias
    yield


def new_parameter(of: Trained) -> Iterator[None]:
    """Replace a parameter by a new one that no optimizer holds."""
    of.net.gain = parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))
    yield


def buffer_replaced(of: Trained) -> Iterator[None]:
    of.net.shift = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)
    yield


def buffer_registered_again(of: Trained) -> Iterator[None]:
    shift = of.net.shift
    del of.net.shift
    of.net.register_buffer("offset", shift)
    yield
    of.net.register_buffer("offset", shift * 2, persistent=False)
    yield


def changing_buffer_replaced(of: Trained) -> Iterator[None]:
    """Replace a buffer that forward changes."""
    of.net.seen = torch.tensor(40)
    yield


def parameter_becomes_a_buffer(of: Trained) -> Iterator[None]:
    head = of.net.head
    weight = head.weight.detach().clone()
    del head.weight
    head.register_buffer("weight", weight)
    yield


def tied(of: Trained) -> Iterator[None]:
    of.net.head.weight = of.net.embed.weight
    yield


def untied(of: Trained) -> Iterator[None]:
    of.net.head.weight = new = parameter(of.net.embed.weight)
    of.optimizer.add_param_group({"params": [new]})
    yield


def tied_and_untied(of: Trained) -> Iterator[None]:
    """Tie a weight, then restore its own weight."""
    own = of.net.head.weight
    of.net.head.weight = of.net.embed.weight
    yield
    yield
    of.net.head.weight = own
    yield


def block_shared(of: Trained) -> Iterator[None]:
    of.net.blocks[1] = of.net.blocks[0]
    yield


def frozen_and_back(of: Trained) -> Iterator[None]:
    of.net.embed.requires_grad_(False)
    of.net.blocks[1].requires_grad_(False)
    yield
    yield
    of.net.requires_grad_(True)
    yield


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x

    def right_inverse(self, x: Tensor) -> Tensor:
        return x / 2


def parametrized(of: Trained) -> Iterator[None]:
    up = of.net.blocks[1].up
    parametrize.register_parametrization(up, "weight", Doubled())
    yield
    yield
    parametrize.remove_parametrizations(up, "weight")
    yield


def weight_normed(of: Trained) -> Iterator[None]:
    """Replace a weight by the two parameters of weight norm; at the end they become one parameter
    that is not trained."""
    down = of.net.blocks[1].down
    parametrizations.weight_norm(down)
    new = _all(down.parametrizations)
    of.optimizer.add_param_group({"params": new})
    yield
    yield
    parametrize.remove_parametrizations(down, "weight")
    yield


def assigned(of: Trained) -> Iterator[None]:
    """Assign new parameters that the optimizer does not hold, so nothing is trained."""
    values = {n: v.clone() for n, v in of.net.state_dict().items()}
    of.net.load_state_dict(values, assign=True)
    yield


def assigned_and_held(of: Trained) -> Iterator[None]:
    """Assign new parameters and put them into the optimizer's groups, with the state of the old
    ones."""
    old = dict(of.net.named_parameters())
    of.net.load_state_dict({n: v.clone() for n, v in of.net.state_dict().items()}, assign=True)
    new = {id(old[n]): p for n, p in of.net.named_parameters()}
    for group in of.optimizer.param_groups:
        group["params"] = [new[id(p)] for p in group["params"]]
    for p in old.values():
        _hand_on(of.optimizer, p, new[id(p)])
    yield


def _hand_on(optimizer: Optimizer, old: Tensor, new: Tensor) -> None:
    """Move the optimizer state of ``old`` to ``new``, if there is any."""
    if old in optimizer.state:
        optimizer.state[new] = optimizer.state.pop(old)


def exchanged(of: Trained) -> Iterator[None]:
    """Replace a parameter by a new one and move its state."""
    up, group = of.net.blocks[1].up, of.optimizer.param_groups[0]
    old, new = up.weight, parameter(up.weight * 0.5)
    up.weight = new
    group["params"] = [new if p is old else p for p in group["params"]]
    _hand_on(of.optimizer, old, new)
    yield


def embedding_resized(of: Trained) -> Iterator[None]:
    """Add rows to the embedding as `resize_token_embeddings` does, and to the state of Adam."""
    old, new = of.net.embed.weight, nn.Embedding(VOCAB + 4, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        new.weight[:VOCAB] = old
    of.net.embed = new
    group = of.optimizer.param_groups[1]
    group["params"] = [new.weight if p is old else p for p in group["params"]]
    _hand_on(of.optimizer, old, new.weight)
    for key, value in of.optimizer.state.get(new.weight, {}).items():
        if value.dim():
            of.optimizer.state[new.weight][key] = F.pad(value, (0, 0, 0, 4))
    yield


def other_group(of: Trained) -> Iterator[None]:
    """Move a parameter to another group, and another one back."""
    one, other = of.optimizer.param_groups
    one["params"].append(other["params"].pop(0))
    other["params"].append(one["params"].pop(0))
    yield


def group_removed(of: Trained) -> Iterator[None]:
    for each in of.optimizer.param_groups.pop()["params"]:
        of.optimizer.state.pop(each, None)
    yield


def group_away_and_back(of: Trained) -> Iterator[None]:
    """Remove a group and add it again; its state stays."""
    group = of.optimizer.param_groups.pop()
    yield
    yield
    of.optimizer.param_groups.append(group)
    yield


def new_optimizer(of: Trained) -> Iterator[None]:
    of.net.blocks[1] = Block()
    of.train_with(adamw(of.net))
    yield


def averages_swapped_in(of: Trained) -> Iterator[None]:
    """Evaluate with averaged weights as new objects; training continues with the original ones."""
    own = dict(of.net.named_parameters())
    of.evaluate()
    for name, value in own.items():
        _put(of.net, name, parameter(value * 0.9))
    of.evaluate()
    for name, value in own.items():
        _put(of.net, name, value)
    of.evaluate()
    yield


def _put(net: nn.Module, name: str, value: nn.Parameter) -> None:
    path, _, last = name.rpartition(".")
    setattr(net.get_submodule(path), last, value)


class Follower(nn.Module):
    """A layer whose weight follows another weight by momentum in forward, as MoCo's key encoder."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.leader, self.follower = of, copy.deepcopy(of).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.follower.weight.mul_(0.9).add_(self.leader.weight, alpha=0.1)
        return self.leader(x) + 0.5 * self.follower(x).detach()


def followed(of: Trained) -> Iterator[None]:
    of.net.head = Follower(of.net.head)
    yield


def another_forward(of: Trained) -> Iterator[None]:
    """Skip a layer in forward; the unused layer keeps its parameters."""
    of.net.blocks[1].forward = types.MethodType(lambda _, x: 1.5 * x, of.net.blocks[1])
    yield
    yield
    del of.net.blocks[1].forward
    yield


WAYS: Mapping[str, Way] = {
    "a layer replaced": Way(change=replaced),
    "... and added by add_param_group": Way(change=replaced_and_added),
    "... by another shape, both neighbours": Way(change=replaced_by_another_shape),
    "... the old one out of the optimizer": Way(change=replaced_and_old_dropped),
    "a layer wrapped, its base frozen": Way(change=wrapped),
    "LoRA by hand, later merged": Way(change=adapters_by_hand),
    "peft.inject_adapter_in_model": Way(change=adapters_of_peft),
    "peft.get_peft_model, a new optimizer": Way(change=model_of_peft),
    "a layer moved to a submodule": Way(change=moved),
    "a layer moved into a Sequential": Way(change=moved_into_a_container),
    "two layers swapped": Way(change=swapped),
    "... of two stages": Way(
        change=swapped_over_stages, refused={"pp2": "needs a parameter of an earlier stage"}
    ),
    "a ModuleList reordered": Way(change=reordered),
    "a layer deleted, later back": Way(change=deleted_and_back),
    "a layer appended": Way(change=appended),
    "layers appended, one a step": Way(change=appended_twice),
    "a parameter under another name": Way(change=another_name),
    "a parameter registered again": Way(change=registered_again),
    "a bias set to None, later back": Way(change=set_to_none_and_back),
    "a new parameter that nobody holds": Way(change=new_parameter),
    "a buffer replaced": Way(change=buffer_replaced),
    "a buffer under another name": Way(change=buffer_registered_again),
    "a buffer that forward changes replaced": Way(change=changing_buffer_replaced),
    "a parameter becomes a buffer": Way(change=parameter_becomes_a_buffer),
    "head and embedding tied": Way(change=tied),
    "head and embedding untied": Way(change=untied, tied=True),
    "head and embedding tied, later untied": Way(change=tied_and_untied),
    "a block used twice": Way(change=block_shared),
    "frozen by requires_grad_, later back": Way(change=frozen_and_back),
    "register_parametrization, later removed": Way(change=parametrized),
    "parametrizations.weight_norm, later removed": Way(change=weight_normed),
    "load_state_dict(assign=True)": Way(change=assigned),
    "... and held by the optimizer": Way(change=assigned_and_held),
    "a parameter exchanged with its state": Way(change=exchanged),
    "the embedding resized": Way(change=embedding_resized),
    "a parameter in another group": Way(change=other_group),
    "a group removed": Way(change=group_removed),
    "a group removed, later back": Way(change=group_away_and_back),
    "a new layer, optimizer and step": Way(change=new_optimizer),
    "averages swapped in to evaluate": Way(change=averages_swapped_in),
    "a key encoder that follows in forward": Way(change=followed),
    "a layer left out by forward, later back": Way(change=another_forward),
}


# -- what may be refused ---------------------------------------------------------------------------


def old_weight_norm(net: Any) -> Callable[[], None]:
    """Apply the old weight norm and return a function that removes it. Its forward hook sets a
    tensor as an attribute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(net.blocks[1].up)
    return lambda: void(nn.utils.remove_weight_norm(net.blocks[1].up))


def pruned(net: Any) -> Callable[[], None]:
    prune.l1_unstructured(net.blocks[1].up, "weight", amount=0.3)
    return lambda: void(prune.remove(net.blocks[1].up, "weight"))


def void(_: object) -> None: ...


REFUSED = {"torch.nn.utils.weight_norm": old_weight_norm, "prune": pruned}
