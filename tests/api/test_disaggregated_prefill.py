"""`dt.generator(..., prefill=other)`: one mesh prefills prompts, another decodes; the tests check
the texts and the bytes sent between the meshes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor import daft
from dtensor.api.generation import disaggregated_prefill
from dtensor.api.generation.generator import Generator
from dtensor.api.generation.requests import TextRequest
from dtensor.api.model.parallel import ParallelModule
from dtensor.api.store.session import session_for
from dtensor.daft.ir.instructions import Collective, Send, Vote
from dtensor.errors import PlanningError
from dtensor.runtime.transfer import cache_rows
from tests.api.generation import (
    Writer,
    alone,
    build,
    by_transformers,
    greedy,
    placed,
    random_requests,
    writer,
)

PROMPTS = [[5, 17, 3, 60, 44], [9, 8, 7], list(range(20, 40)), [1], [2, 3]]
HOW: dict[str, Any] = dict(max_new_tokens=7, seed=3, temperature=[0, 0.7, 0, 1.3, 0], top_p=0.9)


def uneven(axes: dict[str, int], module: torch.nn.Module | None = None) -> ParallelModule:
    """Place three heads over two ranks."""
    torch.manual_seed(0)
    pins = {
        "*.{q,k,v}.weight": dict(tp=dt.Row(unit=16)),
        "*.{q,k,v}.bias": dict(tp=dt.Row(unit=16)),
        "*.o.weight": dict(tp=dt.Column(unit=16)),
    }
    module = module or Writer(vocab=96, width=48, heads=3).eval()
    return dt.parallelize(module, dt.Mesh(**axes), pins if "tp" in axes else {})


def two(family: str, here: str, there: str, num_heads: int = 2) -> list[ParallelModule]:
    """Return a policy placed as ``here`` and its replica placed as ``there``."""
    module: Any = None
    if num_heads == 1:
        import transformers as hf

        module = build(family)
        module.config.num_key_value_heads = 1
        torch.manual_seed(0)
        module = hf.LlamaForCausalLM(module.config).eval()
    policy = uneven({"tp": 2}) if family == "uneven" else placed(family, here, module)
    model = uneven({}, policy.module) if family == "uneven" else placed(family, there)
    mesh = dt.Mesh(**model.mesh.shape, name="play")
    pins: dict[str, Any] = {}
    if "tp" in mesh.axes:
        pins = {p.name: p.placements for p in model.placements if p.placements}
        if num_heads == 1:
            pins = {n: p for n, p in pins.items() if ".k_" not in n and ".v_" not in n}
    stages = model.stages or None
    return [policy, dt.replica(policy, mesh, pins, stages=stages)]  # type: ignore[arg-type]


def wire(gen: Generator) -> Counter[int]:
    """Return the bytes sent by the loaded transfer programs, by prompt length."""
    assert gen._disaggregated is not None
    sent: Counter[int] = Counter()
    programs: Any = gen._disaggregated._programs
    for (length, _, _), program in zip(programs.keys(), programs, strict=True):
        for own in program.handle.program.ranks:
            sent[length] += sum(i.buffer.nbytes for i in own.instructions if isinstance(i, Send))
    return sent


# -- placements ------------------------------------------------------------------------------------

# how often each element of the cache is sent; of one that is there already, not at all
PAIRS: dict[str, tuple[tuple[Any, ...], dict[int, Sequence[int]], float]] = {
    "tp2 to tp2": (("llama", "tp2", "tp2"), {}, 1),
    "tp2 to tp2, shared": (("llama", "tp2", "tp2"), {1: (0, 1)}, 0),
    "tp2 to tp2, crossed": (("llama", "tp2", "tp2"), {1: (1, 0)}, 1),
    "tp2 to one, shared": (("gpt2", "tp2", "single"), {1: (1,)}, 0.5),
    "pp2 to tp2, shared": (("qwen3", "pp2", "tp2"), {1: (0, 1)}, 0.5),
    "one to tp2pp2": (("llama", "single", "tp2pp2"), {}, 1),
    "dp2 to dp2": (("gemma2", "dp2", "dp2"), {}, 1),
    "tp2 to whole heads on tp2": (("llama", "single", "tp2", 1), {}, 2),
    "three heads on tp2 to one": (("uneven", "", ""), {}, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_texts_with_prefill_on_other_mesh_equal_those_of_one_mesh(pair: str) -> None:
    stated, places, times = PAIRS[pair]
    policy, actor = two(*stated)
    ranks = {(policy, actor)[number].mesh: own for number, own in places.items()}
    one = dt.generator(actor, slots=3, length=48, buckets=(8, 24))
    gen = dt.generator(actor, slots=3, length=48, buckets=(8, 24), prefill=policy)
    planned = {len(p): gen.transfer_plan(len(p), ranks=ranks).bytes_sent for p in PROMPTS}
    with dt.launch(policy.mesh, actor.mesh, ranks=ranks):
        dt.sync(policy, actor)
        want, found = one(PROMPTS, **HOW), gen(PROMPTS, **HOW)
        sent = wire(gen)
        again = gen(PROMPTS, **HOW)
    assert [text.tokens for text in found] == [text.tokens for text in want]
    assert found == again
    if stated[1] == stated[2] != "":  # the same program of prefill: to the bit
        assert found == want
    for text, other in zip(found, want, strict=True):
        assert text.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    layers, heads, dim = 2, {"gpt2": 4, "uneven": 3}.get(stated[0], 2), 16
    heads = 1 if stated[3:] else heads
    for prompt in PROMPTS:
        t = len(prompt)
        exact = times * 2 * layers * heads * t * dim * 4
        assert planned[t] == exact
        if "dp2" not in pair:  # one program for each pair of groups of rows there
            assert sent[t] == exact


@pytest.mark.slow
def test_decoding_on_policy_with_prefill_on_replica_matches_transformers() -> None:
    """Greedy decoding."""
    policy, actor = two("llama", "pp2", "tp2")
    gen = dt.generator(policy, slots=2, length=48, buckets=(24,), prefill=actor, ahead=2)
    with dt.launch(policy.mesh, actor.mesh):
        dt.sync(policy, actor)
        texts = gen(PROMPTS, max_new_tokens=8)
    assert [list(t.tokens) for t in texts] == by_transformers(build("llama"), PROMPTS, 8)


# -- requests --------------------------------------------------------------------------------------


def pair_of_writers(**options: Any) -> tuple[Generator, list[dt.Mesh]]:
    policy = dt.parallelize(writer(), dt.Mesh(), {})
    actor = dt.replica(policy, dt.Mesh(name="play"))
    stated: dict[str, Any] = dict(slots=2, length=40, buckets=(8, 24)) | options
    return dt.generator(actor, prefill=policy, **stated), [policy.mesh, actor.mesh]


def synced(gen: Generator) -> None:
    assert gen.model.source is not None
    dt.sync(gen.model.source, gen.model)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 2])
def test_texts_do_not_depend_on_when_prefill_ends(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests arrive at random times and some are cancelled; each text equals the text of the same
    request alone on one mesh."""
    rng = random.Random(0)
    gen, meshes = pair_of_writers(ahead=ahead, eos=[5, 11])
    one = dt.generator(gen.model, slots=2, length=40, buckets=(8, 24), eos=[5, 11])
    asked = random_requests(40, rng, vocab=32)
    monkeypatch.setattr(disaggregated_prefill, "_has_ended", lambda x: rng.random() < 0.3)
    with dt.launch(*meshes):
        synced(gen)
        waiting, requests, dropped = list(asked), list[TextRequest](), list[TextRequest]()
        while waiting or not gen.idle:
            for _ in range(rng.randint(0, 2)):
                if waiting:
                    requests.append(gen.submit(**waiting.pop(0)))
                    if rng.random() < 0.2:
                        dropped.append(rng.choice(requests[-3:]))
                        gen.cancel(dropped[-1])
            gen.step()
        assert gen._disaggregated is not None
        assert gen._live is not None
        gen._disaggregated.admit(gen._waiting, gen._seats, gen._live, gen._arguments)
        assert sorted(gen._disaggregated._free) == [0, 1] and not gen._disaggregated._prefilled
        for request, options in zip(requests, asked, strict=True):
            if request.reason != "dropped":
                assert request.generated() == alone(one, options)
        assert {r.reason for r in requests} == {"stop", "length", "dropped"}
        assert all(len(r.versions) >= len(r.tokens) for r in requests)


