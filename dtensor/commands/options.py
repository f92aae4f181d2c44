"""Options that several commands share, parsed from text, and the errors about wrong ones.

    mesh_of_text("tp=2,pp=2")            # Mesh(tp=2, pp=2)
    schedule_of("1f1b", 8)               # OneFOneB(microbatches=8)
    topology_of("h100", ("dp",), mesh)   # dp between hosts, the other axes within one

Invariants: text that cannot be parsed is a PlanningError, or argparse's error, in one sentence with
a fix. Nothing is captured or planned here.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from dtensor.api.model.stating.patterns import nearest
from dtensor.commands.parser import CommandParser
from dtensor.errors import PlanningError
from dtensor.numerics import DTYPES
from dtensor.runtime.schedule import (
    ZBH1,
    ZBH2,
    ZBV,
    DualPipeV,
    GPipe,
    Interleaved1F1B,
    LoopedBFS,
    OneFOneB,
    Schedule,
)
from dtensor.sharding.redistribute import topologies
from dtensor.sharding.redistribute.topology import Topology
from dtensor.sharding.spec.mesh import Mesh, mesh_of

SCHEDULES: Mapping[str, Any] = {
    "gpipe": GPipe,
    "1f1b": OneFOneB,
    "interleaved": Interleaved1F1B,
    "loopedbfs": LoopedBFS,
    "zbh1": ZBH1,
    "zbh2": ZBH2,
    "zbv": ZBV,
    "dualpipev": DualPipeV,
}
TWO_STAGES = ("zbv", "dualpipev")
SEVERAL_STAGES = ("interleaved", "loopedbfs", *TWO_STAGES)
"""Schedules that put more than one stage on a rank."""
TOPOLOGIES = ("h100", "a100", "laptop")
_DTYPES = ("f32", "bf16", "f16", "f64")
_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}

MODEL_EPILOG = """\
MODEL is a model type of Hugging Face's (gpt2, llama, ...), whose default configuration is taken; a
config.json, or a folder with one; or module.py:function, package.module:function: a function that
returns (model, loss_fn, *batch), or a dict with model, loss_fn, batch, and if you like placements,
stages, inputs, optimizer. Models are made on the meta device: they need no memory. Nothing is
downloaded.

