"""Compare the plans and lowered programs of a fixed corpus at a revision and in the work tree.

    python -m tests.replay --base HEAD~3        # prints each difference; exits with 1 if any
    python -m tests.replay --base main train    # only entries whose names contain "train"

The corpus has training steps (models, placements, schedules, ZeRO levels, dtypes), compiled
functions, eager ops, generation, transfers and searches. Each entry is a text: plans, and the
instructions and functions of every program that the entry loads. Training stops before its first
run; the other entries run on ranks in this process. Each side imports its own `dtensor` and
`tests`.
"""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MAX_LINES = 40  # of a difference that are printed
ROWS = 45  # training cases that are drawn from the table, evenly

RAISED = "raised "  # begins the text of an entry that could not be recorded

Texts = dict[str, str]


class Lowered(BaseException):
    """Raised when a training step has been lowered and verified, because it need not run."""


@contextmanager
def loaded_programs(*, stop: bool = False) -> Iterator[list[str]]:
    """Yield a list to which the text of each program is added when a cluster loads it.

    ``stop``: raise `Lowered` when a program that commits was added.
    """
    from dtensor.daft import Cluster, Commit

    texts: list[str] = []

    def recording(load: Callable[..., Any], self: Any, program: Any) -> Any:
        handle = load(self, program)
        if not any(text.startswith(program.text()) for text in texts):  # a part passes it on
            functions = [f"{name}\n{function.source}" for name, function in program.functions]
            texts.append("\n\n".join([program.text(), *functions]))
        if stop and any(isinstance(i, Commit) for rank in program.ranks for i in rank.instructions):
            raise Lowered
        return handle

    classes = [kind for kind in subclasses(Cluster) if "load" in vars(kind)]
    originals = {kind: vars(kind)["load"] for kind in classes}
    for kind, load in originals.items():
        kind.load = wrapped(recording, load)
    try:
        yield texts
    finally:
        for kind, load in originals.items():
            kind.load = load


