"""Mutate the package, one place at a time, and find which set of tests detects each mutation.

    python -m tests.mutants --record             # which lines each test of the default set executes
    python -m tests.mutants --num 40 --seed 0    # draws mutations, runs tests, writes a table

A mutation negates a condition, drops a collective, swaps two operands, removes a wait, an undo or a
check, or shifts an index by one. Draws are spread over `ROOMS` and `KINDS`, on lines that the
default set executes. First the default tests that execute the line run, in a copy of the checkout;
if all pass, slow tests of the same files. A set detects a mutation if one of its tests fails or
hangs.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "build" / "mutants" / "coverage"
PYTEST = (sys.executable, "-m", "pytest", "-q")
TABLE = ROOT / "benchmarks" / "results" / "mutants.md"
ROOMS = ("sharding", "frontend", "runtime", "daft", "api")
MARKS = {"default": "not slow and not gpu and not sweep", "all": "not gpu and not sweep"}
COLLECTIVES = re.compile(r"all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|redistribute")
REMOVED = {
    "remove a wait": re.compile(r"(^|_)(wait|join|synchronize|acquire|flush)"),
    "remove an undo": re.compile(r"undo|restore|rollback|revert|reset|release|discard|free"),
    "remove a check": re.compile(r"check|verify|validate|require|assert|refuse|raise_"),
}
KINDS = ("negate a condition", "drop a collective", "swap two operands", *REMOVED, "shift an index")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """``old`` at ``line`` of ``file``, a path in the checkout, becomes ``new``."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    new: str

    def applied(self, source: str) -> str:
        """``start`` and ``end`` are offsets in the source's bytes."""
        text = source.encode()
        return (text[: self.start] + self.new.encode() + text[self.end :]).decode()


# -- the mutations of a file -----------------------------------------------------------------------


def mutations(file: str, source: str) -> Iterator[Mutation]:
    """All mutations of ``source`` whose old text is on one line."""
    starts = list(
        itertools.accumulate((len(x.encode()) for x in source.splitlines(True)), initial=0)
    )
    for node in ast.walk(ast.parse(source)):
        for kind, old, new in _changes(node):
            if old.lineno == old.end_lineno:
                first, last = (
                    starts[old.lineno - 1] + offset
                    for offset in (old.col_offset, old.end_col_offset)
                )
                yield Mutation(
                    file=file, line=old.lineno, kind=kind, start=first, end=last, new=new
                )


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """Yield (kind, replaced text, new text) of one node."""
    match node:
        case ast.If(test=test, body=[ast.Raise()], orelse=[]):
            yield "remove a check", test, "False"
            yield "negate a condition", test, f"(not ({ast.unparse(test)}))"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "negate a condition", test, f"(not ({ast.unparse(test)}))"
        case ast.comprehension(ifs=[test, *_]):
            yield "negate a condition", test, f"(not ({ast.unparse(test)}))"
        case ast.Expr(value=ast.Call(func=func)):
            name = _name(func)
            for kind, pattern in REMOVED.items():
                if pattern.search(name):
                    yield kind, node, "pass"
            if COLLECTIVES.search(name):
                yield "drop a collective", node, "pass"
        case ast.Call(func=func, args=[first, *_]) if COLLECTIVES.search(_name(func)):
            yield "drop a collective", node, ast.unparse(first)
        case ast.Call(func=func, args=[ast.Name() as a, ast.Name() as b], keywords=[]):
            if _name(func) not in ("isinstance", "issubclass", "max", "min", "zip"):
                yield "swap two operands", node, f"{ast.unparse(func)}({b.id}, {a.id})"
        case ast.BinOp(
            left=a, op=ast.Sub() | ast.Div() | ast.FloorDiv() | ast.Mod() as op, right=b
        ):
            if not isinstance(a, ast.Constant):  # "..." % x is no sum
                yield "swap two operands", node, ast.unparse(ast.BinOp(b, op, a)).join("()")
        case ast.Compare(ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE()], comparators=[b]):
            swapped = ast.Compare(b, node.ops, [node.left])
            yield "swap two operands", node, ast.unparse(swapped).join("()")
        case ast.Subscript(slice=ast.Constant(value=int(i)) as index, ctx=ast.Load()):
            yield "shift an index", index, str(i + 1)
        case ast.Slice(lower=ast.expr() as bound) | ast.Slice(upper=ast.expr() as bound):
            yield "shift an index", bound, f"({ast.unparse(bound)}) + 1"
        case ast.Call(func=ast.Name(id="range"), args=[*_, bound]):
            yield "shift an index", bound, f"({ast.unparse(bound)}) + 1"
        case _:
            pass