exit status: 0, done; 1, found something wrong; 2, an invalid request."""


# -- options ----------------------------------------------------------------------------


def add_workload(parser: CommandParser) -> None:
    """The model and its batch."""
    parser.add_argument("model", metavar="MODEL", help="the model to train, see below")
    group = parser.add_argument_group("the model and its batch")
    group.add_argument(
        "--batch", type=whole_option, metavar="N", help="rows of the whole batch (default: 8)"
    )
    group.add_argument(
        "--length", type=whole_option, metavar="N", help="tokens of a row (default: 128)"
    )
    group.add_argument(
        "--dtype",
        type=dtype_option,
        metavar="DTYPE",
        help="of the parameters: f32, bf16, f16 (default: the configuration's, or f32)",
    )
    group.add_argument(
        "--set",
        action="append",
        type=_assignment,
        default=[],
        metavar="NAME=VALUE",
        help="a field of the configuration, or an argument of the function; may be repeated",
    )
    group.add_argument(
        "--head",
        metavar="HEAD",
        help="the head of Hugging Face's: causal-lm, masked-lm, ... (default: the type's own)",
    )
    group.add_argument(
        "--optimizer", default=None, metavar="NAME", help="of torch.optim (default: AdamW)"
    )


def add_strategy(parser: CommandParser, *, several: bool = False) -> None:
    """Placements and the like; ``several``: --mesh, --zero and --schedule may be repeated."""
    again = "; may be repeated" if several else ""
    group = parser.add_argument_group("how it is placed")
    group.add_argument(
        "--mesh",
        action="append" if several else "store",
        type=_mesh,
        required=True,
        metavar="AXIS=N,...",
        help="as dp=2,tp=4: dp splits the batch, tp the weights by --placements, pp the layers by "
        f"--stages{again}",
    )
    group.add_argument(
        "--placements",
        metavar="WHICH",
        help="auto (default): derived from the program over tp; none; or file.py:NAME, a dict of "
        "them, or a function of the mesh that returns one",
    )
    group.add_argument(
        "--stages", metavar="WHICH", help="auto (default), or how many of them, over pp"
    )
    group.add_argument(
        "--schedule",
        action="append" if several else "store",
        type=_schedule,
        metavar="NAME",
        help=f"of the microbatches: {', '.join(SCHEDULES)} (default: 1f1b){again}",
    )
    group.add_argument(
        "--microbatches",
        type=whole_option,
        metavar="N",
        help="that the batch is cut in, on any mesh",
    )
    group.add_argument(
        "--zero",
        action="append" if several else "store",
        type=_zero,
        metavar="AXIS=LEVEL",
        help="store split over an axis: 1 optimizer state, 2 gradients too, 3 parameters too"
        f"{', or none' + again if several else ''}",
    )
    group.add_argument(
        "--recompute",
        action="append",
        metavar="GLOB",
        help="modules whose activations are computed again in the backward; may be repeated",
    )
    group.add_argument(
        "--clip-grad-norm", type=float, metavar="X", help="clip the gradients' norm (default: no)"
    )
    group.add_argument(
        "--master-weights", action="store_true", help="keep float32 masters of narrow parameters"
    )


def add_hardware(parser: CommandParser) -> None:
    group = parser.add_argument_group("prices")
    group.add_argument(
        "--topology",
        metavar="WHICH",
        help=f"{', '.join(TOPOLOGIES)}, or a file that `calibrate --save` wrote (default: h100)",
    )
    group.add_argument(
        "--across",
        default="",
        metavar="AXIS,...",
        help="axes between hosts, over InfiniBand (default: all within one, over NVLink)",
    )
    group.add_argument(
        "--memory", type=size_of_text, metavar="SIZE", help="of a rank's device, as 80GiB"
    )


def add_mesh(parser: CommandParser) -> None:
    """The option --mesh of a command without a model."""
    parser.add_argument(
        "--mesh",
        type=_mesh,
        default=Mesh(),
        metavar="AXIS=N,...",
        help="as tp=2 (default: one rank)",
    )


def add_backend(parser: CommandParser) -> None:
    """Where ranks run."""
    group = parser.add_argument_group("where it runs")
    group.add_argument(
        "--backend",
        choices=("inprocess", "ray"),
        default="inprocess",
        help="all ranks in this process, in turn (default), or an actor of Ray's for each",
    )
    group.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu (default) or cuda")
    group.add_argument("--address", metavar="HOST:PORT", help="of a Ray to join (default: none)")
    group.add_argument(
        "--ranks-per-actor",
        type=int,
        metavar="N",
        help="ranks that share an actor, and its GPU (default: 1)",
    )


def add_json(parser: CommandParser, what: str = "one JSON object in place of text") -> None:
    parser.add_argument("--json", action="store_true", help=what)


# -- from text -------------------------------------------------------------------------------------


def mesh_of_text(text: str) -> Mesh:
    """PlanningError unless the text is ``axis=size,...``."""
    axes: list[tuple[str, int]] = []
    for part in filter(None, re.split(r"[,\s]+", text.strip())):
        match = re.fullmatch(r"([A-Za-z_]\w*)\s*[=:]?\s*(\d+)", part)
        if match is None or "=" not in part:
            fix = f"{match[1]}={match[2]}" if match else "tp=2,pp=2"
            raise PlanningError(f"expected AXIS=SIZE, got {part!r}.\nfix: {fix}")
        axes.append((match[1], int(match[2])))
    names = [name for name, _ in axes]
    for name in names:
        if names.count(name) > 1:
            raise PlanningError(f"the axis {name!r} is stated twice in {text!r}; fix: once")
    if not axes:
        raise PlanningError(f"{text!r} states no axis.\nfix: tp=2,pp=2, or tp=1 for one rank")
    Mesh(**dict(axes))  # it refuses other errors, such as a reserved name
    return mesh_of(tuple(axes))


def mesh_text(mesh: Mesh) -> str:
    """``tp=2,pp=2``, the form of the option."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def size_of_text(text: str) -> float:
    """Bytes of ``80GiB``, ``80GB`` (the same here as for torch: binary), ``512M``."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([bkmgtBKMGT]?)(i?[bB])?\s*", text)
    try:
        size = float(match[1]) if match else 0.0
    except ValueError:
        size = 0.0
    if match is None or size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size.\nfix: 80GiB")
    return size * _UNITS[match[2].lower()]


def schedule_of(name: str, microbatches: int) -> Schedule:
    return SCHEDULES[name](microbatches=microbatches)


def topology_of(which: str | None, across: str, memory: float | None, mesh: Mesh) -> Topology:
    """A topology by name (None: h100), or from a file. PlanningError for neither."""
    between = [axis for axis in re.split(r"[,\s]+", across) if axis]
    which = which or "h100"
    path = Path(which)
    if which in TOPOLOGIES:
        topology = _named(which, between, mesh)
    elif path.exists():
        if between:
            raise PlanningError(
                f"--across {across}: the file {which} has its own latency and bandwidth of axes.\n"
                f"fix: leave --across out"
            )
        topology = read_topology(path)
    else:
        near = nearest(which, TOPOLOGIES)
        raise PlanningError(
            f"--topology {which}: there is no hardware and no file of this name.\n"
            f"fix: {near[0] if near else ', '.join(TOPOLOGIES)}, or a file that "
            f"`calibrate --save` wrote"
        )
    return topology if memory is None else replace(topology, memory_bytes=memory)


def _named(which: str, between: Sequence[str], mesh: Mesh) -> Topology:
    if which == "laptop":
        if between:
            raise PlanningError("--across: a laptop has one host; fix: leave it out")
        return topologies.laptop()
    make = {"h100": topologies.h100, "a100": topologies.a100}[which]
    there = [axis for axis in between if axis in mesh.axes]
    if not there:
        return make()
    return make(
        nvlink=tuple(axis for axis in mesh.axes if axis not in there), infiniband=tuple(there)
    )


def check_axes(axes: Sequence[str], meshes: Sequence[Mesh], option: str) -> None:
    """PlanningError for an axis that no mesh has."""
    known = list(dict.fromkeys(axis for mesh in meshes for axis in mesh.axes))
    for axis in axes:
        if axis not in known:
            near = nearest(axis, known)
            raise PlanningError(
                f"{option}: no mesh has an axis {axis!r}; there are {', '.join(known)}.\n"
                f"fix: {near[0] if near else known[0]}"
            )


def read_topology(path: Path) -> Topology:
    """Read a file of `write_topology`. PlanningError for another file."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanningError(
            f"{path} cannot be read as a topology: {error}.\nfix: dtensor calibrate --save {path}"
        ) from error
    known = [figure.name for figure in fields(Topology) if figure.name != "named"]
    if not isinstance(data, dict):
        raise PlanningError(f"{path} is no JSON object; fix: dtensor calibrate --save {path}")
    for key in data:
        if key not in known:
            near = nearest(key, known)
            raise PlanningError(
                f"{path} states {key!r}, which no topology has.\n"
                f"fix: {near[0] if near else ', '.join(known)}"
            )
    if data.get("op_latency"):  # a file of before launch_latency: an op's launch is in op_latency
        data = {"launch_latency": 0.0, **data}
    return Topology(**data)


