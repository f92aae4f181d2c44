"""`rollouts`: batches of texts that a replica generates and a reward scores, during training.

    actor = dt.replica(policy, play, placements)
    judge = daft.spawn(Counting)                       # score(prompt, tokens) -> float
    for batch in rollouts(actor, prompts, judge.score, batch_size=32, samples=8, staleness=1, ...):
        step(batch.tokens, batch.logprobs, ...)        # trains the policy
        dt.sync(policy, actor)                         # the actor's next version

Requests of later batches are submitted as far as ``staleness`` admits (staleness.py). `dt.sync`
numbers the versions; each token has the version that made it. With staleness 0, batches come in the
order of the prompts, and are bitwise equal to the batches of a loop that generates, scores, trains
and syncs in turn.
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
"""The interval, in seconds, at which scores are polled while there is no other work."""

PREFILL_BATCH = 8
"""The prompts of one prefill, for a generator that `rollouts` makes: they start in batches."""

Reward = Callable[[list[int], list[int]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """A batch of B texts, padded at the right to T positions, the generator's length.

    ``tokens``: int64[B, T], prompt and generated tokens; ``generated``: bool[B, T], True at
    generated tokens; ``logprobs``: float32[B, T], of each generated token when it was drawn, under
    softmax(logits / temperature), 0 elsewhere; ``versions``: int64[B, T], the version of the
    weights with which each token was drawn, -1 elsewhere; ``rewards``: float32[B]; ``prompts``:
    int64[B], the number of each text's prompt, the same for its samples; ``version``: the actor's
    version when the batch was made.
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
    """One text in flight, of prompt number ``group``. ``score``: the result of the reward function,
    a number or a future of a number; ``reward``: the number."""

    number: int
    group: int
    request: TextRequest
    score: Any = None
    reward: float | None = None


