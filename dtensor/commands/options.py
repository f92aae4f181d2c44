"""The options of all commands: a table for each function that takes them as arguments.

    LAUNCH.add_to(parser)                # --backend, --device, --address, --ranks-per-actor
    dt.launch(mesh, **LAUNCH.values(options))
    mesh_option("tp=2,pp=2")             # Mesh(tp=2, pp=2)
    topology_of("h100", "dp", None, mesh)     # dp between hosts, the other axes within one

An option has the name of the argument that it sets: ``ranks_per_actor`` is ``--ranks-per-actor``.
Options of one command only, such as its outputs, are in the file of that command. Text that cannot
be parsed is a PlanningError or an argparse error of one sentence with a fix.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from dtensor.api.model.stating.patterns import nearest
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
"""Schedules that put exactly two stages on each rank."""
SEVERAL_STAGES = ("interleaved", "loopedbfs", *TWO_STAGES)
"""Schedules that put more than one stage on each rank."""
TOPOLOGIES = ("h100", "a100", "laptop")
_DTYPES = ("f32", "bf16", "f16", "f64")
_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}

MODEL_EPILOG = """\
MODEL is one of:
  a Hugging Face model type (gpt2, llama, ...), for the model of its default configuration;
  a config.json, or a folder that has one;
  module.py:function or package.module:function; the function returns (model, loss_fn, *batch), or
  a dict with model, loss_fn, batch, and optionally placements, stages, inputs,
  attention, optimizer.
Models are made on the meta device, so they need no memory. Nothing is downloaded.

exit status: 0, done; 1, found something wrong; 2, an invalid request."""


# -- parsers of single values ----------------------------------------------------------------------
# They raise ArgumentTypeError, because argparse shows the message of no other exception.


def mesh_option(text: str) -> Mesh:
    """Return the mesh of ``axis=size,...``."""
    axes: list[tuple[str, int]] = []
    for part in filter(None, re.split(r"[,\s]+", text.strip())):
        match = re.fullmatch(r"([A-Za-z_]\w*)\s*[=:]?\s*(\d+)", part)
        if match is None or "=" not in part:
            fix = f"{match[1]}={match[2]}" if match else "tp=2,pp=2"
            raise argparse.ArgumentTypeError(f"expected AXIS=SIZE, got {part!r}.\nfix: {fix}")
        axes.append((match[1], int(match[2])))
    names = [name for name, _ in axes]
    for name in names:
        if names.count(name) > 1:
            raise argparse.ArgumentTypeError(
                f"the axis {name!r} is stated twice in {text!r}; fix: once"
            )
    if not axes:
        raise argparse.ArgumentTypeError(
            f"{text!r} states no axis.\nfix: tp=2,pp=2, or tp=1 for one rank"
        )
    try:
        Mesh(**dict(axes))  # checks, for example, for a reserved name
    except PlanningError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return mesh_of(tuple(axes))


def dtype_option(text: str) -> torch.dtype:
    """Return the dtype of ``bf16``, ``bfloat16`` or ``torch.bfloat16``."""
    name = text.removeprefix("torch.").lower()
    if name in _DTYPES:
        return DTYPES[name]
    full_names = {str(DTYPES[short]).removeprefix("torch."): short for short in _DTYPES}
    if name in full_names:
        return DTYPES[full_names[name]]
    near = nearest(name, [*_DTYPES, *full_names])
    fix = near[0] if near else ", ".join(_DTYPES)
    raise argparse.ArgumentTypeError(f"{text!r} is no dtype of parameters.\nfix: {fix}")


def _size_option(text: str) -> float:
    """Return the bytes of ``80GiB``, ``80GB`` or ``512M``. All units are powers of 1024."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([bkmgtBKMGT]?)(i?[bB])?\s*", text)
    try:
        size = float(match[1]) if match else 0.0
    except ValueError:
        size = 0.0
    if match is None or size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size.\nfix: 80GiB")
    return size * _UNITS[match[2].lower()]


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _assignment(text: str) -> tuple[str, Any]:
    """Return the name and the value of ``NAME=VALUE``. A value that is neither JSON nor True, False
    or None is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE.\nfix: num_hidden_layers=4")
    json_text = {"True": "true", "False": "false", "None": "null"}.get(value, value)
    try:
        return name.strip(), json.loads(json_text)
    except ValueError:
        return name.strip(), value


def _schedule_name(text: str) -> str:
    name = text.lower().replace("_", "").replace("-", "")
    class_names = {"onefoneb": "1f1b", "interleaved1f1b": "interleaved", "dualpipe": "dualpipev"}
    name = class_names.get(name, name)
    if name in SCHEDULES:
        return name
    near = nearest(name, SCHEDULES)
    fix = near[0] if near else ", ".join(SCHEDULES)
    raise argparse.ArgumentTypeError(f"{text!r} is no schedule.\nfix: {fix}")


def _zero_level(text: str) -> dict[str, int | str]:
    """Return the level of each axis in ``AXIS=LEVEL,...``, or {} for ``none``."""
    levels: dict[str, int | str] = {}
    for part in () if text.lower() == "none" else text.split(","):
        axis, _, level = part.partition("=")
        if not axis or level not in ("0", "1", "2", "3", "auto"):
            raise argparse.ArgumentTypeError(
                f"{text!r} is no axis with a level of 1, 2, 3 or auto.\nfix: dp=3"
            )
        levels[axis] = level if level == "auto" else int(level)
    return levels


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Options that are arguments of one function. ``options``: the name of each argument, and the
    keywords of `argparse.ArgumentParser.add_argument` for its option."""

    title: str
    options: Mapping[str, Mapping[str, Any]]

    def add_to(
        self,
        parser: argparse.ArgumentParser,
        *,
        repeatable: Sequence[str] = (),
        without: Sequence[str] = (),
    ) -> None:
        """Add the options, except ``without``. The value of a ``repeatable`` option is a list."""
        group = parser.add_argument_group(self.title)
        for name, keywords in self.options.items():
            if name in without:
                continue
            if name in repeatable:
                help_text = f"{keywords['help']}; may be repeated"
                keywords = {**keywords, "action": "append", "help": help_text}
            group.add_argument(f"--{name.replace('_', '-')}", **keywords)

    def values(self, options: argparse.Namespace) -> dict[str, Any]:
        """Return the parsed values as keyword arguments of the function."""
        return {name: getattr(options, name) for name in self.options}


