"""`rollouts`: batches of texts that a replica generates and an actor scores, during training.

    actor = dt.replica(policy, play, placements)
    judge = daft.spawn(Counting)                       # score(prompt, tokens) -> float
    for batch in rollouts(actor, prompts, judge.score, batch_size=32, samples=8, staleness=1, ...):
        step(batch.tokens, batch.logprobs, ...)        # trains the policy
        dt.sync(policy, actor)                         # the actor's next version

Each prompt is generated ``samples`` times, with different random numbers; the samples are
successive rows of one batch. The loop waits only for the requested batch: while a batch is trained
on and scored, requests of later batches are submitted, as many as ``staleness`` admits
(staleness.py has the bound and its proof), and generation continues whenever the next batch is
requested.

Versions are those of `dt.sync`, by token: a text during which the weights were synced has tokens of
both versions. With staleness 0 batches come in the order of the prompts, and equal, to the bit,
those of a loop that generates, scores, trains and syncs in turn.

Not here: the use of a batch; the slots (generation/generator.py).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dtensor.api.generation.generator import Generator, generator
from dtensor.api.generation.requests import TextRequest
from dtensor.api.generation.staleness import Ledger
from dtensor.api.model.parallel import ParallelModule
from dtensor.daft import Future
from dtensor.errors import PlanningError, check_callable, check_number

POLL_S = 0.0005
"""How often scores are polled while there is no other work."""

TOGETHER = 8
"""Prompts of one prefill, for a generator that is made here: whole batches begin at once."""

Reward = Callable[[list[int], list[int]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """A batch of B texts, padded at the right to T positions, the generator's length.

    ``tokens``: int64[B, T], prompt and generated tokens; ``generated``: bool[B, T], True at the
    latter; ``logprobs``: float32[B, T], of each generated token when it was drawn, under
    softmax(logits / temperature), 0 elsewhere; ``versions``: int64[B, T], of the weights with which
    it was drawn, -1 elsewhere; ``rewards``: float32[B]; ``prompts``: int64[B], the number of each
    text's prompt, the same for its samples; ``version``: the actor's when the batch was made.
    """

    tokens: Tensor
    generated: Tensor
    logprobs: Tensor
    versions: Tensor
    rewards: Tensor
    prompts: Tensor
    version: int

    @property
    def staleness(self) -> int:
        """The number of versions by which the oldest token is behind the newest weights."""
        drawn = self.versions[self.generated]
        return self.version - int(drawn.min()) if len(drawn) else 0

    def __repr__(self) -> str:
        mean = float(self.rewards.mean())
        return (
            f"<rollouts: {len(self.rewards)} texts of version {self.version}, staleness "
            f"{self.staleness}, mean reward {mean:.3f}>"
        )


@dataclass(slots=True)
class _Text:
    """One text in flight, of the prompt ``group``; ``score``: the reward's result, a number or a
    future of one; ``reward``: the number."""

    number: int
    group: int
    request: TextRequest
    score: Any = None
    reward: float | None = None


@dataclass(slots=True)
class _Loop:
    """The work between two batches."""

    made_by: Generator
    prompts: Iterator[Sequence[int] | Tensor]
    reward: Reward
    ledger: Ledger
    samples: int
    options: dict[str, Any]
    first: int
    """The actor's version at the beginning."""
    seed: int
    num_texts: int = 0
    ended: bool = False
    groups: dict[int, list[_Text]] = field(default_factory=dict[int, list["_Text"]])
    generating: list[_Text] = field(default_factory=list["_Text"])
    scoring: list[_Text] = field(default_factory=list["_Text"])

    def batch(self) -> Rollouts | None:
        """The next batch; None after the last."""
        while True:
            self._submit()
            groups = self.ledger.take(ended=self.ended)
            if groups is not None:
                return self._batch([text for group in groups for text in self.groups.pop(group)])
            if self.ended and not self.groups:
                return None
            if self.ledger.starves(self._synced):
                if not self._has_more():
                    continue
                raise RuntimeError(
                    f"{self.ledger.num_batches} batches were taken and the weights synced "
                    f"{self._synced} times: no other batch is within staleness="
                    f"{self.ledger.staleness}.\n"
                    f"fix: dt.sync(policy, actor) after each step"
                )
            if not self.made_by.idle:
                self.made_by.step()
                self._score()
            elif not any(_is_there(text) for text in self.scoring):
                time.sleep(POLL_S)
            self._collect()

    def _has_more(self) -> bool:
        """Whether there is another prompt, which is then held."""
        first = next(self.prompts, None)
        self.ended = first is None
        if first is not None:
            self.prompts = itertools.chain([first], self.prompts)
        return not self.ended

    @property
    def _synced(self) -> int:
        return self.made_by.model.version - self.first

    def _submit(self) -> None:
        while not self.ended and self.ledger.room(self._synced):
            prompt = next(self.prompts, None)
            if prompt is None:
                self.ended = True
                return
            group = self.ledger.num_submitted
            self.groups[group] = []
            for _ in range(self.samples):
                seed = self.seed + self.num_texts
                request = self.made_by.submit(prompt, seed=seed, **self.options)
                self.groups[group].append(_Text(self.num_texts, group, request))
                self.num_texts += 1
            self.ledger.submit(self._synced)
            self.generating += self.groups[group]

    def _score(self) -> None:
        """Pass ended texts to the reward."""
        ended = [text for text in self.generating if text.request.done]
        self.generating = [text for text in self.generating if not text.request.done]
        for text in ended:
            text.score = self.reward(list(text.request.prompt), list(text.request.tokens))
        self.scoring += ended

    def _collect(self) -> None:
        """Collect scores; a prompt is complete when all its texts have theirs."""
        there = [text for text in self.scoring if _is_there(text)]
        self.scoring = [text for text in self.scoring if text not in there]
        for text in there:
            text.reward = _number(text)
            if all(one.reward is not None for one in self.groups[text.group]):
                self.ledger.complete(text.group)

    def _batch(self, texts: Sequence[_Text]) -> Rollouts:
        length = self.made_by.length
        tokens = torch.zeros(len(texts), length, dtype=torch.int64)
        logprobs = torch.zeros(len(texts), length)
        versions = torch.full((len(texts), length), -1)
        for row, text in enumerate(texts):
            request = text.request
            begin = len(request.prompt)
            end = begin + len(request.tokens)
            tokens[row, :end] = torch.tensor([*request.prompt, *request.tokens])
            logprobs[row, begin:end] = torch.tensor(request.logprobs)
            versions[row, begin:end] = torch.tensor(request.versions[: end - begin])
        return Rollouts(
            tokens=tokens,
            generated=versions >= 0,
            logprobs=logprobs,
            versions=versions,
            rewards=torch.tensor([text.reward for text in texts], dtype=torch.float32),
            prompts=torch.tensor([text.group for text in texts]),
            version=self.made_by.model.version,
        )