@dataclass(slots=True)
class _Loop:
    """The state of a loop over batches. ``groups``: the texts of each prompt that was not taken
    yet; ``generating`` and ``scoring``: the texts that are generated, or wait for their scores;
    ``first``: the actor's version at the beginning; ``ended``: no prompt is left."""

    gen: Generator
    prompts: Iterator[Sequence[int] | Tensor]
    reward: Reward
    ledger: Ledger
    samples: int
    options: dict[str, Any]
    first: int
    seed: int
    num_texts: int = 0
    ended: bool = False
    groups: dict[int, list[_Text]] = field(default_factory=dict[int, list["_Text"]])
    generating: list[_Text] = field(default_factory=list["_Text"])
    scoring: list[_Text] = field(default_factory=list["_Text"])

    def batch(self) -> Rollouts | None:
        """Wait for the next batch, and return it; None after the last one. Raises RuntimeError if
        only a sync could admit more requests."""
        while True:
            self._submit()
            groups = self.ledger.take(ended=self.ended)
            if groups is not None:
                return self._collate([text for group in groups for text in self.groups.pop(group)])
            if self.ended and not self.groups:
                return None
            if self.ledger.needs_sync(self._num_syncs):
                if not self._has_more():
                    continue
                raise RuntimeError(
                    f"{self.ledger.num_batches} batches were taken and the weights synced "
                    f"{self._num_syncs} times: no other batch is within staleness="
                    f"{self.ledger.staleness}.\n"
                    f"fix: dt.sync(policy, actor) after each step"
                )
            if not self.gen.idle:
                self.gen.step()
                self._score_ended_texts()
            elif not any(_has_score(text) for text in self.scoring):
                time.sleep(POLL_S)
            self._collect()

    def _has_more(self) -> bool:
        """Return whether there is another prompt, which stays the next one."""
        first = next(self.prompts, None)
        self.ended = first is None
        if first is not None:
            self.prompts = itertools.chain([first], self.prompts)
        return not self.ended

    @property
    def _num_syncs(self) -> int:
        return self.gen.model.version - self.first

    def _submit(self) -> None:
        """Submit the samples of prompts, as far as the staleness bound admits."""
        while not self.ended and self.ledger.room(self._num_syncs):
            prompt = next(self.prompts, None)
            if prompt is None:
                self.ended = True
                return
            group = self.ledger.num_submitted
            self.groups[group] = []
            for _ in range(self.samples):
                seed = self.seed + self.num_texts
                request = self.gen.submit(prompt, seed=seed, **self.options)
                self.groups[group].append(_Text(self.num_texts, group, request))
                self.num_texts += 1
            self.ledger.submit(self._num_syncs)
            self.generating += self.groups[group]

    def _score_ended_texts(self) -> None:
        """Call the reward function for texts that have ended."""
        ended = [text for text in self.generating if text.request.done]
        self.generating = [text for text in self.generating if not text.request.done]
        for text in ended:
            text.score = self.reward(list(text.request.prompt), list(text.request.tokens))
        self.scoring += ended

    def _collect(self) -> None:
        """Collect scores that have arrived, and complete prompts whose texts all have a score."""
        scored = [text for text in self.scoring if _has_score(text)]
        self.scoring = [text for text in self.scoring if text not in scored]
        for text in scored:
            text.reward = _number(text)
            if all(sample.reward is not None for sample in self.groups[text.group]):
                self.ledger.complete(text.group)

    def _collate(self, texts: Sequence[_Text]) -> Rollouts:
        """Return these texts as one batch of tensors, padded to the generator's length."""
        length = self.gen.length
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
            version=self.gen.model.version,
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
    """Yield batches of generated and scored texts until the prompts end.

    Args:
        actor: a replica, whose version `dt.sync` increases; or a `dt.generator` of a replica, with
            its own options.
        prompts: an iterable of lists of tokens, or of 1-D integer tensors.
        reward: a function of a prompt and the new tokens, two lists of ints, that returns a number
            or a future of a number, such as a method of an actor of `daft.spawn`. It is called once
            for each text.
        batch_size: the number of texts in a batch; the last batch may have fewer.
        max_new_tokens: the largest number of new tokens of each text.
        samples: the number of texts for each prompt, with different random numbers; it divides
            ``batch_size``. They are successive rows of one batch.
        staleness: k. A text is in one of the k + 1 batches after the version with which it began.
        temperature, top_k, top_p, eos: as for `dt.generator`.
        seed: the seed of the first text; text n has seed + n.
        slots, length: of the generator that is made for a replica; by default a slot for each text
            of a batch, and 256 positions, doubled until they are twice ``max_new_tokens``.

    Raises PlanningError for invalid arguments, RuntimeError if only a sync could admit the next
    batch, and the errors of the reward.
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
        gen = actor
    else:
        gen = _generator(actor, batch_size, slots, length, max_new_tokens)
    if gen.model.source is None:
        raise PlanningError(
            "the actor is a model with its own values, which no dt.sync changes.\n"
            "fix: actor = dt.replica(policy, mesh, placements)"
        )
    loop = _Loop(
        gen=gen,
        prompts=iter(prompts),
        reward=reward,
        ledger=Ledger(batch_size // samples, staleness),
        samples=samples,
        options=options,
        first=gen.model.version,
        seed=seed,
    )
    return _batches(loop)


def _batches(loop: _Loop) -> Iterator[Rollouts]:
    """Yield the batches of a loop. At its end, cancel the requests in flight."""
    try:
        while (batch := loop.batch()) is not None:
            yield batch
    finally:
        for text in loop.generating:
            loop.gen.cancel(text.request)


def _generator(
    actor: ParallelModule, batch_size: int, slots: int | None, length: int | None, new: int
) -> Generator:
    """Return a generator for a replica: by default with a slot for each text of a batch, and a
    length of at least twice ``new``."""
    if length is None:
        length = 256
        while length < 2 * new:
            length *= 2
    slots = batch_size if slots is None else slots
    return generator(actor, slots=slots, length=length, prefill_batch=min(slots, PREFILL_BATCH))


def _has_score(text: _Text) -> bool:
    return not isinstance(text.score, Future) or text.score.done()


def _number(text: _Text) -> float:
    """Return the text's score as a number. Raises the reward's error."""
    score: Any = text.score.get() if isinstance(text.score, Future) else text.score
    try:
        return float(score)
    except (TypeError, ValueError) as error:
        raise PlanningError(
            f"the reward of text {text.number} is {score!r}, not a number.\n"
            f"fix: return a float, or a future of one"
        ) from error