WORKLOAD = OptionGroup(
    "the model and its batch",
    {
        "batch": dict(type=positive_int, metavar="N", help="rows of the whole batch (default: 8)"),
        "length": dict(type=positive_int, metavar="N", help="tokens of a row (default: 128)"),
        "dtype": dict(
            type=dtype_option,
            metavar="DTYPE",
            help="dtype of the parameters: f32, bf16, f16 (default: the configuration's, or f32)",
        ),
        "set": dict(
            action="append",
            type=_assignment,
            default=[],
            metavar="NAME=VALUE",
            help="a field of the configuration, or an argument of the function; may be repeated",
        ),
        "head": dict(
            metavar="HEAD",
            help="the Hugging Face head: causal-lm, masked-lm, ... (default: the model type's)",
        ),
        "optimizer": dict(metavar="NAME", help="a class of torch.optim (default: AdamW)"),
        "real": dict(
            action="store_true",
            help="call module.py:function without the meta device; needs the memory of the model",
        ),
    },
)
"""The options of `Workload.of` and of its optimizer."""

STRATEGY = OptionGroup(
    "how the model is placed",
    {
        "mesh": dict(
            type=mesh_option,
            required=True,
            metavar="AXIS=N,...",
            help="the mesh, as dp=2,tp=4: dp splits the batch, tp the weights (--placements), pp "
            "the layers (--stages)",
        ),
        "placements": dict(
            metavar="WHICH",
            help="auto (default): derive them from the program over tp; none; or file.py:NAME, a "
            "dict of placements or a function from a mesh to this dict",
        ),
        "stages": dict(
            metavar="WHICH", help="auto (default), or the number of pipeline stages over pp"
        ),
        "schedule": dict(
            type=_schedule_name,
            metavar="NAME",
            help=f"the order of microbatches: {', '.join(SCHEDULES)} (default: 1f1b)",
        ),
        "microbatches": dict(
            type=positive_int,
            metavar="N",
            help="number of microbatches of the batch; also for a mesh without pp",
        ),
        "zero": dict(
            type=_zero_level,
            metavar="AXIS=LEVEL,...",
            help="ZeRO over axes: level 1 shards the optimizer state, 2 also the gradients, 3 "
            "also the parameters; auto takes the cheapest; or none",
        ),
        "recompute": dict(
            action="append",
            metavar="GLOB",
            help="modules whose activations the backward computes again; may be repeated",
        ),
        "clip_grad_norm": dict(
            type=float, metavar="X", help="clip the norm of the gradients to X (default: no)"
        ),
        "master_weights": dict(
            action="store_true", help="keep float32 copies of parameters of narrower dtypes"
        ),
    },
)
"""The options of `dt.parallelize` and `dt.train_step`."""

HARDWARE = OptionGroup(
    "prices",
    {
        "topology": dict(
            metavar="WHICH",
            help=f"{', '.join(TOPOLOGIES)}, or a file that `calibrate --save` wrote "
            "(default: h100)",
        ),
        "across": dict(
            default="",
            metavar="AXIS,...",
            help="axes between hosts, over InfiniBand (default: all within one host, over NVLink)",
        ),
        "memory": dict(
            type=_size_option, metavar="SIZE", help="memory of the device of a rank, as 80GiB"
        ),
    },
)
"""The options of `topology_of`."""

