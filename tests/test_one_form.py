"""Structured values stay structured: labels and lines of generated code are records, no code parses
their text, and records have few fields."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "dtensor"

APART = set("partition rpartition split rsplit splitlines startswith endswith".split())  # noqa: SIM905
APART |= {"removeprefix", "removesuffix"}
RE = set("match search fullmatch findall finditer sub split".split())  # noqa: SIM905
WORDS = {
    "label": {"Label", "Span", "span_of", "Trace", "Instruction"},
    "code": {"Function", "Body", "CodeLine"},
}
"""What a file imports that has to do with either."""
OWN = {"label": {"daft/ir/label.py"}, "code": {"daft/ir/program.py", "daft/ir/code.py"}}
"""Where its text is made, and read back."""


def parsed(words: Iterable[str]) -> dict[str, ast.Module]:
    """Return the syntax trees of the package's files whose text contains one of the words."""
    texts = {str(f.relative_to(PACKAGE)): f.read_text() for f in PACKAGE.rglob("*.py")}
    return {
        file: ast.parse(text) for file, text in texts.items() if any(word in text for word in words)
    }


def imported(tree: ast.Module) -> set[str]:
    """Return the names that a file imports, anywhere in it."""
    froms = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {alias.name for node in froms for alias in node.names}


def is_text(node: ast.expr, of: str) -> bool:
    """Whether an expression contains a label or generated code, except as an argument of a call."""
    match node:
        case ast.Call(func=ast.Name("str" | "map"), args=args):
            return any(is_text(arg, of) for arg in args)
        case ast.Call(func=ast.Attribute(value=value)):
            return is_text(value, of)
        case ast.Attribute(attr="label") | ast.Name("label"):
            return of == "label"
        case ast.Attribute(value=ast.Name("span" | "s" | "first"), attr="name"):
            return of == "label"
        case ast.Attribute(value=ast.Name(name), attr="source"):
            return of == "code" and name in ("function", "fn", "f", "body", "built")
        case ast.Attribute(value=ast.Name("line"), attr="text" | "comment"):
            return of == "code"
        case ast.Attribute() | ast.Subscript() | ast.Starred():
            return is_text(node.value, of)
        case ast.JoinedStr(values=values):
            return any(isinstance(v, ast.FormattedValue) and is_text(v.value, of) for v in values)
        case ast.BoolOp(values=values):
            return any(is_text(value, of) for value in values)
        case ast.BinOp(left=left, right=right):
            return is_text(left, of) or is_text(right, of)
        case _:
            return False


def taken_apart(tree: ast.Module, of: str) -> Iterator[str]:
    """Yield the calls that parse the text of a label or of generated code. A name counts as such a
    text if it is bound to one anywhere in the file."""
    bound = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and is_text(node.value, of)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def concerns(node: ast.expr) -> bool:
        return is_text(node, of) or (isinstance(node, ast.Name) and node.id in bound)

    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("re"), attr=word), args=args):
                if word in RE and any(map(concerns, args)):
                    yield ast.unparse(node)
            case ast.Call(func=ast.Attribute(value=value, attr=word), args=args):
                if word in APART and concerns(value):
                    yield ast.unparse(node)
                if word in RE - APART and any(map(concerns, args)):  # of a compiled expression
                    yield ast.unparse(node)
            case _:
                pass


@pytest.mark.parametrize("of", ["label", "code"])
def test_package_does_not_parse_text_of_records(of: str) -> None:
    looked_at = {
        file: tree
        for file, tree in parsed(WORDS[of]).items()
        if imported(tree) & WORDS[of] and file not in OWN[of]
    }
    assert len(looked_at) > 5
    found = {file: list(taken_apart(tree, of)) for file, tree in looked_at.items()}
    assert {file: calls for file, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    ("of", "text"),
    [
        ("label", 'span.name.partition(":")[0].partition(" stage ")'),
        ("label", 're.match(r"[FBIW]\\d", span.name)'),
        ("label", 'str(item.label).startswith("update")'),
        ("label", '_NAME.fullmatch(f"{label}")'),
        ("label", 'title = str(item.label)\ntitle.rpartition(" ")'),
        ("code", "head, *body = function.source.splitlines()"),
        ("code", 'code, _, comment = str(line.text).partition("  # ")'),
        ("code", "text = body.source\n_NAME.findall(text)"),
    ],
)
def test_parsing_of_record_text_is_detected(of: str, text: str) -> None:
    assert list(taken_apart(ast.parse(text), of))


FEW = 15
MORE = {
    "RankStatus": 17,
    "Costing": 18,
    "OptimizerHome": 19,
    "ReachedState": 22,
    "ModelHome": 24,
}
"""Records of more fields, from before there was a bound: no number grows, and none comes in."""


def num_fields(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the dataclasses of a file and their numbers of fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(
            "dataclass" in ast.unparse(decorator) for decorator in node.decorator_list
        ):
            stated = (n for n in node.body if isinstance(n, ast.AnnAssign))
            yield node.name, sum("ClassVar" not in ast.unparse(n.annotation) for n in stated)


@pytest.mark.slow
def test_dataclasses_have_few_fields() -> None:
    found = [pair for tree in parsed(["dataclass"]).values() for pair in num_fields(tree)]
    assert len(found) > 100
    assert {name: n for name, n in found if n > MORE.get(name, FEW)} == {}
    text = "@dataclass(frozen=True)\nclass A:\n" + "".join(f"    x{n}: int\n" for n in range(16))
    assert list(num_fields(ast.parse(text))) == [("A", 16)]