@pytest.mark.slow
def test_running_requests_decode_while_new_prompt_is_prefilled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gen, meshes = pair_of_writers()
    with dt.launch(*meshes):
        synced(gen)
        first = gen.submit([5, 17, 3], max_new_tokens=6)
        gen.step()
        monkeypatch.setattr(disaggregated_prefill, "_has_ended", lambda x: False)
        second = gen.submit([9], max_new_tokens=3)
        for number in range(3, 7):
            gen.step()
            assert (len(first.tokens), len(second.tokens)) == (number, 0)
        assert first.done and gen._seats == [None, None]
        gen.step()  # nothing else to do: it is waited for
        assert len(second.tokens) == 2
        while not gen.idle:
            gen.step()
    assert first.tokens == greedy(writer(), [5, 17, 3], 6)
    assert second.tokens == greedy(writer(), [9], 3)


def test_request_that_ends_with_first_token_sends_no_cache() -> None:
    gen, meshes = pair_of_writers()
    text = greedy(writer(), [5, 17, 3], 6)
    with dt.launch(*meshes):
        synced(gen)
        (stopped,) = gen([[5, 17, 3]], eos=text[0])
        (short,) = gen([[5, 17, 3]], max_new_tokens=1)
        assert not wire(gen)
        last = next(n for n, token in enumerate(text) if token != text[0])
        (middle,) = gen([[5, 17, 3]], eos=text[last])
        assert set(wire(gen)) == {3}
    assert (stopped.tokens, stopped.reason) == ((text[0],), "stop")
    assert (short.tokens, short.reason) == ((text[0],), "length")
    assert (list(middle.tokens), middle.reason) == (text[: last + 1], "stop")