LAUNCH = OptionGroup(
    "where it runs",
    {
        "backend": dict(
            choices=("inprocess", "ray"),
            default="inprocess",
            help="run all ranks in this process, in turn (default), or in Ray actors",
        ),
        "device": dict(default="cpu", metavar="DEVICE", help="cpu (default) or cuda"),
        "address": dict(
            metavar="HOST:PORT", help="a Ray cluster to join (default: start one on this machine)"
        ),
        "ranks_per_actor": dict(
            type=int, metavar="N", help="ranks that share an actor and its GPU (default: 1)"
        ),
    },
)
"""The options of `dt.launch`."""


def add_workload(parser: argparse.ArgumentParser, *, meta: bool = True) -> None:
    """Add the model and `WORKLOAD`. ``meta``: the command can use the meta device."""
    parser.add_argument("model", metavar="MODEL", help="the model to train, see below")
    WORKLOAD.add_to(parser, without=() if meta else ("real",))


def add_json(parser: Any, help: str = "print one JSON object in place of text") -> None:
    """Add --json to a parser or a group of options."""
    parser.add_argument("--json", action="store_true", help=help)


# -- values that need several options --------------------------------------------------------------


def schedule_of(name: str, microbatches: int) -> Schedule:
    return SCHEDULES[name](microbatches=microbatches)


def topology_of(topology: str | None, across: str, memory: float | None, mesh: Mesh) -> Topology:
    """Return the topology of a name (None: h100) or of a file, with this memory unless it is None.
    Raises PlanningError if there is neither."""
    between_hosts = [axis for axis in re.split(r"[,\s]+", across) if axis]
    name = topology or "h100"
    path = Path(name)
    if name in TOPOLOGIES:
        found = _named_topology(name, between_hosts, mesh)
    elif path.exists():
        if between_hosts:
            raise PlanningError(
                f"--across {across}: the file {name} has its own latency and bandwidth of axes.\n"
                f"fix: leave --across out"
            )
        found = read_topology(path)
    else:
        near = nearest(name, TOPOLOGIES)
        raise PlanningError(
            f"--topology {name}: there is no hardware and no file of this name.\n"
            f"fix: {near[0] if near else ', '.join(TOPOLOGIES)}, or a file that "
            f"`calibrate --save` wrote"
        )
    return found if memory is None else replace(found, memory_bytes=memory)


def _named_topology(name: str, between_hosts: Sequence[str], mesh: Mesh) -> Topology:
    if name == "laptop":
        if between_hosts:
            raise PlanningError("--across: a laptop has one host; fix: leave it out")
        return topologies.laptop()
    make = {"h100": topologies.h100, "a100": topologies.a100}[name]
    infiniband = tuple(axis for axis in between_hosts if axis in mesh.axes)
    if not infiniband:
        return make()
    nvlink = tuple(axis for axis in mesh.axes if axis not in infiniband)
    return make(nvlink=nvlink, infiniband=infiniband)


def check_axes(axes: Sequence[str], meshes: Sequence[Mesh], option: str) -> None:
    """Raise PlanningError for an axis that no mesh has."""
    mesh_axes = list(dict.fromkeys(axis for mesh in meshes for axis in mesh.axes))
    for axis in axes:
        if axis not in mesh_axes:
            near = nearest(axis, mesh_axes)
            raise PlanningError(
                f"{option}: no mesh has an axis {axis!r}; there are {', '.join(mesh_axes)}.\n"
                f"fix: {near[0] if near else mesh_axes[0]}"
            )


def read_topology(path: Path) -> Topology:
    """Read a file that `calibrate --save` wrote. Raises PlanningError for another file."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanningError(
            f"{path} cannot be read as a topology: {error}.\nfix: dtensor calibrate --save {path}"
        ) from error
    names = [figure.name for figure in fields(Topology) if figure.name != "named"]
    if not isinstance(data, dict):
        raise PlanningError(f"{path} is no JSON object; fix: dtensor calibrate --save {path}")
    for key in data:
        if key not in names:
            near = nearest(key, names)
            raise PlanningError(
                f"{path} states {key!r}, which no topology has.\n"
                f"fix: {near[0] if near else ', '.join(names)}"
            )
    if data.get("op_latency"):  # older files have no launch_latency: op_latency includes it
        data = {"launch_latency": 0.0, **data}
    return Topology(**data)


def topology_data(topology: Topology) -> dict[str, Any]:
    """Return the fields of a topology for JSON, as `read_topology` reads them."""
    data: dict[str, Any] = {}
    for figure in fields(Topology):
        value = getattr(topology, figure.name)
        if figure.name != "named" and value is not None:
            data[figure.name] = dict(value) if isinstance(value, Mapping) else value
    return data


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class of `torch.optim`, in any case of letters. Raises PlanningError if there is
    none of this name."""
    class_names = [
        key
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    ]
    for class_name in class_names:
        if class_name.lower() == name.lower() and class_name != "Optimizer":
            return getattr(torch.optim, class_name)
    near = nearest(name, class_names)
    raise PlanningError(
        f"--optimizer {name}: torch.optim has none of this name.\n"
        f"fix: {near[0] if near else 'AdamW'}"
    )
