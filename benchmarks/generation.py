"""Decoding, as its user sees it: a call and the tokens it gives.

    OMP_NUM_THREADS=1 python -m benchmarks.generation [--rounds 12] [--write]
    OMP_NUM_THREADS=1 python -m benchmarks.generation --only torch     # or ray, counts, apart
    OMP_NUM_THREADS=1 python -m benchmarks.generation --arrivals 1000       # exits 1 if unequal

*torch*: a GPT of 8 layers, one rank, one slot, against a loop over the same module with a cache
that is written in place, under the same static mask; and one that slices the live positions instead
of masking. A round times a few tokens of each side, in turns, so that what else the machine does
falls on all alike; ratios are taken round by round. All sides' tokens are equal.

*ray*: a small Llama, tp=2 in two actors beside one actor, and beside transformers' own
``tp_plan="auto"`` on gloo, in two processes that this script starts.

*counts*: messages for each actor and token, captures over 100 lengths of prompts, and how long 128
prompts and one take to begin, by the number of those that enter together.

*apart*: prefill on one mesh, decoding on another: bytes that ranks send for a prompt, as they are
sent, beside 2 layers x heads x t x head dim x bytes; and on Ray, how long a text waits for its next
token while long prompts are taken in, beside a generator on one mesh.

*arrivals*: random requests into 8 slots, each against itself alone in the same slots.
"""

from __future__ import annotations

import argparse
import copy
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import dtensor as dt
from benchmarks.smallest import parsed
from dtensor.api.generation.generator import Generator
from dtensor.api.generation.requests import TextRequest
from tests.api.generation import Writer, build, placed

RESULTS = Path(__file__).parent / "results" / "generation.md"
LAYERS, TOKENS = 8, 8  # of the model; that one timing takes
Row = tuple[object, ...]


# -- beside a loop of torch's ----------------------------------------------------------------------


class InPlace:
    """A cache as one writes it by hand for one text: a mask over all positions, or live ones cut
    out."""

    def __init__(self, layers: int, heads: int, length: int, dim: int, *, sliced: bool) -> None:
        self.k = [torch.zeros(1, heads, length, dim) for _ in range(layers)]
        self.v = [torch.zeros(1, heads, length, dim) for _ in range(layers)]
        self.every = torch.arange(length)
        self.sliced = sliced
        self.at = 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        to = self.at + k.shape[2]
        kept = self.k[layer], self.v[layer]
        for buffer, new in zip(kept, (k, v), strict=True):
            buffer[:, :, self.at : to] = new
        if self.sliced:
            return kept[0][:, :, :to], kept[1][:, :, :to]
        return kept

    def mask(self) -> Tensor | None:
        return None if self.sliced else (self.every <= self.at)[None, None, None]


class Loop:
    """The next token, and the next, from a module and a cache."""

    def __init__(self, model: Writer, length: int, *, sliced: bool) -> None:
        heads = model.blocks[0].heads
        dim = model.embed.embedding_dim // heads
        self.model = model
        self.cache = InPlace(len(model.blocks), heads, length, dim, sliced=sliced)
        self.token = 0

    @torch.no_grad()
    def step(self) -> int:
        pos = torch.tensor([[self.cache.at]])
        logits = self.model(torch.tensor([[self.token]]), self.cache, pos)
        self.cache.at += 1
        self.token = int(logits[0, -1].argmax())
        return self.token