def test_reused_cache_row_contains_nothing_of_earlier_request() -> None:
    gen, meshes = pair_of_writers()
    with dt.launch(*meshes):
        synced(gen)
        (want,) = gen([[5, 17, 3]], max_new_tokens=6)
        session = session_for(gen.model.mesh)
        name = session.model_home(gen.caches).name
        session.put([{name(f"{n}{i}"): torch.full((2, 4, 40, 8), torch.nan)
                      for n in "kv" for i in (0, 1)}])  # fmt: skip
        assert gen([[5, 17, 3]], max_new_tokens=6) == [want]


@pytest.mark.slow
def test_tokens_record_weight_version_of_mesh_that_computed_them() -> None:
    """The version is taken when the program is submitted; a policy always has the newest
    version."""
    train, prompts, play = dt.Mesh(), dt.Mesh(name="prompts"), dt.Mesh(name="play")
    policy = dt.parallelize(writer(), train, {})
    reader, actor = dt.replica(policy, prompts), dt.replica(policy, play)
    gen = dt.generator(actor, slots=1, length=40, buckets=(8,), prefill=reader)
    mixed = dt.generator(actor, slots=1, length=40, buckets=(8,), prefill=policy)
    with dt.launch(train, prompts, play):
        dt.sync(policy, reader)
        for _ in range(3):
            dt.sync(policy, actor)
        request = gen.submit([5], max_new_tokens=4)
        gen.step()
        dt.sync(policy, actor)
        while not gen.idle:
            gen.step()
        other = mixed.submit([5], max_new_tokens=2)
        mixed.step()
    assert request.versions == [1, 3, 4, 4]
    assert other.versions == [4, 4]


def test_number_of_loaded_transfer_programs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disaggregated_prefill, "MAX_LOADED", 3)
    gen, meshes = pair_of_writers(slots=3)
    with dt.launch(*meshes) as session:
        synced(gen)
        prompts = [[n] * n for n in range(1, 8)]
        texts = gen(prompts, max_new_tokens=3)
        assert gen._disaggregated is not None
        keys: Any = gen._disaggregated._programs.keys()
        assert [length for length, _, _ in keys] == [5, 6, 7]
        assert all(program.last_run is not None for program in gen._disaggregated._programs)
        loaded = len(session.launch.cluster._handles)  # type: ignore[attr-defined]
        assert gen(prompts, max_new_tokens=3) == texts
        assert len(session.launch.cluster._handles) == loaded  # type: ignore[attr-defined]
        assert len(gen._disaggregated._prefill.plans) == 1 and not len(gen._prefill.plans)
    assert [list(t.tokens) for t in texts] == [greedy(writer(), p, 3) for p in prompts]


# -- what fails ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_failed_prefill_drops_waiting_requests_and_next_ones_continue() -> None:
    """The prefill fails because the prompt has more positions than the model."""
    gen, meshes = pair_of_writers(length=96, buckets=(8, 80))
    with dt.launch(*meshes):
        synced(gen)
        beside = gen.submit([5, 17, 3], max_new_tokens=6)
        gen.step()
        failing = gen.submit([1] * 70, max_new_tokens=4)
        with pytest.raises(daft.TaskError, match=r"mesh\(\)"):
            gen.step()
        assert beside.reason == failing.reason == "dropped" and gen.idle
        (text,) = gen([[5, 17, 3]], max_new_tokens=6)
    assert list(text.tokens) == greedy(writer(), [5, 17, 3], 6)


