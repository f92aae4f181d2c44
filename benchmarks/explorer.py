"""Saved pages of plans: seconds to make, bytes, first paint, and how long a click takes.

    OMP_NUM_THREADS=1 python -m benchmarks.explorer [--only mlp demo llama] [--write]
    python -m benchmarks.explorer --only mlp demo --pictures docs/pictures

Three pages: README's MLP at tp=2, the demo's GPT under tp2pp2, and Hugging Face's LlamaForCausalLM
as it comes (32 layers) on 64 ranks, dp=4 x pp=4 x tp=4, planned on the meta device. Each is opened
from disk in headless Chromium, anew for each round. A click is the time from the event until the
document is laid out again: every module of the tree, and steps one after the other. Needs Chromium
and its driver; with Llama two minutes. ``--pictures`` makes those of docs/explorer.md.
"""

from __future__ import annotations

import argparse
import base64
import os
import platform
import statistics
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor as dt
from benchmarks.plan_large import llama, llama_loss
from benchmarks.smallest import parsed
from dtensor.explorer import save_pages
from tests.explorer.browser import browser

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "explorer.md"


class MLP(nn.Module):
    """README's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1024, 4096)
        self.down = nn.Linear(4096, 1024)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def mlp(down: dt.Placement | None = None, hints: bool = False) -> dt.Plan:
    placements = {"up.weight": dict(tp=dt.Row()), "down.weight": dict(tp=down or dt.Column())}
    model = dt.parallelize(MLP(), dt.Mesh(tp=2), placements)
    step = dt.train_step(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return step.plan(torch.randn(512, 1024), torch.randn(512, 1024), hints=hints)


def demo(name: str = "tp2pp2") -> dt.Plan:
    sys.path.insert(0, str(ROOT / "examples"))
    import train_gpt

    place, config = train_gpt.PLACEMENTS[name], train_gpt.Config()
    gpt = train_gpt.GPT(config)
    opt = torch.optim.AdamW(gpt.parameters())
    model = dt.parallelize(gpt, dt.Mesh(**place.mesh), place.parameters, stages=place.stages)
    step = dt.train_step(
        model,
        train_gpt.loss_fn,
        opt,
        inputs=place.inputs,
        schedule=place.schedule,
        clip_grad_norm=1.0,
    )
    tokens = torch.zeros(16, config.context, dtype=torch.long)
    return step.plan(tokens, tokens)


def llama_on_64() -> dt.Plan:
    with torch.device("meta"):
        model = llama(32)
        ids = torch.zeros(64, 2048, dtype=torch.long)
    placements = dt.placements.for_model(model, (ids,), dict(labels=ids), size=4)
    each = [f"model.layers.{{{8 * n}..{8 * n + 7}}}.*" for n in range(4)]
    stages = [["model.embed_tokens*", each[0]], [each[1]], [each[2]]]
    stages.append([each[3], "model.norm*", "lm_head*"])
    parallel = dt.parallelize(model, dt.Mesh(dp=4, pp=4, tp=4), placements, stages={"pp": stages})
    step = dt.train_step(
        parallel,
        llama_loss,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        inputs=dict(dp=dt.Row()),
        schedule=dt.OneFOneB(microbatches=8),
        clip_grad_norm=1.0,
    )
    return step.plan(ids, ids)


PLANS: dict[str, tuple[str, Callable[[], dt.Plan]]] = {
    "mlp": ("README's MLP, tp=2", mlp),
    "demo": ("the demo, tp2pp2", demo),
    "llama": ("Llama, 32 layers, dp=4 pp=4 tp=4", llama_on_64),
}

CLICKS = """
const took = { modules: [], steps: [] };
const timed = (act) => {
  const begin = performance.now();
  act();
  document.body.getBoundingClientRect();
  return performance.now() - begin;
};
const modules = document.querySelectorAll('.node').length;
for (let i = 1; i < modules; i++)
  took.modules.push(timed(() => document.querySelectorAll('.node')[i].click()));
document.querySelector('.node').click();
for (const row of [...document.querySelectorAll('.step')].slice(0, 100))
  took.steps.push(timed(() => row.click()));