def beside_torch(width: int, length: int, rounds: int) -> Row:
    torch.manual_seed(0)
    model = Writer(vocab=256, width=width, heads=width // 64 or 1, layers=LAYERS).eval()
    model.places = nn.Embedding(length, width)
    gen = dt.generator(dt.parallelize(model, dt.Mesh(), {}), slots=1, length=length, buckets=(1,))
    # of its own weights: those of a parallelized model are fetched and compared when one looks
    plain = copy.deepcopy(model)
    sides = {name: Loop(plain, length, sliced=name == "sliced") for name in ("torch", "sliced")}
    steps: dict[str, Callable[[], object]] = {n: loop.step for n, loop in sides.items()}
    with dt.launch(dt.Mesh()):
        request = gen.submit([0], max_new_tokens=length - 1)
        while len(request.tokens) < 4:
            gen.step()
        for loop in sides.values():
            assert [loop.step() for _ in request.tokens] == request.tokens
        steps["dtensor"] = gen.step
        times: dict[str, list[float]] = {name: [] for name in steps}
        rounds = min(rounds, (length - 8) // TOKENS)
        for number in range(rounds):
            for name in sorted(steps, reverse=bool(number % 2)):
                begun = time.perf_counter()
                for _ in range(TOKENS):
                    steps[name]()
                times[name].append((time.perf_counter() - begun) / TOKENS)
        for loop in sides.values():
            assert loop.token == request.tokens[-1]
    ratios = [a / b for a, b in zip(times["dtensor"], times["torch"], strict=True)]
    least = {name: f"{min(own) * 1e3:.2f}" for name, own in times.items()}
    ratio = f"{statistics.median(ratios):.2f}"
    return width, length, least["dtensor"], least["torch"], least["sliced"], ratio


# -- two ranks -------------------------------------------------------------------------------------

_PEER = """
import sys, time, torch, torch.distributed as dist
from transformers import AutoModelForCausalLM, StaticCache, logging
logging.set_verbosity_error()
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto").eval()
tokens, length, best = int(sys.argv[2]), int(sys.argv[3]), float("inf")
with torch.no_grad():
    for _ in range(3):
        cache = StaticCache(config=model.config, max_cache_len=length)
        ids, made = torch.tensor([[5, 17, 3]]), []
        for number in range(tokens):
            if number == 1:
                dist.barrier()
                begun = time.perf_counter()
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            ids = logits[:, -1:].argmax(-1)
            made.append(int(ids))
        best = min(best, (time.perf_counter() - begun) / (tokens - 1))
if dist.get_rank() == 0:
    print("made", best, *made)
"""


def llama(width: int) -> Any:
    import transformers as hf

    torch.manual_seed(0)
    sizes = dict(vocab_size=512, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            hidden_size=width, intermediate_size=2 * width, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256,
            initializer_range=0.1, **sizes,
        )
    ).eval()  # fmt: skip


def on_ray(width: int, tokens: int = 32) -> Row:
    length = 128
    pins = {
        "*.{q,k,v}_proj.weight": dict(tp=dt.Row(unit=width // 8)),
        "*.o_proj.weight": dict(tp=dt.Column(unit=width // 8)),
        "*.{gate,up}_proj.weight": dict(tp=dt.Row()),
        "*.down_proj.weight": dict(tp=dt.Column()),
        "lm_head.weight": dict(tp=dt.Row()),
    }
    seconds: list[float] = []
    made: list[list[int]] = []
    for size in (1, 2):
        mesh = dt.Mesh(tp=size)
        model = dt.parallelize(llama(width), mesh, pins if size > 1 else {})
        gen = dt.generator(model, slots=1, length=length, buckets=(16,))
        with dt.launch(mesh, backend="ray"):
            best = float("inf")
            for _ in range(3):
                request = gen.submit([5, 17, 3], max_new_tokens=tokens)
                gen.step()
                before, begun = len(request.tokens), time.perf_counter()
                while not request.done:
                    gen.step()
                best = min(best, (time.perf_counter() - begun) / (tokens - before))
            seconds.append(best)
            made.append(request.tokens)
    peer = _peer(llama(width), tokens, length, made[0])
    told = [f"{s * 1e3:.2f}" for s in seconds]
    assert made[0] == made[1]
    return width, *told, peer


def _peer(model: Any, tokens: int, length: int, want: Sequence[int]) -> str:
    """Milliseconds a token of transformers' own tensor parallelism, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        script = Path(folder) / "peer.py"
        script.write_text(_PEER)
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        run += ["--master-port", "29571", str(script), folder, str(tokens), str(length)]
        done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    line = next((x for x in done.stdout.splitlines() if x.startswith("made ")), None)
    if line is None:
        reasons = [x for x in done.stderr.splitlines() if "Error" in x]
        return f"does not run here: {reasons[0].strip() if reasons else done.returncode}"
    _, seconds, *made = line.split()
    same = "" if [int(token) for token in made] == list(want) else ", other tokens"
    return f"{float(seconds) * 1e3:.2f}{same}"


# -- counts ----------------------------------------------------------------------------------------


def messages(tokens: int = 20) -> Row:
    """For each actor and token, at tp=2 on Ray."""
    from dtensor.daft.ray.channel.run_channel import RunChannel

    gen = dt.generator(placed("llama", "tp2"), slots=1, length=64, buckets=(16,))
    sent: list[object] = []
    plain = RunChannel.send

    def counted(self: RunChannel, *args: Any, **kwargs: Any) -> Any:
        sent.append(args)
        return plain(self, *args, **kwargs)

    with dt.launch(gen.model.mesh, backend="ray"):
        request = gen.submit([5, 17, 3], max_new_tokens=tokens + 8)
        for _ in range(4):
            gen.step()
        with mock.patch.object(RunChannel, "send", counted):
            before = len(request.tokens)
            while len(request.tokens) - before < tokens:
                gen.step()
    return ("messages for each actor and token", f"{len(sent) / 2 / tokens:.2f}")


def captures() -> Row:
    gen = dt.generator(placed("llama", "single"), slots=4, length=128)
    gen([[n % 90] * n for n in range(1, 101)], max_new_tokens=2)
    buckets, programs = len(gen.buckets), len(gen._prefill.plans)
    return (f"captures of prefill over 100 lengths, {buckets} buckets", programs)


def prompts(together: int) -> Row:
    """Of a bucket of 16 on tp=2, into 128 slots, one token of each."""
    rng = random.Random(0)
    asked = [[rng.randrange(96) for _ in range(rng.randint(5, 16))] for _ in range(128)]
    gen = dt.generator(
        placed("llama", "tp2"), slots=128, length=32, buckets=(16,), prefill_batch=together
    )
    told: list[str] = []
    with dt.launch(gen.model.mesh):
        for num in (128, 1):
            gen(asked[:num], max_new_tokens=1)
            times: list[float] = []
            for _ in range(5):
                begun = time.perf_counter()
                gen(asked[:num], max_new_tokens=1)
                times.append(time.perf_counter() - begun)
            told.append(f"{min(times) * 1e3:.1f}")
    return (f"ms of 128 prompts, and of one, {together} in a prefill", ", ".join(told))


# -- two meshes ------------------------------------------------------------------------------------


def sent_between(here: str, there: str, lengths: Sequence[int] = (1, 13, 100)) -> list[Row]:
    """Of prompts of these lengths: what is handed to the transport, and what it is to be."""
    from dtensor.daft.ir.instructions import Send
    from dtensor.daft.run.transport import LocalTransport

    policy, target = placed("llama", here), placed("llama", there)
    pins: dict[str, Any] = {p.name: p.placements for p in target.placements if p.placements}
    mesh = dt.Mesh(**target.mesh.shape, name="decode")
    actor = dt.replica(policy, mesh, pins, stages=target.stages or None)  # type: ignore[arg-type]
    gen = dt.generator(actor, slots=2, length=128, buckets=(128,), prefill=policy)
    sent: list[int] = []
    plain = LocalTransport._start

    def counted(self: LocalTransport, rank: int, start: Any, values: Sequence[Tensor]) -> Any:
        if isinstance(start, Send) and start.label == "transfer":
            sent.extend(value.nbytes for value in values)
        return plain(self, rank, start, values)

    rows: list[Row] = []
    config: Any = policy.module.config
    layers, heads, dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    patched = mock.patch.object(LocalTransport, "_start", counted)
    with patched, dt.launch(policy.mesh, actor.mesh):
        dt.sync(policy, actor)
        for t in lengths:
            sent.clear()
            gen([[1] * t], max_new_tokens=2)
            exact = 2 * layers * heads * t * dim * 4
            assert sum(sent) == exact
            rows.append((f"{here} to {there}", t, sum(sent), exact))
    return rows


def waits(num: int = 3, length: int = 1000) -> list[Row]:
    """On Ray, the longest and the median time between a text's tokens, in ms, while ``num`` prompts
    are taken in and until they end."""
    torch.manual_seed(0)
    module = Writer(vocab=256, width=128, heads=4, layers=4).eval()
    module.places = nn.Embedding(2 * length, 128)
    policy = dt.parallelize(module, dt.Mesh(), {})
    actor = dt.replica(policy, dt.Mesh(name="decode"))
    sizes: dict[str, Any] = dict(slots=num + 1, length=length + 300, buckets=(16, length))
    sides = {
        "one mesh": dt.generator(actor, **sizes),
        "apart": dt.generator(actor, prefill=policy, **sizes),
    }
    gaps: dict[str, list[float]] = {name: [] for name in sides}
    prompts = [[n % 250 for n in range(length)] for _ in range(num)]
    with dt.launch(policy.mesh, actor.mesh, backend="ray"):
        dt.sync(policy, actor)
        for name, gen in [*sides.items(), *sides.items(), *sides.items()]:
            gen([prompts[0], [1, 2]], max_new_tokens=3)
            gen.submit([1, 2, 3], max_new_tokens=290)
            for _ in range(10):
                gen.step()
            asked = [gen.submit(prompt, max_new_tokens=4) for prompt in prompts]
            while not all(request.done for request in asked):
                begun = time.perf_counter()
                gen.step()
                gaps[name].append((time.perf_counter() - begun) * 1e3)
            while not gen.idle:
                gen.step()
    return [(n, f"{max(g):.0f}", f"{statistics.median(g):.1f}") for n, g in gaps.items()]


def arrivals(num: int, where: str) -> Row:
    """How many requests got something else than alone."""
    rng = random.Random(0)
    gen = dt.generator(placed("llama", where, build("llama")), slots=8, length=64, eos=[5, 33])
    asked = [
        dict(
            prompt=[rng.randrange(96) for _ in range(rng.randint(1, 40))],
            max_new_tokens=rng.randint(1, 20),
            temperature=rng.choice([0, 0.7, 1.3]),
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([1.0, 0.8]),
            seed=number,
        )
        for number in range(num)
    ]
    with dt.launch(gen.model.mesh):
        found, waiting = list[TextRequest](), list(asked)
        while waiting or not gen.idle:
            for _ in range(rng.randint(0, 3)):
                if waiting:
                    found.append(gen.submit(**waiting.pop(0)))  # type: ignore[arg-type]
            gen.step()
        unequal = sum(
            request.generated() != _alone(gen, one).generated()
            for request, one in zip(found, asked, strict=True)
        )
    tokens = sum(len(request.tokens) for request in found)
    return (f"{num} random arrivals on {where}, {tokens} tokens: unequal to alone", unequal)


def _alone(gen: Generator, asked: dict[str, Any]) -> TextRequest:
    request = gen.submit(**asked)
    while not request.done:
        gen.step()
    return request


# -- the table -------------------------------------------------------------------------------------


def table(head: Row, rows: Sequence[Row]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=12, help="timings of each side")
    parser.add_argument("--only", choices=("torch", "ray", "counts", "apart"))
    parser.add_argument("--arrivals", type=int, metavar="N", help="only N random requests")
    parser.add_argument("--where", default="single", help="of --arrivals: single, tp2, dp2, ...")
    parser.add_argument("--write", action="store_true", help="put it into benchmarks/results")
    options = parsed(parser, arrivals=2)
    torch.set_num_threads(1)
    if options.arrivals is not None:
        what, unequal = arrivals(options.arrivals, options.where)
        print(f"{what}: {unequal}")
        return int(bool(unequal))
    texts: list[str] = []
    if options.only in (None, "torch"):
        head = ("width", "positions", "dtensor, ms", "torch, ms", "torch, sliced, ms", "ratio")
        sizes = [(d, t) for d in (64, 512) for t in (128, 2048)]
        rows = [beside_torch(d, t, options.rounds) for d, t in sizes]
        texts.append(f"{LAYERS} layers, one rank, one slot\n\n{table(head, rows)}")
    if options.only in (None, "ray"):
        head = ("width", "one actor, ms", "tp=2, ms", "transformers' tp_plan on gloo, ms")
        texts.append(f"Llama, 4 layers\n\n{table(head, [on_ray(d) for d in (64, 512)])}")
    if options.only in (None, "counts"):
        rows = [captures(), messages(), prompts(1), prompts(8), arrivals(100, "single")]
        texts.append(table(("what", "number"), rows))
    if options.only in (None, "apart"):
        head = ("prefill to decode", "tokens of the prompt", "bytes sent", "2 layers heads t dim 4")
        pairs = (("tp2", "tp2"), ("tp2", "single"), ("pp2", "tp2"))
        texts.append(table(head, [row for pair in pairs for row in sent_between(*pair)]))
        head = ("three prompts of 1000 meanwhile", "longest wait for a token, ms", "median, ms")
        texts.append(table(head, waits()))
    text = "\n\n".join(texts)
    print(text)
    if options.write:
        what = f"{platform.processor() or platform.machine()}, torch {torch.__version__}"
        how = "`OMP_NUM_THREADS=1 python -m benchmarks.generation --write`"
        head = f"# Decoding, for each token\n\n{how}, {what}. Least of the rounds;"
        RESULTS.write_text(f"{head} ratios are the median of those of the rounds.\n\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