def test_failed_cache_transfer_drops_request_and_next_one_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gen, meshes = pair_of_writers()

    def broken(*args: object) -> tuple[torch.Tensor, ...]:
        raise RuntimeError("no room")

    with dt.launch(*meshes):
        synced(gen)
        with monkeypatch.context() as patched:
            patched.setattr(cache_rows, "cut_rows", broken)
            request = gen.submit([5, 17, 3], max_new_tokens=6)
            with pytest.raises(daft.TaskError, match="no room"):
                gen.step()
        assert request.reason == "dropped" and len(request.tokens) == 1 and gen.idle
        (text,) = gen([[5, 17, 3, 1]], max_new_tokens=6)
    assert list(text.tokens) == greedy(writer(), [5, 17, 3, 1], 6)


def test_requests_pending_at_end_of_launch_are_dropped_in_next_launch() -> None:
    gen, meshes = pair_of_writers(slots=1)
    with dt.launch(*meshes):
        synced(gen)
        want = gen([[5, 3]], max_new_tokens=4)
        left = [gen.submit([5, 3], max_new_tokens=4) for _ in range(4)]
        gen.step()
    with dt.launch(*meshes):
        synced(gen)
        with pytest.raises(RuntimeError, match="3 requests"):
            gen.step()
        assert {r.reason for r in left} == {"dropped"} and gen.idle
        assert gen([[5, 3]], max_new_tokens=4) == want


@pytest.mark.slow
def test_generator_with_prefill_rejects_bad_arguments() -> None:
    module = writer()
    policy = dt.parallelize(module, dt.Mesh(tp=2), {})
    actor = dt.replica(policy, dt.Mesh(name="play"))
    sizes: dict[str, Any] = dict(slots=2, length=16, buckets=(8,))
    for other, match in (
        (policy, r'fix: leave prefill out, or dt.replica\(model, dt.Mesh\(tp=2, name="prompts"\)'),
        (dt.parallelize(writer(), dt.Mesh(name="x"), {}), "of another module"),
        (dt.parallelize(module, dt.Mesh(name="x"), {}), "on one mesh at a time"),
        (module, r"dt\.parallelize"),
    ):
        with pytest.raises(PlanningError, match=match):
            dt.generator(policy, prefill=other, **sizes)  # type: ignore[arg-type]
    gen = dt.generator(actor, prefill=policy, **sizes)
    with pytest.raises(PlanningError, match=r'fix: with dt\.launch\(Mesh\(tp=2\), Mesh\(name="pl'):
        gen([[1, 2]])
    with dt.launch(actor.mesh), pytest.raises(PlanningError, match=r'has mesh\(name="play"\) on'):
        gen([[1, 2]])
    with dt.launch(policy.mesh, actor.mesh), pytest.raises(PlanningError, match=r"dt\.sync"):
        gen([[1, 2]])
    for wrong, match in (((9,), "at most 8"), ((0,), "at least 1"), ((2, 2), "0 to 1")):
        with pytest.raises(PlanningError, match=match):
            gen.transfer_plan(*wrong)
    with pytest.raises(PlanningError, match="prefill=other"):
        dt.generator(policy, **sizes).transfer_plan(2)
    module.half()
    with pytest.raises(PlanningError, match=r"caches of the two models differ: layer 0 is .*16"):
        dt.generator(policy, prefill=actor, **sizes)


# -- on Ray ----------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_disaggregated_prefill_on_ray_equals_in_process() -> None:
    policy, actor = two("llama", "tp2", "single")
    gen = dt.generator(actor, slots=2, length=48, buckets=(24,), ahead=1, prefill=policy)
    with dt.launch(policy.mesh, actor.mesh):
        dt.sync(policy, actor)
        want = gen(PROMPTS, **HOW)
    with dt.launch(policy.mesh, actor.mesh, backend="ray"):
        dt.sync(policy, actor)
        assert gen(PROMPTS, **HOW) == want
        sent = wire(gen)
        assert all(sent[len(p)] == 2 * 2 * 2 * len(p) * 16 * 4 for p in PROMPTS)


@pytest.mark.slow
def test_transfer_program_votes_on_all_ranks_before_writing() -> None:
    """Ranks that only hold cache tables vote too."""
    policy, actor = two("gpt2", "tp2", "single")
    gen = dt.generator(actor, slots=2, length=48, buckets=(24,), prefill=policy)
    with dt.launch(policy.mesh, actor.mesh):
        dt.sync(policy, actor)
        gen([[5, 17, 3]], max_new_tokens=2)
        assert gen._disaggregated is not None
        (program,) = gen._disaggregated._programs
        assert gen._disaggregated._programs.keys() == [(3, 0, 0)]
    for own in program.handle.program.ranks:
        assert sum(isinstance(i, Vote) for i in own.instructions) == 1
        (votes,) = [i for i in own.instructions if isinstance(i, Collective)]
        assert votes.group == (0, 1, 2)
    inputs = [own.inputs[:1] for own in program.handle.program.ranks]
    assert inputs == [("from row",)] * 2 + [("to row",)]