def _name(func: ast.expr) -> str:
    return ast.unparse(func).rpartition(".")[2]


def drawn(num: int, seed: int, lines: Mapping[str, Mapping[int, Sequence[str]]]) -> list[Mutation]:
    """Draw ``num`` mutations on ``lines``, from each room and kind in turn while there are any."""
    choice = random.Random(seed)
    pools: dict[tuple[str, str], list[Mutation]] = defaultdict(list)
    for file, executed in sorted(lines.items()):
        for mutation in mutations(file, (ROOT / file).read_text()):
            if executed.get(mutation.line):
                pools[file.split("/")[1], mutation.kind].append(mutation)
    found: list[Mutation] = []
    turns = itertools.cycle((room, i) for i in range(len(KINDS)) for room in ROOMS)
    for room, i in itertools.islice(turns, num * len(KINDS)):
        # A diagonal: in 7 rounds a room has each kind once, and in 5 a kind each room.
        pool = pools[room, KINDS[(i + ROOMS.index(room)) % len(KINDS)]]
        if pool and len(found) < num:
            found.append(pool.pop(choice.randrange(len(pool))))
    return found


# -- which tests execute a line --------------------------------------------------------------------


def record(jobs: int) -> None:
    """Run the default set and record which lines of the package each test executes in its process.
    Each process runs a few files, because coverage's tracer has crashed with threads and a crashed
    process loses its record; its files run again, each in its own process."""
    shutil.rmtree(RECORD.parent, ignore_errors=True)
    RECORD.parent.mkdir(parents=True)
    files = sorted({test.partition("::")[0] for test in members("default")})
    batches = [files[i : i + 8] for i in range(0, len(files), 8)]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        crashed = [batch for batch in pool.map(_recorded, batches) if batch]
        for again in pool.map(_recorded, [[file] for batch in crashed for file in batch]):
            if again:
                print(f"{again[0]} crashes: its lines are not known", flush=True)
    whole = coverage.CoverageData(basename=str(RECORD))
    for part in sorted(RECORD.parent.glob("part.*")):
        found = coverage.CoverageData(basename=str(part))
        found.read()
        whole.update(found)
    whole.write()


def _recorded(files: list[str]) -> list[str]:
    """Record some files; return them if the process crashed."""
    name = re.sub(r"\W", "_", files[0]) + f"_{len(files)}"
    command = [*PYTEST, "-rfE", "--cov=dtensor", "--cov-context=test", "--cov-report=", *files]
    part = RECORD.parent / f"part.{name}"
    environment = {**os.environ, "COVERAGE_FILE": str(part), "OMP_NUM_THREADS": "1"}
    with open(RECORD.parent / f"log.{name}", "w") as log:
        ran = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    print(f"{name}: exit status {ran.returncode}", flush=True)
    return [] if ran.returncode in (0, 1) else files


@cache
def members(which: str) -> dict[str, None]:
    """Return the tests of a set in order."""
    command = [*PYTEST, "--collect-only", "-m", MARKS[which]]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return dict.fromkeys(line for line in ran.stdout.splitlines() if line.startswith("tests/"))


@cache
def executed() -> dict[str, dict[int, list[str]]]:
    """Read the record: file -> line -> the tests of the default set that execute that line."""
    data = coverage.CoverageData(basename=str(RECORD))
    data.read()
    tests = members("default")
    found: dict[str, dict[int, list[str]]] = {}
    for file in data.measured_files():
        found[str(Path(file).relative_to(ROOT))] = {
            line: sorted({c.rpartition("|")[0] for c in contexts} & tests.keys())
            for line, contexts in data.contexts_by_lineno(file).items()
        }
    return found


