"""The pages of docs/ run as written and print the output that they show (tests/pages.py); their
links and pictures are correct.

The default set runs README.md (tests/test_readme.py) and the pages of `ALWAYS`; `make test-all`
runs all pages.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.pages import DOCS, ROOT, RUN, SHOWN, blocks_of, languages, pages, run_page, starts_ray

PAGES = pages()
ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "docs/commands.md": "tests/commands/test_page.py",
    "docs/daft.md": "tests/daft/test_daft_docs.py",
    "docs/scale_out.md": "tests/daft/test_two_hosts.py",
    "docs/from_scratch.md": "tests/test_from_scratch.py",
    "docs/testing.md": "tests/testing/test_docs.py",
}
"""Pages with tests of their own, which run them too."""
ALWAYS = {
    "docs/start.md",
    "docs/tutorial.md",
    "docs/coming_from/fsdp.md",
    "docs/howto/accumulation.md",
    "docs/reference/errors.md",
    "docs/zero.md",
}
"""The pages that the default set runs: the first two that a user reads, and one of each folder."""
NOT_RUN = {
    "CONTRIBUTING.md": 1,
    "README.md": 1,
    "docs/coming_from/dtensor.md": 1,
    "docs/coming_from/fsdp.md": 1,
    "docs/coming_from/megatron.md": 1,
    "docs/coming_from/slurm.md": 2,
    "docs/coming_from/torchrun.md": 1,
    "docs/examples.md": 3,
    "docs/howto/hang.md": 1,
    "docs/howto/other_trainers.md": 6,
    "docs/index.md": 1,
    "docs/notes/gpu.md": 1,
    "docs/scale_out.md": 2,
    "docs/start.md": 1,
}
"""How many blocks of a page say that they do not run here, and why."""


def quoted() -> Iterator[tuple[str, str]]:
    """Yield pages and the texts in which they quote numbers of benchmark results. Pages may state
    numbers that code can compute only in this way."""
    rules = tables("docs/certified.md")["Certified rules"]["all"]
    yield "README.md", f"the {rules[1]} ops with a rule are tried"
    yield "README.md", f"[{rules[2]:,} trials, {rules[3]} wrong]"

    families = tables("benchmarks/results/huggingface.md")[
        "Families of Hugging Face's transformers"
    ]
    right, refused, listed, trained = (
        families[name][1]
        for name in (
            *("right", "refused", "families of models that transformers lists"),
            "built small, and trained by plain torch",
        )
    )
    yield "docs/huggingface.md", f"{right} of {trained} families train"
    yield "docs/huggingface.md", f"In the {refused} refused families"
    yield "docs/huggingface.md", f"Of the {listed} types"

    steps = tables("benchmarks/results/gpu_step.md")
    cases = [case for case in steps if "eager" in steps[case]]
    shown = ("12 layers of 1024, bfloat16", "768, autocast to bfloat16", "4 layers of 256, float32")
    for case, name in zip(cases, shown, strict=True):
        eager, *others = (steps[case][side] for side in ("eager", "compile", "dtensor"))
        cells = (f"{other[1]:.1f} ({other[2]:.2f})" for other in others)
        yield "README.md", " | ".join((name, f"{eager[1]:.1f}", *cells))
    ratios = [steps[case]["dtensor"][2] for case in cases]
    yield "docs/faq.md", f"takes {min(ratios):.1f} to {max(ratios):.1f} times eager torch's"

    block = tables("benchmarks/results/transformer_block.md")["Two ranks, tp=2"]
    peers = ("hand", "hand, fused AdamW", "PyTorch's DTensor", "hand, our transport, fused AdamW")
    for width in (64, 256, 512, 1024):
        cells = (f"{block[f'{width} / {peer}'][4]:.2f}" for peer in peers)
        yield "README.md", " | ".join((f"| {width}", *cells))

    pipelines = (ROOT / "benchmarks/results/pipelining.txt").read_text()
    for name, line in (
        ("both 1F1B", r"^OneFOneB .*  (\S+)  (\S+) to (\S+)$"),
        ("the better zero-bubble schedule of each", r"  (\S+)  (\S+) to (\S+)  best zero-bubble"),
    ):
        rows = [[float(n) for n in row] for row in re.findall(line, pipelines, re.MULTILINE)]
        cells = [f"{ratio:.2f} ({low:.2f} to {high:.2f})" for ratio, low, high in rows]
        for width, runs in ((256, cells[::2]), (64, cells[1::2])):
            yield "docs/performance.md", " | ".join((f"| {width}", name, *runs))


def tables(path: str) -> dict[str, dict[str, list[Any]]]:
    """Return a file's tables, by heading and row (its first cell, or two joined by /). A cell that
    begins with a number is that number."""
    found: dict[str, dict[str, list[Any]]] = {}
    heading = ""
    for line in (ROOT / path).read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("| ").split("|")]
            for name in (cells[0], " / ".join(cells[:2])):
                found.setdefault(heading, {}).setdefault(name, [number(cell) for cell in cells])
    return found


def number(cell: str) -> int | float | str:
    first = cell.partition(" ")[0]
    if first.isdecimal():
        return int(first)
    return float(first) if re.fullmatch(r"\d+\.\d+", first) else cell


def test_numbers_quoted_in_pages_equal_benchmark_results() -> None:
    lost = [(page, text) for page, text in quoted() if text not in " ".join(PAGES[page].split())]
    assert lost == []


def runs(text: str) -> bool:
    return any(block.kind in RUN and not block.not_run for block in blocks_of(text))


def marks(page: str, text: str) -> list[pytest.MarkDecorator]:
    ray = [pytest.mark.ray] if starts_ray(text) else []
    return [*ray, pytest.mark.default if page in ALWAYS else pytest.mark.slow]


# peft still reads an attribute that transformers has renamed
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("error:.* repeat the same work:UserWarning")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=marks(page, text))
        for page, text in PAGES.items()
        if runs(text) and page not in ELSEWHERE
    ],
)
def test_page_prints_what_it_shows(
    page: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if starts_ray(PAGES[page]):
        request.getfixturevalue("ray_session")  # that pages share one
    run_page(Path(page).stem, PAGES[page], tmp_path)
    for drawn in tmp_path.glob("*.svg"):
        assert drawn.read_text() == (DOCS / "pictures" / drawn.name).read_text(), drawn


def test_every_code_block_runs_or_is_marked_not_run() -> None:
    left_out = {page: sum(b.not_run is not None for b in blocks_of(PAGES[page])) for page in PAGES}
    assert {page: count for page, count in left_out.items() if count} == NOT_RUN
    for page, text in PAGES.items():
        assert set(languages(text)) <= {*RUN, *SHOWN}, page
        blocks = blocks_of(text)
        for number, block in enumerate(blocks):
            later = "".join(b.text for b in blocks[number + 1 :])
            used = block.file is None or block.file.removesuffix(".py") in later
            assert used or page in ELSEWHERE, f"{page}: nothing runs {block.file}"
    for page, test in ELSEWHERE.items():
        assert runs(PAGES[page]) and Path(page).name in (ROOT / test).read_text()


PASSES = [
    "```python\nprint(1)\n```\n```text\n1\n```\n",
    "```sh\n# not run here: so\nexit 3\n```\n",
    "```sh\necho a; echo b > c\n```\n```text\na\n```\n```console\n$ cat c\nb\n```\n",
    "```console\n$ echo a 4 b; false\na ... b\n$ echo $?\n1\n```\n",
    "```python\n# f.py\nprint(2)\n```\n```console\n$ python f.py\n2\n```\n",
    "```python\nimport sys\n```\n"
    "```python\nprint(sys._getframe().f_lineno)\n```\n```text\n3\n```\n",
]
FAILS = [
    "```python\nprint(1)\n```\n```text\n2\n```\n",
    "```python\nprint(1)\n```\n",
    "```sh\nexit 3\n```\n",
    "```console\n$ true\n$ echo a\nb\n```\n",
    "```console\n$ false\n$ true\n```\n",
]


@pytest.mark.parametrize("text", [*PASSES, *FAILS])
def test_run_page_fails_for_wrong_pages(text: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) if text in FAILS else nullcontext():
        run_page("page", text, tmp_path)


IN_CHECKOUT = {"examples", "tests"}
INSTALLED = {*sys.stdlib_module_names, "dtensor", "numpy", "pytest", "ray", "torch"}


def test_head_of_page_names_extra_packages_of_its_program() -> None:
    unnamed: list[tuple[str, str]] = []
    for page, text in PAGES.items():
        program = "\n".join(b.text for b in blocks_of(text) if b.kind == "python")
        imported = re.findall(r"^ *(?:from|import) (\w+)[\w.]*(?= import|$| as)", program, re.M)
        head = text.partition("```")[0]
        for name in sorted({*imported} - INSTALLED):
            if ("checkout" if name in IN_CHECKOUT else name) not in head:
                unnamed.append((page, name))
    assert unnamed == []


def test_links_in_pages_lead_to_existing_files() -> None:
    """Also checks pages that are not part of the site."""
    lost = [
        (page, link)
        for page, text in PAGES.items()
        for link in re.findall(
            r"\]\(([^)\s#]+)", re.sub(r"```.*?^```$", "", text, flags=re.S | re.M)
        )
        if "://" not in link and not ((ROOT / page).parent / link).exists()
    ]
    assert lost == []


def test_pictures_equal_output_of_draw_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS / "pictures")
    spec = importlib.util.spec_from_file_location("draw", DOCS / "pictures" / "draw.py")
    assert spec and spec.loader
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    for name, picture in draw.PICTURES.items():
        assert (DOCS / "pictures" / f"{name}.svg").read_text() == picture(), (
            f"python docs/pictures/draw.py {name}"
        )
    files = [f.name for f in DOCS.rglob("*.svg") if "_build" not in f.parts]
    assert len(files) == len(set(files)), "the site has one folder for all pictures"


def test_link_out_of_docs_works_in_site_or_is_error(tmp_path: Path) -> None:
    (docs := tmp_path / "docs").mkdir()
    shutil.copy(DOCS / "conf.py", docs)
    shutil.copytree(DOCS / "site_parts", docs / "site_parts")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.txt").write_text("x = 1\n")
    (tmp_path / "other.md").write_text("# Other\n\n## A place\n\n[code](code/a.txt)\n")
    text = "# Index\n\n[a](../code) [b](../other.md#a-place) [c](../other.md#no) [d](../gone.py)\n"
    (docs / "index.md").write_text(text)
    ran = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-b", "html", str(docs), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        timeout=900,
    )
    warned = re.findall(r"WARNING: (.*)", ran.stderr)
    assert len(warned) == 2 and "no" in warned[0] and "gone.py" in warned[1], ran.stderr
    page = (tmp_path / "site" / "index.html").read_text()
    links = re.findall(r'href="(files/[^"]+)"', page)
    assert links == ["files/code.html", "files/other.md.html#a-place"]
    assert 'id="a-place"' in (tmp_path / "site" / "files" / "other.md.html").read_text()
    folder = (tmp_path / "site" / "files" / "code.html").read_text()
    assert 'href="code/a.txt.html"' in folder
    assert (tmp_path / "site" / "files" / "code" / "a.txt.html").exists()


def test_docstrings_are_converted_to_rst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    from site_parts.docstrings import as_rst

    text = """Of `Shard`, ``*.weight``, a * and f32[8@tp]; `x`s.

    step(x)  # code

- one
- two,
  and more

Args:
    mesh, name: of `a`
        and more.
    rest_: b.

Raises:
    PlanningError: if."""
    wanted = r"""Of :py:obj:`Shard <dtensor.Shard>`, ``*.weight``, a \* and f32[8\@tp]; ``x``\ s.

.. code-block:: none

    step(x)  # code

- one
- two,
  and more

:Parameters:
    ``mesh``, ``name``
        of ``a``
        and more.
    ``rest_``
        b.

:Raises:
    ``PlanningError``
        if.
"""
    found = "\n".join(as_rst(text.splitlines(), frozenset({"Shard"})))
    assert re.sub(r"\n{3,}", "\n\n", found).strip() == wanted.strip()
