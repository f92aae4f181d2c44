"""`dtensor search`: searches for the best strategies of training or generation (`dt.search`).

    $ dtensor search llama --ranks 8 --memory 80GiB --batch 64 --length 2048
    $ dtensor search gpt2 --ranks 4 --code 1        # the best one as a program
    $ dtensor search llama --ranks 8 --objective tokens --slots 32 --length 1024 --prompt 256

Exit status 2 if no strategy fits; the error names the strategy that needs least memory.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from dtensor.api.search.result import FoundStrategy
from dtensor.commands.huggingface import LENGTH
from dtensor.commands.options import (
    HARDWARE,
    MODEL_EPILOG,
    OptionGroup,
    add_json,
    add_workload,
    optimizer_class,
    positive_int,
    topology_of,
)
from dtensor.commands.parser import add_command
from dtensor.commands.progress import ProgressLine
from dtensor.commands.simulate import write
from dtensor.commands.user_function import is_value_path
from dtensor.commands.workload import Workload
from dtensor.errors import PlanningError
from dtensor.sharding.spec.mesh import Mesh

SEARCHED = Mesh(pp=2, dp=2, tp=2)
"""A mesh with the axes of all searched meshes, for --across."""
SLOTS = 8
SEARCH = OptionGroup(
    "the search",
    {
        "ranks": dict(
            type=positive_int, required=True, metavar="N", help="number of ranks of each mesh"
        ),
        "objective": dict(
            choices=("time", "memory", "tokens"),
            default="time",
            help="least seconds of a training step (default), least memory of the fullest rank, or "
            "most generated tokens per second",
        ),
        "slots": dict(
            type=positive_int,
            metavar="N",
            help="for tokens: number of sequences that are generated at the same time, each in a "
            f"slot of --length tokens (default: {SLOTS})",
        ),
        "prompt": dict(
            type=positive_int,
            metavar="N",
            help="for tokens: prompt tokens of each sequence (default: half of --length)",
        ),
    },
)
"""The options of `dt.search`."""


def add_to(parsers: Any) -> None:
    parser = add_command(
        parsers,
        "search",
        "finds the best meshes, placements, schedules and ZeRO levels for a number of ranks",
        "Searches meshes, placements, stages, schedules, ZeRO levels and recomputation for the "
        "strategies with the least predicted time or memory of a training step; or searches for "
        "the meshes with the most predicted generated tokens per second.",
        MODEL_EPILOG,
    )
    add_workload(parser)
    SEARCH.add_to(parser)
    HARDWARE.add_to(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--code", type=positive_int, metavar="N", help="print the Nth strategy as a program"
    )
    group.add_argument(
        "-o", "--output", metavar="FILE.html", help="write a page of the plans, side by side"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import dtensor as dt
    from dtensor.commands.json_data import print_json, row_data
    from dtensor.explorer import save_pages
    from dtensor.explorer.page import checked_path

    topology = topology_of(**HARDWARE.values(options), mesh=SEARCHED)
    optimizer: Any = optimizer_class(options.optimizer or "AdamW")
    if options.output:
        checked_path(options.output)
    generates = options.objective == "tokens"
    _check_objective(options, generates)
    with ProgressLine() as progress:
        with progress.doing(f"makes {options.model}"):
            work = Workload.of(_generation_options(options) if generates else options, meta=True)
        stated = work.stated.get("optimizer")
        if options.optimizer is None and stated is not None:
            optimizer = stated
        with progress.counted("searches") as report:
            if generates:
                length = _length(options, work)
                result = dt.search(
                    work.model,
                    None,
                    options.ranks,
                    topology=topology,
                    objective="tokens",
                    progress=report,
                    slots=options.slots or SLOTS,
                    length=length,
                    prompt=options.prompt or max(length // 2, 1),
                )
            else:
                result = dt.search(
                    work.model,
                    work.loss_fn,
                    options.ranks,
                    *work.batch,
                    topology=topology,
                    objective=options.objective,
                    optimizer=optimizer,
                    progress=report,
                )
    title = work.model_title if generates else work.title
    if options.code is not None and options.code > len(result):
        raise PlanningError(
            f"--code {options.code}: {len(result)} strategies were found; fix: --code {len(result)}"
        )
    if options.output:
        write(options.output, lambda path: save_pages(path, {row.name: row.plan for row in result}))
    if options.json:
        from dtensor.api.search.comparison import Compared

        rows = [
            {
                **row_data(Compared(name=row.name, mesh=row.mesh, found=row.plan)),
                **_generation_data(row),
                "tie": row in result.ties,
                "code": row.text,
            }
            for row in result
        ]
        print_json({"model": title, "objective": result.objective, "strategies": rows})
    elif options.code is not None:
        print(result[options.code - 1].text)
    else:
        print(f"{title}\n\n{result}")
    return 0


def _check_objective(options: argparse.Namespace, generates: bool) -> None:
    """Raise PlanningError for an option that does not apply to the objective."""
    for name in ("batch", "optimizer") if generates else ("slots", "prompt"):
        if getattr(options, name) is not None:
            raise PlanningError(
                f"--{name} is for a search for "
                f"{'a training step' if generates else 'tokens a second'}, and this is "
                f"--objective {options.objective}.\n"
                f"fix: leave it out{'' if generates else ', or --objective tokens'}"
            )


def _generation_options(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options of a workload that generates. A Hugging Face model gets the head for
    causal language models. For a user's function --length is the slot's, not the batch's."""
    if is_value_path(options.model):
        return argparse.Namespace(**{**vars(options), "length": None})
    return argparse.Namespace(**{**vars(options), "head": options.head or "causal-lm"})


def _length(options: argparse.Namespace, work: Workload) -> int:
    """Return the tokens of a slot: --length, or the length of a row of the batch. For a user's
    function without --length, return `LENGTH`."""
    if options.length is not None or is_value_path(options.model):
        return options.length or LENGTH
    return work.batch[0].shape[1]


def _generation_data(row: FoundStrategy) -> dict[str, Any]:
    """Return the JSON fields of a search for tokens; {} for another search. ``seconds``: per
    generated token."""
    if row.tokens_per_second is None:
        return {}
    return {
        "tokens_per_second": row.tokens_per_second,
        "seconds": row.seconds,
        "prefill_seconds": row.prefill_seconds,
        "memory": {**asdict(row.memory), "total": row.memory.total},
        "bubble": row.bubble,
    }