def wrapped(recording: Callable[..., Any], load: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, program: recording(load, self, program)


def subclasses(kind: type) -> Iterator[Any]:
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def training_step(run: Any, data: Sequence[Any]) -> str:
    """Return the plan and the program of a step; ``run``: a `tests.training.Run`."""
    import dtensor as dt

    with loaded_programs(stop=True) as programs:
        try:
            with dt.launch(run.mesh):
                run.step(*data)
        except Lowered:
            pass
        else:
            raise AssertionError("the step loaded no program that commits")
    return "\n\n".join([run.step.plan(*data).text(full=True), *programs])


def table_row(row: dict[str, str]) -> str:
    from tests.api.training_cases import case_of
    from tests.training import Run

    case = case_of(row)
    stated = {k: v for k, v in case.stated.items() if k != "backend"}
    run = Run.of(case.placed, module=case.build(), make=case.make, loss=case.loss, **stated)
    return training_step(run, case.data[-1])


def golden_program(name: str) -> str:
    from tests.runtime.test_program_goldens import text_of

    return text_of(name)


def compiled(placed: dict[str, Any], fn: Callable[..., Any]) -> str:
    """Return the plan and programs of a compiled function of x[8 16] and w[16 12]."""
    import torch

    import dtensor as dt

    mesh = dt.Mesh(dp=2, tp=2)
    compiled_fn = dt.compile(fn, mesh, out=dict(dp=dt.Row()))
    with loaded_programs() as programs, dt.launch(mesh):
        x = dt.distribute(torch.ones(8, 16), mesh, **placed["x"])
        w = dt.distribute(torch.ones(16, 12), mesh, **placed["w"])
        plan = compiled_fn.plan(x, w)
        result = compiled_fn(x, w)
        text = str(result.spec)
    return "\n\n".join([plan.text(full=True), text, *programs])


def eager_op(placed: dict[str, Any], fn: Callable[..., Any]) -> str:
    """Return the programs of eager ops on x[8 16] and w[16 12]."""
    import torch

    import dtensor as dt

    mesh = dt.Mesh(dp=2, tp=2)
    with loaded_programs() as programs, dt.launch(mesh), dt.implicit_redistribution("allow"):
        x = dt.distribute(torch.ones(8, 16), mesh, **placed["x"])
        w = dt.distribute(torch.ones(16, 12), mesh, **placed["w"])
        text = str(fn(x, w).spec)
    return "\n\n".join([text, *programs])


def generation(where: str) -> str:
    import dtensor as dt
    from tests.api.generation import placed

    model = placed("llama", where)
    with loaded_programs() as programs, dt.launch(model.mesh):
        gen = dt.generator(model, slots=2, length=16)
        texts = list(gen([[1, 2, 3], [4, 5]], max_new_tokens=3))
    return "\n\n".join([repr([t.tokens for t in texts]), *programs])


def transfer() -> str:
    import torch

    import dtensor as dt

    source, target = dt.Mesh(dp=2, tp=2), dt.Mesh(tp=4)
    with loaded_programs() as programs, dt.launch(source, target):
        x = dt.distribute(torch.ones(9, 16), source, dp=dt.Row(), tp=dt.Column())
        plan = dt.transfer_plan(x, target, tp=dt.Column())
        dt.transfer(x, target, tp=dt.Column())
    return "\n\n".join([str(plan), *programs])


def search(ranks: int, memory: int | None) -> str:
    import torch

    import dtensor as dt
    from tests.models import GPT, loss_fn

    tokens = torch.empty(8, 12, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = GPT(layers=2)
    options: dict[str, Any] = {} if memory is None else dict(memory=memory)
    found = dt.search(
        model, loss_fn, ranks, tokens, tokens, topology=dt.topologies.laptop(), **options
    )
    rows = [f"{row.seconds:.9e} {row.text}\n{row.plan}" for row in found]
    return "\n\n".join(rows)


def corpus() -> dict[str, Callable[[], str]]:
    """Return the corpus: by name, a function that returns the text."""
    import dtensor as dt
    from tests.api.training_cases import rows
    from tests.runtime.test_program_goldens import NAMES

    table = list(rows().items())
    drawn = table[:: max(1, len(table) // ROWS)]
    row, column, whole = dt.Row(), dt.Column(), dt.Replicate()
    megatron = dict(x=dict(dp=row, tp=whole), w=dict(dp=whole, tp=column))
    contracted = dict(x=dict(dp=row, tp=column), w=dict(dp=whole, tp=row))
    ops: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
        "mm": (megatron, lambda x, w: x @ w),
        "mm of a split contraction": (contracted, lambda x, w: (x @ w).relu()),
        "softmax": (megatron, lambda x, w: (x @ w).softmax(-1)),
        "transpose and add": (megatron, lambda x, w: (x @ w).t() + 1),
        "sum": (contracted, lambda x, w: (x * 2).sum(0)),
        "cat": (megatron, lambda x, w: (x @ w).repeat(2, 1).cumsum(1)),
        "view": (megatron, lambda x, w: (x @ w).view(8, 4, 3).transpose(0, 1).contiguous()),
        "variance": (megatron, lambda x, w: (x @ w).var(-1)),
    }
    return {
        **{f"train {name}": partial(table_row, dict(case)) for name, case in drawn},
        **{f"golden {name}": partial(golden_program, name) for name in NAMES},
        **{f"compile {name}": partial(compiled, *op) for name, op in ops.items()},
        **{f"eager {name}": partial(eager_op, *op) for name, op in ops.items()},
        **{f"generate {where}": partial(generation, where) for where in ("tp2", "dp2")},
        "transfer": transfer,
        "search 2 ranks": partial(search, 2, None),
        "search 4 ranks in little memory": partial(search, 4, 150_000),
    }


def source_lines(text: str, lines: dict[str, list[str]]) -> str:
    """Replace each position in a file of tests, ``models.py:28``, by its line of code: an edit
    above that line is no difference. ``lines``: by file name, the lines."""

    def line(match: re.Match[str]) -> str:
        name, number = match[1], int(match[2])
        known = 0 < number <= len(lines.get(name, ()))
        return f"{name}: {lines[name][number - 1].strip()}" if known else match[0]

    return re.sub(r"(\w+\.py):(\d+)", line, text)


def record(words: Sequence[str], output: Path) -> None:
    """Write the text of each entry whose name contains one of ``words``, as JSON by name."""
    import torch

    import tests.models as models

    warnings.simplefilter("ignore")
    folder = Path(models.__file__).parent
    files = [folder / "models.py", folder / "api" / "training_cases.py", Path(__file__)]
    lines = {file.name: file.read_text().splitlines() for file in files}
    texts: Texts = {}
    for name, text in corpus().items():
        if words and not any(word in name for word in words):
            continue
        torch.manual_seed(0)
        try:
            texts[name] = source_lines(text(), lines)
        except Exception as error:
            texts[name] = f"{RAISED}{type(error).__name__}: {error}"
    output.write_text(json.dumps(texts))


def start(tree: Path, words: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    """Start a process that records the corpus with the packages of ``tree``."""
    code = (
        "import importlib.util as u, pathlib, sys; sys.path.insert(0, sys.argv[1]); "
        "spec = u.spec_from_file_location('replay', sys.argv[2]); "
        "module = u.module_from_spec(spec); spec.loader.exec_module(module); "
        "module.record(sys.argv[4:], pathlib.Path(sys.argv[3]))"
    )
    arguments = [str(tree), str(Path(__file__).resolve()), str(output), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment.pop("PYTHONPATH", None)
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, cwd=tree)


def difference(base: Texts, tree: Texts) -> Iterator[str]:
    """Yield the lines to print: each entry that differs, or that one side lacks."""
    for name in sorted(base.keys() | tree.keys()):
        if name not in base or name not in tree:
            yield f"{name}: only {'in the work tree' if name in tree else 'at the base'}"
        elif tree[name].startswith(RAISED):
            yield f"{name}: {tree[name].splitlines()[0]}"
        elif base[name] != tree[name]:
            lines = list(
                difflib.unified_diff(
                    base[name].splitlines(), tree[name].splitlines(), "base", "work tree", "", "", 1
                )
            )
            yield f"{name}: differs"
            yield from (f"    {line.rstrip()}" for line in lines[:MAX_LINES])
            if len(lines) > MAX_LINES:
                yield f"    ... {len(lines) - MAX_LINES} more lines"


def last_of_main() -> str:
    """Return the commit that main had before HEAD: origin/main or main, or HEAD's parent."""
    commits = [
        subprocess.run(
            ["git", "rev-parse", "--quiet", "--verify", name],
            cwd=ROOT,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for name in ("HEAD", "origin/main", "main")
    ]
    return next((commit for commit in commits[1:] if commit not in ("", commits[0])), "HEAD~1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--base", metavar="REV", help="by default the last commit of main before HEAD"
    )
    parser.add_argument("words", nargs="*", help="only entries whose names contain a word")
    options = parser.parse_args()
    archive = subprocess.run(
        ["git", "archive", options.base or last_of_main(), "dtensor", "tests"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(base, filter="data")
        outputs = [Path(folder) / name for name in ("base.json", "tree.json")]
        children = [start(tree, options.words, to) for tree, to in zip((base, ROOT), outputs)]
        if failed := [child.args for child in children if child.wait()]:
            raise SystemExit(f"the corpus could not be recorded: {failed}")
        texts = [json.loads(output.read_text()) for output in outputs]
    lines = list(difference(*texts))
    print("\n".join(lines))
    print(f"{len(texts[1])} entries, {sum(not line.startswith(' ') for line in lines)} differences")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