def topology_data(topology: Topology) -> dict[str, Any]:
    """The fields of a topology, for JSON."""
    data: dict[str, Any] = {}
    for figure in fields(Topology):
        value = getattr(topology, figure.name)
        if figure.name != "named" and value is not None:
            data[figure.name] = dict(value) if isinstance(value, Mapping) else value
    return data


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """PlanningError for a name that torch.optim does not have."""
    known = [
        each
        for each, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    ]
    for each in known:
        if each.lower() == name.lower() and each != "Optimizer":
            return getattr(torch.optim, each)
    near = nearest(name, known)
    raise PlanningError(
        f"--optimizer {name}: torch.optim has none of this name.\n"
        f"fix: {near[0] if near else 'AdamW'}"
    )


# -- for argparse, which shows only the kind of a ValueError
# ---------------------------------------------


def _mesh(text: str) -> Mesh:
    try:
        return mesh_of_text(text)
    except PlanningError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def whole_option(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def dtype_of_text(text: str) -> torch.dtype:
    """``bf16``, ``bfloat16`` or ``torch.bfloat16``."""
    word = text.removeprefix("torch.").lower()
    if word in _DTYPES:
        return DTYPES[word]
    known = {str(DTYPES[name]).removeprefix("torch."): name for name in _DTYPES}
    if word in known:
        return DTYPES[known[word]]
    near = nearest(word, [*_DTYPES, *known])
    fix = near[0] if near else ", ".join(_DTYPES)
    raise PlanningError(f"{text!r} is no dtype of parameters.\nfix: {fix}")


def dtype_option(text: str) -> torch.dtype:
    try:
        return dtype_of_text(text)
    except PlanningError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _assignment(text: str) -> tuple[str, Any]:
    """A name and a value in Python's or JSON's form, or else a text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE.\nfix: num_hidden_layers=4")
    plain = {"True": "true", "False": "false", "None": "null"}.get(value, value)
    try:
        return name.strip(), json.loads(plain)
    except ValueError:
        return name.strip(), value


def _schedule(text: str) -> str:
    word = text.lower().replace("_", "").replace("-", "")
    same = {"onefoneb": "1f1b", "interleaved1f1b": "interleaved", "dualpipe": "dualpipev"}
    word = same.get(word, word)
    if word in SCHEDULES:
        return word
    near = nearest(word, SCHEDULES)
    fix = near[0] if near else ", ".join(SCHEDULES)
    raise argparse.ArgumentTypeError(f"{text!r} is no schedule.\nfix: {fix}")


def _zero(text: str) -> dict[str, int]:
    if text.lower() == "none":
        return {}
    axis, _, level = text.partition("=")
    if not axis or level not in ("0", "1", "2", "3"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no axis with a level of 1, 2 or 3.\nfix: dp=3"
        )
    return {axis: int(level)}
