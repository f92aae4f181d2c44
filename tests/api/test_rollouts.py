"""Rollouts give the numbers of a plain loop and are never staler than stated; mistakes are refused.
The `Ledger` of batches bounds staleness, assigns requests to batches and starves no request."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dtensor as dt
from dtensor import daft
from dtensor.api.generation.staleness import Ledger
from examples.rl.model import GPT

TRAIN, PLAY = dt.Mesh(dp=2, name="train"), dt.Mesh(tp=2, name="play")
HEADS = {
    "*.qkv.weight": dict(tp=dt.Row(blocks=3)),
    "*.proj.weight": dict(tp=dt.Column()),
    "*.up.weight": dict(tp=dt.Row()),
    "*.down.weight": dict(tp=dt.Column()),
}
VOCAB, LENGTH, NEW = 11, 16, 5
EOS = 3


def make() -> tuple[dt.ParallelModule, dt.ParallelModule, dt.TrainStep]:
    torch.manual_seed(0)
    net = GPT(vocab=VOCAB, context=LENGTH, width=16, heads=2, layers=1)
    policy = dt.parallelize(net, TRAIN, {}, zero={"dp": 3})
    actor = dt.replica(policy, PLAY, HEADS)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    return policy, actor, dt.train_step(policy, loss, optimizer, inputs=dict(dp=dt.Row()))


def loss(
    model: nn.Module, tokens: Tensor, generated: Tensor, logprobs: Tensor, rewards: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    new = model(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    mask, old = generated[:, 1:], logprobs[:, 1:]
    count = mask.sum()
    gain = torch.where(mask, (new - old).exp() * rewards[:, None], 0.0).sum() / count
    return -gain, {"apart": torch.where(mask, (new - old).abs(), 0.0).sum() / count}


def score(prompt: list[int], tokens: list[int]) -> float:
    return sum(token % 2 for token in tokens) / NEW - 0.3


class Judge:
    def score(self, prompt: list[int], tokens: list[int]) -> float:
        return score(prompt, tokens)


class Late(daft.Future):
    """A score that becomes available after a number of queries."""

    def __init__(self, value: float, asks: int) -> None:
        self.value, self.asks = value, asks

    def get(self, timeout: float | None = None) -> Any:
        return self.value

    def done(self) -> bool:
        self.asks -= 1
        return self.asks < 0


def prompts(seed: int = 0) -> Iterator[list[int]]:
    rng = random.Random(seed)
    while True:
        yield [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]


OPTIONS: dict[str, Any] = dict(max_new_tokens=NEW, length=LENGTH, seed=7)


@pytest.mark.slow
def test_rollouts_without_staleness_equal_sequential_loop() -> None:
    steps, batch, samples = 4, 4, 2
    policy, actor, step = make()
    seen: list[dt.Rollouts] = []
    with dt.launch(TRAIN, PLAY):
        judge = daft.spawn(Judge)
        dt.sync(policy, actor)
        found = dt.rollouts(
            actor,
            prompts(),
            judge.score,
            batch_size=batch,
            samples=samples,
            eos=EOS,
            slots=3,
            **OPTIONS,
        )
        for rolled in itertools.islice(found, steps):
            seen.append(rolled)
            made = step(rolled.tokens, rolled.generated, rolled.logprobs, rolled.rewards)
            assert float(made.metrics["apart"]) <= 1e-5
            dt.sync(policy, actor)
    weights = {name: p.detach().clone() for name, p in policy.named_parameters()}

    policy, actor, step = make()
    with dt.launch(TRAIN, PLAY):
        dt.sync(policy, actor)
        gen = dt.generator(actor, slots=3, length=LENGTH)
        source = prompts()
        for number, rolled in enumerate(seen):
            asked = [p for p in itertools.islice(source, batch // samples) for _ in range(samples)]
            tokens = torch.zeros(batch, LENGTH, dtype=torch.int64)
            logprobs, rewards = torch.zeros(batch, LENGTH), torch.zeros(batch)
            generated = torch.zeros(batch, LENGTH, dtype=torch.bool)
            for row, prompt in enumerate(asked):
                seed = 7 + number * batch + row
                (text,) = gen([prompt], NEW, temperature=1.0, eos=EOS, seed=[seed])
                begin, end = len(prompt), len(prompt) + len(text.tokens)
                tokens[row, :end] = torch.tensor([*prompt, *text.tokens])
                logprobs[row, begin:end] = torch.tensor(text.logprobs)
                generated[row, begin:end] = True
                rewards[row] = score(prompt, list(text.tokens))
            assert torch.equal(tokens, rolled.tokens)
            assert torch.equal(logprobs, rolled.logprobs)
            assert torch.equal(generated, rolled.generated)
            assert torch.equal(rewards, rolled.rewards)
            assert rolled.version == number + 1 and rolled.staleness == 0
            assert rolled.prompts.tolist() == [2 * number, 2 * number, 2 * number + 1] + [
                2 * number + 1
            ]
            step(tokens, generated, logprobs, rewards)
            dt.sync(policy, actor)
    for name, p in policy.named_parameters():
        assert torch.equal(p, weights[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
def test_late_scores_never_exceed_stated_staleness(staleness: int) -> None:
    policy, actor, step = make()
    rng, worst, num = random.Random(1), 0, 0
    with dt.launch(TRAIN, PLAY):
        dt.sync(policy, actor)
        found = dt.rollouts(
            actor,
            prompts(),
            lambda prompt, tokens: Late(score(prompt, tokens), rng.randrange(60)),
            batch_size=4,
            samples=2,
            staleness=staleness,
            eos=EOS,
            slots=4,
            **OPTIONS,
        )
        for number, rolled in enumerate(itertools.islice(found, 25)):
            assert rolled.version == number + 1
            assert rolled.rewards.shape == (4,)
            assert rolled.prompts.view(2, 2).diff(dim=1).eq(0).all()  # samples stand together
            assert bool((rolled.versions[rolled.generated] >= rolled.version - staleness).all())
            assert bool((rolled.versions[rolled.generated] <= rolled.version).all())
            worst, num = max(worst, rolled.staleness), num + 1
            step(rolled.tokens, rolled.generated, rolled.logprobs, rolled.rewards)
            dt.sync(policy, actor)
    assert num == 25 and 0 < worst <= staleness


@pytest.mark.slow
def test_rollouts_accept_finite_prompts_and_users_generator() -> None:
    policy, actor, _ = make()
    with dt.launch(TRAIN, PLAY):
        dt.sync(policy, actor)
        gen = dt.generator(actor, slots=2, length=LENGTH)
        given = list(itertools.islice(prompts(), 5))
        first = list(dt.rollouts(gen, given, score, batch_size=5, max_new_tokens=NEW))
        assert [len(batch.rewards) for batch in first] == [5]
        batches = dt.rollouts(gen, given, score, batch_size=4, max_new_tokens=NEW, staleness=1)
        assert [len(batch.rewards) for batch in batches] == [4, 1]
        assert gen.idle
        batches = dt.rollouts(gen, given, score, batch_size=4, max_new_tokens=NEW, staleness=0)
        next(batches)
        with pytest.raises(RuntimeError, match="fix: dt.sync"):
            next(batches)
        left = dt.rollouts(gen, prompts(), score, batch_size=1, max_new_tokens=NEW, staleness=3)
        next(left)
        left.close()  # type: ignore[attr-defined]
        assert gen.idle  # what nobody will read is not generated
        with pytest.raises(dt.PlanningError, match="the reward of text 0 is 'good'"):
            next(dt.rollouts(gen, given, lambda *_: "good", batch_size=1, max_new_tokens=NEW))


def test_rollouts_mistakes_raise_planning_error() -> None:
    policy, actor, _ = make()
    with pytest.raises(dt.PlanningError, match="samples=3"):
        dt.rollouts(actor, prompts(), score, batch_size=4, samples=3, **OPTIONS)
    with pytest.raises(dt.PlanningError, match="dt.replica"):
        dt.rollouts(policy, prompts(), score, batch_size=4, **OPTIONS)
    with pytest.raises(dt.PlanningError, match="staleness"):
        dt.rollouts(actor, prompts(), score, batch_size=4, staleness=-1, **OPTIONS)
    with pytest.raises(dt.PlanningError, match="the reward"):
        dt.rollouts(actor, prompts(), 0.5, batch_size=4, **OPTIONS)  # type: ignore[arg-type]
    gen = dt.generator(actor, slots=2, length=LENGTH)
    with pytest.raises(dt.PlanningError, match="the generator's own"):
        dt.rollouts(gen, prompts(), score, batch_size=4, slots=2, max_new_tokens=NEW)


@pytest.mark.ray
def test_rollouts_on_ray_score_with_actor_while_training() -> None:
    policy, actor, step = make()
    with dt.launch(TRAIN, PLAY, backend="ray"):
        judge = daft.spawn(Judge)
        dt.sync(policy, actor)
        found = dt.rollouts(
            actor, prompts(), judge.score, batch_size=4, staleness=1, slots=4, **OPTIONS
        )
        for rolled in itertools.islice(found, 4):
            made = step(rolled.tokens, rolled.generated, rolled.logprobs, rolled.rewards)
            if rolled.staleness == 0:
                assert float(made.metrics["apart"]) <= 1e-5
            assert rolled.staleness <= 1
            dt.sync(policy, actor)


# -- the ledger -----------------------------------------------------------------------------------


def test_ledger_without_staleness_returns_batches_in_submission_order() -> None:
    ledger = Ledger(batch_size=3, staleness=0)
    numbers = [ledger.submit(0) for _ in range(ledger.room(0))]
    assert numbers == [0, 1, 2] and not ledger.room(0)
    for number in (2, 0):
        ledger.complete(number)
    assert ledger.take() is None
    ledger.complete(1)
    assert ledger.take() == (0, 1, 2)
    assert not ledger.room(0) and ledger.needs_sync(0)  # nothing before the next sync
    assert not ledger.needs_sync(1) and ledger.room(1) == 3


def test_ledger_takes_stalest_requests_first_then_first_completed() -> None:
    ledger = Ledger(batch_size=2, staleness=1)
    assert [ledger.submit(0) for _ in range(ledger.room(0))] == [0, 1, 2, 3]
    ledger.complete(3)
    ledger.complete(1)
    assert ledger.take() == (1, 3)  # none is due yet
    assert [ledger.submit(1) for _ in range(ledger.room(1))] == [4, 5]
    ledger.complete(4)
    ledger.complete(5)
    ledger.complete(2)
    assert ledger.take() is None  # 0 would be two versions old in the batch after this one
    ledger.complete(0)
    assert ledger.take() == (0, 2)


def test_ledger_counts_syncs_without_batch_between_them_once() -> None:
    ledger = Ledger(batch_size=2, staleness=0)
    assert ledger.room(5) == 2


def test_ledger_returns_short_last_batch_when_source_ends() -> None:
    ledger = Ledger(batch_size=4, staleness=0)
    for _ in range(3):
        ledger.complete(ledger.submit(0))
    assert ledger.take() is None and ledger.take(ended=True) == (0, 1, 2)
    assert ledger.take(ended=True) is None


@settings(deadline=None)
@given(
    st.integers(1, 4), st.integers(0, 3), st.integers(1, 6), st.integers(0, 2**32), st.booleans()
)
def test_ledger_keeps_staleness_bound_and_starves_no_request(
    size: int, staleness: int, slots: int, seed: int, lags: bool
) -> None:
    """1,000 requests complete in random order, with at most `slots` of them running at once."""
    rng = random.Random(seed)
    ledger = Ledger(size, staleness)
    synced, running, waiting, done = 0, list[int](), list[int](), 0
    when: dict[int, int] = {}
    taken: set[int] = set()
    while ledger.num_batches * size < 200:
        for _ in range(ledger.room(synced)):
            number = ledger.submit(synced)
            when[number] = synced
            waiting.append(number)
        assert ledger.num_submitted <= (synced + staleness + 1) * size
        batch = ledger.take()
        if batch is None:
            while waiting and len(running) < slots:
                running.append(waiting.pop(0))
            assert running, "a batch comes of what is under way"
            ledger.complete(running.pop(rng.randrange(len(running))))
            continue
        for number in batch:
            assert 0 <= ledger.num_batches - 1 - when[number] <= staleness
        assert len(batch) == size and taken.isdisjoint(batch) and list(batch) == sorted(batch)
        taken.update(batch)
        done += 1
        if staleness == 0:
            assert batch == tuple(range((done - 1) * size, done * size))
        if not lags or rng.random() < 0.5 or ledger.needs_sync(synced):
            synced = done
