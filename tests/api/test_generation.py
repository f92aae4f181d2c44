"""`dt.generator`: generated tokens for models of Hugging Face and for the user's own modules, under
all kinds of placement."""

from __future__ import annotations

import math
import pickle
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import dtensor as dt
from dtensor.api.eager.tensor import DTensor
from dtensor.api.generation import programs
from dtensor.api.generation.generator import Generator
from dtensor.api.generation.requests import TextRequest
from dtensor.api.store.session import session_for
from dtensor.daft.errors import DaftError, Failure
from dtensor.errors import PlanningError
from dtensor.frontend.capture.capture import capture
from tests.api.generation import (
    FAMILIES,
    MESHES,
    VOCAB,
    WriterBlock,
    alone,
    build,
    by_transformers,
    greedy,
    placed,
    random_requests,
    writer,
)

PROMPTS = [[5, 17, 3, 60, 44], [9, 8, 7], list(range(20, 40)), [1]]


def drive(gen: Generator, asked: Sequence[dict[str, Any]], rng: random.Random) -> list[TextRequest]:
    """Submit the requests a few at a time between steps."""
    waiting, requests = list(asked), list[TextRequest]()
    while waiting or not gen.idle:
        for _ in range(rng.randint(0, 3)):
            if waiting:
                requests.append(gen.submit(**waiting.pop(0)))
        gen.step()
    return requests


