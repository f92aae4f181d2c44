"""`dtensor search`: the strategies under which training, or generation, is predicted to be best.

    $ dtensor search llama --ranks 8 --memory 80GiB --batch 64 --length 2048
    $ dtensor search gpt2 --ranks 4 --code 1        # the best one as a program
    $ dtensor search llama --ranks 8 --objective tokens --slots 32 --length 1024 --prompt 256

Exit status 2 where no strategy fits: a sentence says which came nearest. Not here: the search
(api/search).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from dtensor.api.search.result import FoundStrategy
from dtensor.commands.huggingface import LENGTH
from dtensor.commands.options import (
    MODEL_EPILOG,
    add_hardware,
    add_json,
    add_workload,
    optimizer_class,
    topology_of,
    whole_option,
)
from dtensor.commands.parser import add_command
from dtensor.commands.plan import REAL
from dtensor.commands.progress import ProgressLine
from dtensor.commands.simulate import write
from dtensor.commands.user_function import is_named
from dtensor.commands.workload import Workload
from dtensor.errors import PlanningError
from dtensor.sharding.spec.mesh import Mesh

SEARCHED = Mesh(pp=2, dp=2, tp=2)
"""The axes that a search's meshes have."""
SLOTS = 8


def add_to(parsers: Any) -> None:
    parser = add_command(
        parsers,
        "search",
        "the best meshes, placements, schedules and ZeRO levels for so many ranks",
        "Searches meshes, placements, stages, schedules, ZeRO levels and recomputation for those "
        "under which a training step is predicted to be fastest, or to need least memory; or the "
        "meshes on which the model is predicted to generate most tokens a second.",
        MODEL_EPILOG,
    )
    add_workload(parser)
    group = parser.add_argument_group("the search")
    group.add_argument(
        "--ranks", type=whole_option, required=True, metavar="N", help="of each mesh"
    )
    group.add_argument(
        "--objective",
        choices=("time", "memory", "tokens"),
        default="time",
        help="seconds of a step (default), memory of the fullest rank, or tokens a second of texts "
        "that are generated, in slots of --length",
    )
    group.add_argument(
        "--slots",
        type=whole_option,
        metavar="N",
        help=f"of tokens: texts that are under way at once (default: {SLOTS})",
    )
    group.add_argument(
        "--prompt",
        type=whole_option,
        metavar="N",
        help="of tokens: how many of a text are its prompt (default: half of --length)",
    )
    add_hardware(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--code", type=whole_option, metavar="N", help="the Nth one, as a program")
    group.add_argument(
        "-o", "--output", metavar="FILE.html", help="write a page of those found, side by side"
    )
    add_json(parser)
    parser.add_argument("--real", action="store_true", help=REAL)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import dtensor as dt
    from dtensor.commands.json_data import print_json, row_data
    from dtensor.explorer import save_pages
    from dtensor.explorer.page import checked_path

    topology = topology_of(options.topology, options.across, options.memory, SEARCHED)
    optimizer: Any = optimizer_class(options.optimizer or "AdamW")
    if options.output:
        checked_path(options.output)
    generates = options.objective == "tokens"
    _check_given(options, generates)
    with ProgressLine() as progress:
        with progress.doing(f"makes {options.model}"):
            work = Workload.of(_of_generation(options) if generates else options, meta=True)
        stated = work.stated.get("optimizer")
        if options.optimizer is None and stated is not None:
            optimizer = stated
        with progress.counted("searches") as told:
            if generates:
                length = _length(options, work)
                result = dt.search(
                    work.model,
                    None,
                    options.ranks,
                    topology=topology,
                    objective="tokens",
                    progress=told,
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
                    progress=told,
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
                **_of_tokens(row),
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


def _check_given(options: argparse.Namespace, generates: bool) -> None:
    """PlanningError for what is of the other kind of search."""
    others = ("batch", "optimizer") if generates else ("slots", "prompt")
    for name in others:
        if getattr(options, name) is not None:
            raise PlanningError(
                f"--{name} is of a search for "
                f"{'a training step' if generates else 'tokens a second'}, and this is "
                f"--objective {options.objective}.\n"
                f"fix: leave it out{'' if generates else ', or --objective tokens'}"
            )


def _of_generation(options: argparse.Namespace) -> argparse.Namespace:
    """A model that continues texts; a function's own says what its texts are."""
    if is_named(options.model):
        return argparse.Namespace(**{**vars(options), "length": None})
    return argparse.Namespace(**{**vars(options), "head": options.head or "causal-lm"})


def _length(options: argparse.Namespace, work: Workload) -> int:
    """Of a slot: as stated, or of a row of text by the configuration's default."""
    if options.length is not None or is_named(options.model):
        return options.length or LENGTH
    return work.batch[0].shape[1]


def _of_tokens(row: FoundStrategy) -> dict[str, Any]:
    """Figures of generation; ``seconds`` is of a token."""
    if row.tokens_per_second is None:
        return {}
    return {
        "tokens_per_second": row.tokens_per_second,
        "seconds": row.seconds,
        "prefill_seconds": row.prefill_seconds,
        "memory": {**asdict(row.memory), "total": row.memory.total},
        "bubble": row.bubble,
    }