return took;
"""
PAINT = """
const found = performance.getEntriesByType('paint').find(e => e.name === 'first-contentful-paint');
return found ? found.startTime : null;
"""


def first_paint(driver: Any) -> float:
    """In ms from the start of the navigation; the browser tells it a little after it was."""
    for _ in range(100):
        if (at := driver.execute_script(PAINT)) is not None:
            return at
        time.sleep(0.05)
    raise RuntimeError("nothing was painted in 5 s")


def measure(name: str, folder: Path, rounds: int) -> list[str]:
    title, make = PLANS[name]
    plan = make()
    begin = time.process_time()
    path = plan.save(folder / f"{name}.html")
    made = time.process_time() - begin
    paints: list[float] = []
    clicks: dict[str, list[float]] = {"modules": [], "steps": []}
    errors = 0
    for _ in range(rounds):
        with browser() as driver:
            driver.get(path.as_uri())
            paints.append(first_paint(driver))
            for kind, found in driver.execute_script(CLICKS).items():
                clicks[kind] += found
            errors += len(driver.get_log("browser"))
    size = path.stat().st_size
    return [
        title,
        f"{len(plan.steps):,}",
        f"{made:.2f} s",
        f"{size / 1e6:.2f} MB",
        f"{statistics.median(paints):.0f} ms ({max(paints):.0f})",
        *(f"{statistics.median(own):.1f} ms ({max(own):.1f})" for own in clicks.values()),
        str(errors),
    ]


HEAD = (
    *("page", "steps of the plan", "made in, CPU", "size", "first paint", "click on a module"),
    *("click on a step", "console errors"),
)


_ALIKE = 30
"""Of two colours, summed over red, green and blue of 255."""
PIXELS = """
const [png, done] = arguments, image = new Image();
image.onload = () => {
  const canvas = document.createElement('canvas');
  [canvas.width, canvas.height] = [image.width, image.height];
  const g = canvas.getContext('2d');
  g.drawImage(image, 0, 0);
  const data = g.getImageData(0, 0, image.width, image.height).data;
  let text = '';
  for (let i = 0; i < data.length; i += 32768)
    text += String.fromCharCode(...data.subarray(i, i + 32768));
  done([image.width, image.height, btoa(text)]);
};
image.src = 'data:image/png;base64,' + png;
"""


def small_png(driver: Any) -> bytes:
    """A screenshot in 256 colours, a third of the size of one in all: the commonest of those that
    differ, then the commonest of the others."""
    shot = driver.get_screenshot_as_base64()
    width, height, text = driver.execute_async_script(PIXELS, shot)
    pixels = np.frombuffer(base64.b64decode(text), np.uint8).reshape(-1, 4)[:, :3]
    colours, which, count = np.unique(pixels, axis=0, return_inverse=True, return_counts=True)
    ranked = colours[np.argsort(-count, kind="stable")].astype(int)
    unlike: list[int] = []
    for number, colour in enumerate(ranked):
        if all(np.abs(ranked[unlike] - colour).sum(1) > _ALIKE):
            unlike.append(number)
    others = [number for number in range(len(ranked)) if number not in set(unlike)]
    kept = ranked[[*unlike, *others][:256]]
    nearest = [int(np.abs(kept - colour).sum(1).argmin()) for colour in colours.astype(int)]
    rows = np.array(nearest, np.uint8)[which.reshape(-1)].reshape(height, width)
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0),
        b"PLTE": kept.astype(np.uint8).tobytes(),
        b"IDAT": zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows), 9),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts.items()
    )


def pictures(folder: Path, scratch: Path, with_llama: bool) -> None:
    """Those of docs/explorer.md, each at the size that it is shown for."""
    pages: dict[str, Path] = {
        "demo": demo().save(scratch / "demo.html"),
        "turned": mlp(dt.Row(), hints=True).save(scratch / "turned.html"),
        "plans": save_pages(
            scratch / "plans.html", {name: demo(name) for name in ("dp2", "tp2", "tp2pp2")}
        ),
    }
    if with_llama:
        pages["llama"] = scratch / "llama.html"
        if not pages["llama"].exists():  # as --keep left it
            llama_on_64().save(pages["llama"])
    to_module = "document.querySelectorAll('.node')[3].click();"
    memory = "document.getElementById('tab-memory').click();"
    low = "document.documentElement.style.setProperty('--under', '150px');"
    shots: list[tuple[str, str, tuple[int, int], bool, str]] = [
        ("explorer", "demo", (1280, 860), False, ""),
        ("explorer_why", "turned", (1280, 1060), False, low),
        ("explorer_memory", "demo", (900, 760), False, to_module + memory),
        ("explorer_side_by_side", "plans", (1280, 900), True, ""),
        ("explorer_llama", "llama", (1440, 900), True, ""),
    ]
    for name, page, (width, height), dark, act in shots:
        if page not in pages:
            continue
        with browser(width, height, dark=dark) as driver:
            driver.get(pages[page].as_uri())
            first_paint(driver)
            driver.execute_script(act)
            time.sleep(0.3)
            (folder / f"{name}.png").write_bytes(small_png(driver))
        print(f"{name}.png: {(folder / f'{name}.png').stat().st_size:,} bytes")


def table(rows: Sequence[Sequence[str]]) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="put it into benchmarks/results")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the pages there")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="make screenshots instead")
    options = parsed(parser, rounds=1, only=["mlp"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        if options.pictures:
            pictures(options.pictures, folder, "llama" in options.only)
            return
        rows = []
        for name in options.only:
            rows.append(measure(name, folder, options.rounds))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    if options.write:
        what = f"{platform.processor() or platform.machine()}, torch {torch.__version__}"
        load = f"{os.cpu_count()} cores at a load of {os.getloadavg()[0]:.0f}"
        how = "`OMP_NUM_THREADS=1 python -m benchmarks.explorer --write`"
        RESULTS.write_text(
            f"# Pages of plans\n\n{how}, {what}, {load}, headless Chromium without a GPU, "
            f"{options.rounds} rounds: medians, the worst in parentheses.\n\n{table(rows)}\n"
        )


if __name__ == "__main__":
    main()