# -- against transformers --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sample(
    "llama-single-6",
    "qwen3-tp2-6",
    "gpt2-pp2-6",
    "llama-tp2pp2-6",
    "gemma2-dp2-6",
    "llama-tp2cp2-6",
)
@pytest.mark.parametrize("num", [6, 64])
@pytest.mark.parametrize("where", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_logprobs_match_transformers_generate(
    family: str, where: str, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four requests share three slots, so one starts late. Logprobs equal those of one forward over
    the whole text. Split positions are dealt in blocks of 8."""
    monkeypatch.setattr(programs, "BLOCK", 8)
    model: Any = build(family)
    want = by_transformers(model, PROMPTS, num)
    gen = dt.generator(placed(family, where), slots=3, length=96, buckets=(24,))
    with dt.launch(gen.model.mesh):
        found = gen(PROMPTS, max_new_tokens=num)
    assert [list(text.tokens) for text in found] == want
    assert {text.reason for text in found} == {"length"}
    for prompt, text in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([[*prompt, *text.tokens]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        of_whole = logits.log_softmax(1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        error = (torch.tensor(text.logprobs) - of_whole).abs().max()
        assert error <= 1e-5 * logits.abs().max()


@pytest.mark.slow
def test_generation_stops_at_models_eos_token_unless_eos_is_none() -> None:
    model: Any = build("llama")
    (free,) = by_transformers(model, PROMPTS[:1], 8)
    model.generation_config.eos_token_id = free[4]
    gen = dt.generator(placed("llama", "single", model), slots=1, length=32, buckets=(8,))
    (text,) = gen(PROMPTS[:1], max_new_tokens=8)
    assert list(text.tokens) == by_transformers(model, PROMPTS[:1], 8)[0]
    assert text.reason == "stop" and len(text.tokens) == free.index(free[4]) + 1
    with pytest.raises(TypeError, match=r"a generator cannot be pickled(.|\n)*fix: dt.save"):
        pickle.dumps(gen)
    (longer,) = gen(PROMPTS[:1], max_new_tokens=8, eos=None)
    assert list(longer.tokens) == free and longer.reason == "length"


def test_generator_refuses_unsupported_models_by_name() -> None:
    import transformers as hf

    sizes: dict[str, Any] = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1)
    heads: dict[str, Any] = dict(sizes, num_attention_heads=2, intermediate_size=16)
    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    models = {
        "linear_attention": hf.MambaForCausalLM(hf.MambaConfig(**sizes)),
        "encoder": hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        "fixed length": hf.BertLMHeadModel(hf.BertConfig(**heads)),
        "causal language modelling": hf.LlamaModel(hf.LlamaConfig(**heads)),
        "max_position_embeddings, 8": hf.LlamaForCausalLM(
            hf.LlamaConfig(**heads, max_position_embeddings=8)
        ),
        "rotary": hf.LlamaForCausalLM(hf.LlamaConfig(**heads, rope_parameters=rope)),
        "takes no cache and pos": torch.nn.Linear(4, 4),
    }
    for why, model in models.items():
        with pytest.raises(PlanningError, match=why) as raised:
            dt.generator(dt.parallelize(model, dt.Mesh(), {}), slots=2, length=16)
        assert type(model).__name__ in str(raised.value) and "fix: " in str(raised.value)


# -- split positions -------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [dict(cp=2), dict(cp=2, cp2=2)])
def test_cache_positions_are_split_and_ranks_gather_their_parts_of_attention(
    axes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts cross blocks of 4 positions. A token sends (n-1) * rows * heads * (dim + 1) float32
    numbers for each layer."""
    monkeypatch.setattr(programs, "BLOCK", 4)
    num = math.prod(axes.values())
    mesh = dt.Mesh(**axes)
    model = dt.parallelize(writer(), mesh, {}, attention=dict.fromkeys(axes, "gather"))
    gen = dt.generator(model, slots=2, length=30, buckets=(10,), prefill_batch=2)
    prompts = [[5, 17, 3, 9, 8, 7, 1, 2], [9], [4, 30, 2]]
    found = gen(prompts, max_new_tokens=14)
    assert [list(text.tokens) for text in found] == [greedy(writer(), p, 14) for p in prompts]
    decode, (cache,) = gen.plan("decode"), gen.summary().caches
    assert cache == ("f32[2,4,4*8@cp,8]" if num == 2 else "f32[2,4,2*16@(cp,cp2),8]")
    assert gen.summary().kv_bytes == (2 * 4 * 32 * 8 * 4 * 4 // num,) * num
    assert decode.totals.bytes_sent == 2 * (num - 1) * 2 * 4 * (8 + 1) * 4
    (tokens,) = (i.spec for i in gen.plan("prefill").inputs if i.label == "tokens")
    assert str(tokens).startswith("i64[2,16@")
    actor = dt.replica(model, dt.Mesh(name="play", cp=2), attention=dict(cp="gather"))
    assert dt.generator(actor, slots=2, length=30).summary().caches == ("f32[2,4,4*8@cp,8]",)
    with pytest.raises(PlanningError, match=r"attention= splits positions over cp(.|\n)*fix: "):
        dt.generator(actor, slots=2, length=30, prefill=model)


def test_split_positions_keep_windows_softcap_and_sinks_of_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mask is stated by comparisons, as the capture of a Hugging Face model states it."""

    def attend(self: WriterBlock, q: Tensor, k: Tensor, v: Tensor, cache: Any) -> Tensor:
        pos, keys = (torch.arange(x.shape[2])[None] for x in (q, k))
        pos = pos if cache is None else cache.pos
        values = [pos, pos - 5], [keys, keys], ["ge", "lt"]
        return torch.ops.dt.attention(q, k, v, False, 0.3, [], 2.0, *values, torch.ones(4))[0]

    monkeypatch.setattr(programs, "BLOCK", 4)
    monkeypatch.setattr(WriterBlock, "attend", attend)
    model = dt.parallelize(writer(), dt.Mesh(cp=2), {}, attention=dict(cp="gather"))
    gen = dt.generator(model, slots=1, length=24, buckets=(8,))
    (text,) = gen([[5, 17, 3, 9, 8, 7]], max_new_tokens=14)
    assert list(text.tokens) == greedy(writer(), [5, 17, 3, 9, 8, 7], 14)
    assert gen.plan("decode").totals.bytes_sent == 2 * 4 * (8 + 1) * 4


@pytest.mark.slow
def test_greedy_tokens_of_32768_split_positions_equal_those_of_one_rank() -> None:
    model: Any = build("llama", 32768)
    prompt = torch.randint(VOCAB, (9000,), generator=torch.Generator().manual_seed(1)).tolist()
    found = {}
    for where in ("single", "cp2", "tp2cp2"):
        gen = dt.generator(placed("llama", where, model), slots=1, length=32768, buckets=(9000,))
        (found[where],) = gen([prompt], max_new_tokens=64)
        assert max(gen.summary().kv_bytes) == 4 * 32768 * 2 * 16 * 4 // gen.model.mesh.size
    assert found["cp2"].tokens == found["tp2cp2"].tokens == found["single"].tokens


# -- a model of one's own --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def single() -> Iterator[Generator]:
    yield dt.generator(dt.parallelize(writer(), dt.Mesh(), {}), slots=4, length=40, buckets=(8, 24))


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_replaced_while_token_is_read_do_not_change_texts(
    single: Generator, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Recovery is simulated at each read of the generation. With ``fails``, that read also raises
    an error, as if the values were lost with their rank."""
    asked: dict[str, Any] = dict(max_new_tokens=[1, 3, 2, 4, 1, 2], seed=1, temperature=0.8)
    prompts = [[5, 17, 3], [9], list(range(20)), [1, 2], [4], [30]]
    undisturbed = single(prompts, **asked)
    read, at, reads = DTensor.full_tensor, 0, 0

    def counted(self: DTensor) -> torch.Tensor:
        nonlocal reads
        reads += 1
        if reads == at and fails:
            raise DaftError(Failure(rank=0, reason="the process died"))
        return read(self)

    monkeypatch.setattr(DTensor, "full_tensor", counted)
    single(prompts, **asked)
    num, cluster = reads, type(session_for(single.model.mesh).cluster)
    assert num > 10
    monkeypatch.setattr(cluster, "recovered", property(lambda _: int(0 < at <= reads)))
    for at in range(1, num + 1):
        reads = 0
        assert single(prompts, **asked) == undisturbed, at


@pytest.mark.slow
def test_users_module_with_cache_arguments_generates_as_without_cache(single: Generator) -> None:
    model = writer()
    prompts = [[5, 17, 3], [9], list(range(20)), [1, 2]]
    by_two = dt.generator(
        dt.parallelize(writer(), dt.Mesh(), {}), slots=3, length=40, buckets=(24,), prefill_batch=2
    )
    for gen in (single, by_two):
        found = gen(prompts, max_new_tokens=12)
        assert [list(text.tokens) for text in found] == [greedy(model, p, 12) for p in prompts]
    (tokens,) = (i.spec for i in by_two.plan("prefill").inputs if i.label == "tokens")
    assert str(tokens) == "i64[2,32]"


@pytest.mark.slow
def test_generation_uses_weights_updated_by_training_step() -> None:
    """The ranks store the weights once for both programs."""
    mesh = dt.Mesh(tp=2)
    pins: dict[str, Any] = {
        "*.{q,k,v}.weight": dict(tp=dt.Row(unit=8)),
        "*.o.weight": dict(tp=dt.Column(unit=8)),
        "*.up.weight": dict(tp=dt.Row()),
        "*.down.weight": dict(tp=dt.Column()),
    }
    own = writer().train()
    model = dt.parallelize(own, mesh, pins)

    def loss_fn(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    step = dt.train_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.5))
    gen = dt.generator(model, slots=2, length=24, buckets=(8,))
    tokens = torch.arange(16).repeat(4, 2)[:, :24]
    with dt.launch(mesh) as session:
        before = gen([[5, 6, 7]], max_new_tokens=8)
        for _ in range(20):
            float(step(tokens))
        after = gen([[5, 6, 7]], max_new_tokens=8)
        assert len(session.model_homes) == 2
        kept = [name for home in session.model_homes.values() for name in home.stored]
        assert len(kept) == len(set(kept))
    assert before != after
    assert all(part.training for part in model.module.modules())
    assert list(after[0].tokens) == greedy(own, [5, 6, 7], 8)


@pytest.mark.slow
@pytest.mark.parametrize(("where", "together"), [("tp2", 3), ("dp2", 1)])
def test_request_result_is_bitwise_independent_of_other_requests(
    where: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its slot and arrival time, and however late a stop is noticed."""
    # a graph of its own: it counts the plans, and one of another model may be planned again
    monkeypatch.setattr("dtensor.api.step.bound_call.capture", capture)
    rng = random.Random(0)
    gen = dt.generator(
        placed("llama", where),
        slots=8,
        length=32,
        eos=[5, 33],
        buckets=(7, 20),
        prefill_batch=together,
    )
    asked = random_requests(24, rng, VOCAB)
    with dt.launch(gen.model.mesh):
        found = [request.generated() for request in drive(gen, asked, rng)]
        assert found == [alone(gen, one) for one in asked]
        for ahead in (1, 3):
            gen.ahead = ahead
            assert [r.generated() for r in drive(gen, asked, rng)] == found
    assert {text.reason for text in found} == {"stop", "length"}
    assert len({text.tokens for text in found}) > 20
    assert (len(gen._prefill.plans), len(gen._decode.plans)) == (2, 1)


@pytest.mark.slow
@pytest.mark.sample("llama-pp2", "gemma2-dp2")
@pytest.mark.parametrize("where", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_one_bucket_are_prefilled_in_one_run(family: str, where: str) -> None:
    """Five prompts for four slots: three of one bucket in one run, one in a run padded with repeats
    of it, one late."""
    prompts = [*PROMPTS, [2, 3]]
    want = by_transformers(build(family), prompts, 6)
    gen = dt.generator(placed(family, where), slots=4, length=64, buckets=(8, 24), prefill_batch=3)
    with dt.launch(gen.model.mesh) as session:
        first = gen(prompts, max_new_tokens=6)
        before = session.cluster.calls
        assert gen(prompts, max_new_tokens=6) == first
        assert session.cluster.calls - before == (3 + 2 * 5) * gen.model.mesh.size
    assert [list(text.tokens) for text in first] == want
    assert len(gen._prefill.plans) == 2


@pytest.mark.slow
@pytest.mark.sample("axes0")
@pytest.mark.parametrize("axes", [dict(ep=2), dict(dp=2, ep=2), dict(dp=2)])
def test_greedy_tokens_with_experts_split_match_transformers(axes: dict[str, int]) -> None:
    """Four requests share three slots, so that slots are idle at the end."""
    model = build("mixtral")
    want = by_transformers(model, PROMPTS, 8)
    experts = {"*.experts.*": {list(axes)[-1]: dt.Shard(0)}}
    placed_model = dt.parallelize(model, dt.Mesh(**axes), experts)
    gen = dt.generator(placed_model, slots=3, length=64, buckets=(24,))
    with dt.launch(placed_model.mesh):
        found = gen(PROMPTS, max_new_tokens=8)
    assert [list(text.tokens) for text in found] == want


@pytest.mark.slow
def test_reused_slot_is_not_affected_by_nan_of_earlier_request() -> None:
    model = writer()
    with torch.no_grad():
        model.embed.weight[31] = float("inf")
    gen = dt.generator(dt.parallelize(model, dt.Mesh(), {}), slots=1, length=24, buckets=(8,))
    prompt = next([n] for n in range(31) if 31 not in greedy(writer(), [n], 8))
    clean = gen([prompt], max_new_tokens=8)
    assert all(math.isfinite(logprob) for logprob in clean[0].logprobs)
    (sick,) = gen([[31] * 8], max_new_tokens=8)
    assert all(math.isnan(logprob) for logprob in sick.logprobs)
    assert gen([prompt], max_new_tokens=8) == clean


def test_generator_captures_one_prefill_per_bucket_and_one_decode(single: Generator) -> None:
    prompts = [[n % 32] * n for n in range(1, 25)]
    single(prompts, max_new_tokens=1)
    for temperature, top_k, top_p in ((0.5, 0, 1.0), (1.0, 3, 0.5)):
        single(prompts, 2, temperature=temperature, top_k=top_k, top_p=top_p, seed=3)
    assert (len(single._prefill.plans), len(single._decode.plans)) == (2, 1)
    assert dt.generator(single.model, slots=1, length=300).buckets == (16, 32, 64, 128, 256, 300)


@pytest.mark.slow
@pytest.mark.sample("single-inprocess", "tp2pp2-inprocess", "tp2-ray")
@pytest.mark.parametrize("backend", ["inprocess", pytest.param("ray", marks=pytest.mark.ray)])
@pytest.mark.parametrize("where", MESHES)
def test_each_token_takes_one_message_to_each_actor(
    where: str, backend: Any, request: pytest.FixtureRequest
) -> None:
    """Reads, fed-back tokens and drops are part of that message. With stages, the first run sends
    as many messages as the others."""
    if backend == "ray":
        request.getfixturevalue("ray_session")
    gen = dt.generator(placed("llama", where), slots=2, length=32, buckets=(8,))
    with dt.launch(gen.model.mesh, backend=backend) as session:
        text = gen.submit([5, 17, 3], max_new_tokens=20, temperature=0.5, seed=1)
        gen.step()
        before, num = session.cluster.calls, len(text.tokens)
        while not text.done:
            gen.step()
        assert session.cluster.calls - before == (20 - num) * gen.model.mesh.size
        before = session.cluster.calls
        gen.submit([9])
        gen.step()  # a prefill and a decode
        assert session.cluster.calls - before == 2 * gen.model.mesh.size
    assert (len(gen._prefill.plans), len(gen._decode.plans)) == (1, 1)


@pytest.mark.slow
def test_generator_plans_and_summary_describe_prefill_and_decode() -> None:
    gen = dt.generator(placed("llama", "tp2pp2"), slots=3, length=32, buckets=(8, 16))
    decode = gen.plan("decode")
    assert gen.plan("prefill", bucket=8).name == "prefill" and decode.name == "decode"
    caches = {i.label: (str(i.spec), i.stages) for i in decode.inputs if "kv_cache" in i.label}
    assert caches["kv_cache.k0"] == ("f32[4,2@tp,32,16]", (0,))
    assert caches["kv_cache.v1"] == ("f32[4,2@tp,32,16]", (1,))
    told = gen.summary()
    assert told.kv_bytes == (4 * 1 * 32 * 16 * 4 * 2,) * 4
    assert told.collectives == {
        ("all_reduce", "tp"): 4, ("transfer", "pp"): 2, ("all_gather", "tp"): 1,
    }  # fmt: skip
    assert "4 all_reduce over tp" in str(told)
    spread = dt.generator(placed("llama", "dp2"), slots=3, length=32)
    assert spread.summary().rows == 4 and spread.summary().collectives == {}
    with pytest.raises(PlanningError, match="buckets are"):
        gen.plan("prefill", bucket=9)
    with pytest.raises(PlanningError, match="which"):
        gen.plan("decoding")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_each_rank_caches_only_kv_heads_its_query_heads_use(family: str) -> None:
    """4 query heads over 4 ranks share 2 KV heads: each rank projects both and caches the one that
    its query head uses."""
    pins: dict[str, dict[str, dt.Placement]] = {
        "*.q_proj.weight": dict(tp=dt.Row(unit=16)),
        "*.o_proj.weight": dict(tp=dt.Column(unit=16)),
    }
    gen = dt.generator(dt.parallelize(build(family), dt.Mesh(tp=4), pins), slots=2, length=32)
    texts = gen(PROMPTS[:2], max_new_tokens=6)
    assert [list(text.tokens) for text in texts] == by_transformers(build(family), PROMPTS[:2], 6)
    assert gen.summary().caches == ("f32[2,4@tp,32,16]",)  # 1 head on each rank


@pytest.mark.slow
def test_generator_supports_stages_without_attention_layers() -> None:
    """Stages with only embeddings or only the head; also with a stage-to-rank order that a training
    schedule has fixed."""
    stages = [["*embed*"], ["*layers.0.*"], ["*layers.1.*"], ["model.norm*", "lm_head*"]]
    model = dt.parallelize(build("llama"), dt.Mesh(pp=2), {}, stages={"pp": stages})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    schedule = dt.ZBV(microbatches=2)
    step = dt.train_step(
        model, lambda m, ids: m(input_ids=ids, labels=ids).loss, optimizer, schedule=schedule
    )
    gen = dt.generator(model, slots=2, length=32, buckets=(24,))
    with dt.launch(model.mesh):
        found = gen(PROMPTS, max_new_tokens=4)
        float(step(torch.ones(2, 8, dtype=torch.int64)))
        assert gen(PROMPTS, max_new_tokens=4) == found
    want = by_transformers(build("llama"), PROMPTS, 4)
    assert [list(text.tokens) for text in found] == want
    waiting = dt.parallelize(build("llama"), dt.Mesh(pp=2), {}, stages="auto")
    with pytest.raises(PlanningError, match="still to be chosen"):
        dt.generator(waiting, slots=2, length=32)


# -- asking ----------------------------------------------------------------------------------------


def test_generation_seed_determines_sampled_tokens(single: Generator) -> None:
    how: dict[str, Any] = dict(max_new_tokens=10, temperature=1.0)
    same = single([[1, 2]] * 3, seed=7, **how)
    assert len({text.tokens for text in same}) == 3  # numbers of its own for each place
    assert single([[1, 2]] * 3, seed=7, **how) == same
    assert single([[1, 2]] * 2, seed=[7, 7], **how) == [same[0], same[0]]
    request = single.submit([1, 2], seed=7, **how)
    while not request.done:
        single.step()
    assert request.generated() == same[0]
    dt.manual_seed(3)
    first, second = single([[1, 2]], **how), single([[1, 2]], **how)
    assert first != second
    dt.manual_seed(3)
    assert single([[1, 2]], **how) == first
    dt.manual_seed(0)
    mixed = single([[1, 2], [1, 2]], max_new_tokens=[10, 3], temperature=[1.0, 0], seed=7)
    assert mixed[0] == same[0] and len(mixed[1].tokens) == 3


def test_stream_yields_same_tokens_in_turns_and_can_be_abandoned(single: Generator) -> None:
    prompts = [[5, 17, 3], [9], [4, 4], [1], [2, 3], [30]]
    whole = single(prompts, max_new_tokens=6)
    events = list(single.stream(prompts, max_new_tokens=6))
    for number, text in enumerate(whole):
        own = [event for event in events if event.request == number]
        assert tuple(event.token for event in own) == text.tokens
        assert tuple(event.logprob for event in own) == text.logprobs
        first = len(prompts[number])
        assert [event.position for event in own] == list(range(first, first + 6))
        assert [event.done for event in own] == [None] * 5 + ["length"]
    assert events[0].request != events[1].request  # as they come, not one text after the other
    one, other = (single.stream([p], max_new_tokens=6) for p in ([5, 17, 3], [9]))
    turns = [event for pair in zip(one, other, strict=True) for event in pair]
    assert tuple(e.token for e in turns[::2]) == whole[0].tokens
    assert tuple(e.token for e in turns[1::2]) == whole[1].tokens
    for _ in single.stream(prompts, max_new_tokens=6):
        break
    assert single.idle
    assert single(prompts, max_new_tokens=6) == whole


def test_requests_can_be_submitted_and_cancelled_between_steps(single: Generator) -> None:
    (want,) = single([[5, 17, 3]], max_new_tokens=6)
    first = single.submit(torch.tensor([9, 9]), max_new_tokens=20)
    assert {event.request for event in single.step()} == {first.number}
    second = single.submit([5, 17, 3], max_new_tokens=6)
    single.step()
    single.cancel(first)
    assert first.reason == "dropped" and len(first.tokens) < 20
    while not single.idle:
        single.step()
    assert second.generated() == want
    assert single.step() == []


def test_generator_rejects_bad_requests_and_options(single: Generator) -> None:
    for prompts, match in (
        ([5, 3], r"fix: \[prompt\]"),
        (torch.tensor([5, 3]), r"fix: \[prompt\]"),
        ([[]], "no tokens"),
        ([[5, 32]], "0 to 31"),
        ([[-1]], "0 to 31"),
        ([[1.5]], "a list of integers"),
        ([[True]], "a list of integers"),
        ([torch.ones(2)], r"float32\[2\]"),
        (["hello"], "tokenizer"),
        ("hello", "list of prompts"),
        ([[1] * 25], r"buckets are \[8, 24\]"),
    ):
        with pytest.raises(PlanningError, match=match):
            single(prompts, max_new_tokens=4)
    for options, match in (
        (dict(max_new_tokens=40), "max_new_tokens=38"),
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(temperature=-1), "temperature"),
        (dict(temperature="hot"), "temperature"),
        (dict(temperature=[0.5, 0.5]), "2 entries for 1 prompts"),
        (dict(top_k=-1), "top_k"),
        (dict(top_k=2.5), "top_k"),
        (dict(top_p=0), "top_p"),
        (dict(top_p=1.5), "top_p"),
        (dict(seed=-1), "seed"),
        (dict(eos="</s>"), "eos"),
    ):
        with pytest.raises(PlanningError, match=match):
            single([[1, 2]], **options)
    with pytest.raises(TypeError, match="temprature"):
        single([[1, 2]], temprature=0.5)
    for options, match in (
        (dict(slots=0, length=8), "slots"),
        (dict(slots=2, length=1), "length"),
        (dict(slots=2, length=8, buckets=(16,)), "bucket of 16"),
        (dict(slots=2, length=8, buckets=[]), "buckets"),
        (dict(slots=2, length=8, ahead=-1), "ahead"),
        (dict(slots=2, length=8, prefill_batch=0), "prefill_batch"),
        (dict(slots=2, length=8, prefill_batch=3), "prefill_batch=2"),
    ):
        with pytest.raises(PlanningError, match=match):
            dt.generator(single.model, **options)  # type: ignore[arg-type]
    with pytest.raises(PlanningError, match="parallelize"):
        dt.generator(writer(), slots=2, length=8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"dt\.generator"):
        single.model.generate(torch.ones(1, 2))
    assert single([]) == [] and single.idle


def test_generator_drops_pending_requests_at_end_of_launch(single: Generator) -> None:
    """The caches start empty in each launch."""
    want = single([[5, 3]], max_new_tokens=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with dt.launch(dt.Mesh()):
            assert single([[5, 3]], max_new_tokens=4) == want
            left = single.submit([5, 3], max_new_tokens=4)
            single.step()
        with dt.launch(dt.Mesh()):
            with pytest.raises(RuntimeError, match="1 requests"):
                single.step()
            assert left.reason == "dropped" and single.idle
            assert single([[5, 3]], max_new_tokens=4) == want
    assert (len(single._prefill.plans), len(single._decode.plans)) <= (2, 1)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
@pytest.mark.sample("llama-tp2", "llama-tp2cp2")
@pytest.mark.parametrize("where", ["tp2", "tp2cp2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_on_ray_equals_in_process_and_transformers(
    family: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy tokens equal those of transformers; sampled tokens are bitwise equal to those in
    process. Split positions are dealt in blocks of 8."""
    monkeypatch.setattr(programs, "BLOCK", 8)
    gen = dt.generator(placed(family, where), slots=2, length=96, buckets=(24,), ahead=1)
    drawn: dict[str, Any] = dict(max_new_tokens=5, temperature=[0, 1.0, 0, 0.7], seed=3)
    with dt.launch(gen.model.mesh):
        want = gen(PROMPTS, **drawn)
    with dt.launch(gen.model.mesh, backend="ray"):
        assert gen(PROMPTS, **drawn) == want
        found = gen(PROMPTS, max_new_tokens=64)
    assert [list(text.tokens) for text in found] == by_transformers(build(family), PROMPTS, 64)