def percent() -> float:
    """Return the share of the package's lines that the default set or an import executes."""
    lines = all_lines = 0
    measured = coverage.Coverage(data_file=str(RECORD), source=[str(ROOT / "dtensor")])
    measured.load()
    for file in sorted((ROOT / "dtensor").rglob("*.py")):
        statements = set(measured.analysis2(str(file))[1])
        contexts = measured.get_data().contexts_by_lineno(str(file))
        lines += len(statements & {line for line, found in contexts.items() if found})
        all_lines += len(statements)
    return 100 * lines / all_lines


@cache
def breadth() -> Counter[str]:
    """Return how many lines each test executes."""
    return Counter(t for lines in executed().values() for tests in lines.values() for t in tests)


def tests_of(mutation: Mutation, which: str, most: int) -> list[str]:
    """Return tests of the default set that execute the line, or slow tests of their files."""
    tests = executed()[mutation.file][mutation.line]
    if which == "default":
        return sorted(tests, key=lambda test: (breadth()[test], test))[:most]
    whole = Counter(test.partition("::")[0] for test in members("default"))
    here = Counter(test.partition("::")[0] for test in tests)
    slow = [
        t for t in members("all") if t not in members("default") and t.partition("::")[0] in here
    ]
    return sorted(slow, key=lambda t: -here[f := t.partition("::")[0]] / whole[f])[:most]


# -- one mutation ----------------------------------------------------------------------------------


def found_by(mutation: Mutation, which: str, most: int) -> str | None:
    """Return the first test of a set that fails under a mutation, or None."""
    tests = tests_of(mutation, which, most)
    if not tests:
        return None
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        kept = shutil.ignore_patterns(".*", "build", "_build", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, copy, ignore=kept)
        file = copy / mutation.file
        file.write_text(mutation.applied(file.read_text()))
        (Path(folder) / "tests").write_text("\n".join(tests))
        command = [*PYTEST, "-x", "--tb=no", "-p", "no:cacheprovider", "-m", MARKS[which]]
        command += ["--timeout=300", f"@{Path(folder) / 'tests'}"]
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        try:
            ran = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=3600
            )
        except subprocess.TimeoutExpired:
            return "it does not end"
    if ran.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ran.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit status {ran.returncode}"


def judged(mutation: Mutation, most: int) -> dict[str, str | None]:
    """Return by set the test that detects the mutation; a mutation that the default set detects
    counts as detected by both."""
    first = found_by(mutation, "default", most)
    return {"default": first, "all": first or found_by(mutation, "all", most // 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--num", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--most", type=int, default=400, help="tests for one mutation; of slow tests a quarter"
    )
    args = parser.parse_args()
    if args.record:
        return record(args.jobs)
    chosen = drawn(args.num, args.seed, executed())
    breadth(), members("all")  # once, before threads ask
    covered = f"{percent():.1f} % of the lines of dtensor/ are executed by the default set"
    command = f"python -m tests.mutants --num {args.num} --seed {args.seed}"
    print(covered, flush=True)
    rows: list[str] = []
    counts = {"default": 0, "all": 0}
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for mutation, found in zip(chosen, pool.map(lambda m: judged(m, args.most), chosen)):
            source = (ROOT / mutation.file).read_bytes()
            old = source[mutation.start : mutation.end].decode()
            words = f"{mutation.kind}: `{old}` to `{mutation.new}`".replace("|", "\\|")
            tests = (f"`{test}`" if test else "-" for test in found.values())
            rows.append(f"| `{mutation.file}:{mutation.line}` | {words} | {' | '.join(tests)} |")
            for which, test in found.items():
                counts[which] += test is not None
            share = (
                f"{counts['default']} of the {counts['all']} that all tests find, of {len(rows)}"
            )
            TABLE.write_text(
                "# Mutations and the tests that find them\n\n"
                f"`{command}`: the default set finds {share}. {covered}.\n\n"
                "| line | mutation | found by the default set | found by all |\n|---|---|---|---|\n"
                + "".join(f"{row}\n" for row in rows)
            )
            print(rows[-1], flush=True)
    print(share)


if __name__ == "__main__":
    main()