def rollouts(
    actor: ParallelModule | Generator,
    prompts: Iterable[Sequence[int] | Tensor],
    reward: Reward,
    *,
    batch_size: int,
    max_new_tokens: int,
    samples: int = 1,
    staleness: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos: Any = "model",
    seed: int = 0,
    slots: int | None = None,
    length: int | None = None,
) -> Iterator[Rollouts]:
    """Batches of generated and scored texts, until the prompts end, if they do.

    Args:
        actor: a replica, whose version `dt.sync` raises; or a `dt.generator` of one, with its own
            options.
        prompts: lists of tokens or 1-D integer tensors, in order.
        reward: of a prompt and the new tokens, two lists of ints; returns a number, or a future of
            one, such as a method of an actor of `daft.spawn`. It is called once for each text.
        batch_size: B, the texts of a batch; the last one may have fewer.
        max_new_tokens: of each text.
        samples: texts of each prompt; they divide a batch.
        staleness: k. A text is in one of the k + 1 batches after the version with which it began.
        temperature, top_k, top_p, eos: as for `dt.generator`.
        seed: of the first text; text n has seed + n.
        slots, length: of the generator that is made for a replica; by default a slot for each text
            of a batch, and the smallest power of two that has 256 positions or twice the new ones.

    Raises PlanningError for invalid arguments; RuntimeError for a batch that only a sync could
    admit; and errors of the reward.
    """
    check_number("batch_size", batch_size, least=1, whole=True, fix="batch_size=32")
    check_number("samples", samples, least=1, whole=True, fix="samples=8")
    check_number("staleness", staleness, least=0, whole=True, fix="staleness=1")
    check_number("seed", seed, least=0, whole=True, fix="seed=7")
    check_callable("the reward", reward, "daft.spawn(Judge).score, or lambda prompt, tokens: 0.0")
    if batch_size % samples:
        raise PlanningError(
            f"batch_size={batch_size} with samples={samples}: a batch has all samples of its "
            f"prompts.\nfix: batch_size={samples * max(1, batch_size // samples)}"
        )
    options: dict[str, Any] = dict(
        temperature=temperature, top_k=top_k, top_p=top_p, eos=eos, max_new_tokens=max_new_tokens
    )
    if isinstance(actor, Generator):
        if slots is not None or length is not None:
            raise PlanningError(
                "slots= and length= are the generator's own.\n"
                "fix: leave them out, or pass the replica instead of its generator"
            )
        made_by = actor
    else:
        made_by = _generator(actor, batch_size, slots, length, max_new_tokens)
    if made_by.model.source is None:
        raise PlanningError(
            "the actor is a model with its own values, which no dt.sync changes.\n"
            "fix: actor = dt.replica(policy, mesh, placements)"
        )
    loop = _Loop(
        made_by=made_by,
        prompts=iter(prompts),
        reward=reward,
        ledger=Ledger(batch_size // samples, staleness),
        samples=samples,
        options=options,
        first=made_by.model.version,
        seed=seed,
    )
    return _batches(loop)


def _batches(loop: _Loop) -> Iterator[Rollouts]:
    try:
        while (batch := loop.batch()) is not None:
            yield batch
    finally:
        for text in loop.generating:
            loop.made_by.cancel(text.request)


def _generator(
    actor: ParallelModule, batch_size: int, slots: int | None, length: int | None, new: int
) -> Generator:
    if length is None:
        length = 256
        while length < 2 * new:
            length *= 2
    slots = batch_size if slots is None else slots
    return generator(actor, slots=slots, length=length, prefill_batch=min(slots, TOGETHER))


def _is_there(text: _Text) -> bool:
    return not isinstance(text.score, Future) or text.score.done()


def _number(text: _Text) -> float:
    """The text's score; raises the reward's error."""
    given: Any = text.score.get() if isinstance(text.score, Future) else text.score
    try:
        return float(given)
    except (TypeError, ValueError) as error:
        raise PlanningError(
            f"the reward of text {text.number} is {given!r}, not a number.\n"
            f"fix: return a float, or a future of one"
        ) from error
