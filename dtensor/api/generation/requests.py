"""The requests of a generator, and its results: events and texts. Arguments are checked here.

prompt = prompt_of([5, 3, 9], vocabulary=256)          # (5, 3, 9)
sampling = Sampling(temperature=0.7, top_k=50)
request = TextRequest(number=0, prompt=prompt, max_new_tokens=64, sampling=sampling, ...)
request.add_token(token, logprob)                      # adds Event(request=0, token=..., ...)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, cast

import torch

from dtensor.errors import PlanningError, check_number, shown

Reason = Literal["stop", "length", "dropped"]
Eos = int | Sequence[int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is drawn. ``temperature`` 0: the most likely token; ``top_k`` 0 and
    ``top_p`` 1: from all tokens. As in transformers, the filters apply in this order: temperature,
    top_k, then top_p to the remaining tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        fix = "temperature=0.7, top_k=50, top_p=0.9"
        check_number("temperature", self.temperature, least=0, fix=fix)
        check_number("top_k", self.top_k, least=0, whole=True, fix=fix)
        check_number("top_p", self.top_p, above=0, fix=fix)
        if not self.top_p <= 1 or self.temperature == float("inf"):
            raise PlanningError(
                f"temperature={self.temperature}, top_p={self.top_p}: the first is finite, the "
                f"second at most 1.\nfix: {fix}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One token. ``request``: the index of its prompt in the argument of `stream`, or the
    ``number`` of the result of `submit`; ``position``: its index in the text, with the prompt;
    ``done``: why it is the last token, or None; ``logprob``: see `Generated`."""

    request: int
    token: int
    logprob: float
    position: int
    done: Reason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The new tokens of one prompt.

    ``logprobs``: of each token, under softmax(logits / temperature) before top_k and top_p; with
    temperature 1 if tokens are greedy. ``reason``: "stop": the last token ends a text; "length":
    the text has as many tokens as requested.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: Reason


@dataclass(slots=True, eq=False)
class TextRequest:
    """One text, which grows. ``reason``: why it has ended, or None; "dropped": by
    `Generator.cancel`, or because a run failed.

    ``seed``: the 63-bit key of its random numbers; ``versions``: the version of the model's weights
    for each submitted token; ``events``: the list to which its events are added.
    """

    number: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    seed: int
    eos: frozenset[int]
    events: list[Event] = field(repr=False)
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    reason: Reason | None = None
    versions: list[int] = field(default_factory=list[int])
    num_to_repeat: int = 0  # the number of tokens that are still to be made again after a loss

    @property
    def done(self) -> bool:
        """Whether the text has ended."""
        return self.reason is not None

    def add_token(self, token: int, logprob: float) -> None:
        """Add a token and its event; ignored after the end. A token that is made again after a loss
        must be the same. Raises RuntimeError otherwise."""
        if self.done:
            return
        if self.num_to_repeat:
            previous, self.num_to_repeat = self.tokens[-self.num_to_repeat], self.num_to_repeat - 1
            if token != previous:
                raise RuntimeError(
                    f"request {self.number} was made again, as a rank was lost, and a token came "
                    f"out as {token} that had been {previous}.\nfix: submit it again"
                )
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.eos:
            self.reason = "stop"
        elif len(self.tokens) == self.max_new_tokens:
            self.reason = "length"
        position = len(self.prompt) + len(self.tokens) - 1
        event = Event(
            request=self.number,
            token=token,
            logprob=logprob,
            position=position,
            done=self.reason,
        )
        self.events.append(event)

    def restart(self, version: int) -> None:
        """Start over from the prompt, because the keys and values were lost. Raises RuntimeError if
        a token was made with other weights than the present ``version``."""
        if any(token_version != version for token_version in self.versions[: len(self.tokens)]):
            raise RuntimeError(
                f"the cache of request {self.number} was lost with a rank, and the weights have "
                f"changed since it was begun, so that it cannot be made again.\n"
                f"fix: submit it again"
            )
        self.versions.clear()
        self.num_to_repeat = len(self.tokens)

    def generated(self) -> Generated:
        assert self.reason is not None
        return Generated(
            tokens=tuple(self.tokens), logprobs=tuple(self.logprobs), reason=self.reason
        )


def prompts_of(prompts: object) -> list[Any]:
    """Return a list of prompts. Raises PlanningError for a single prompt."""
    if isinstance(prompts, torch.Tensor) and prompts.dim() != 2:
        shape = ",".join(map(str, prompts.shape))
        raise PlanningError(
            f"prompts is a tensor of shape [{shape}], not a list of prompts.\n"
            f"fix: [prompt] for one prompt"
        )
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise PlanningError(f"prompts is {shown(prompts)}, not a list of prompts; fix: [[5, 3, 9]]")
    listed = list(cast(Iterable[Any], prompts))
    if listed and all(isinstance(token, Integral) for token in listed):
        raise PlanningError("prompts is one list of tokens, not a list of prompts; fix: [prompt]")
    return listed


def prompt_of(prompt: object, vocabulary: int) -> tuple[int, ...]:
    """Return a prompt's tokens. Raises PlanningError if it is empty, or not a list of tokens of the
    vocabulary."""
    fix = "a list of integers, or a tensor of them with one dim"
    if isinstance(prompt, torch.Tensor):
        is_integer = not prompt.is_floating_point() and not prompt.is_complex()
        if prompt.dim() != 1 or not is_integer or prompt.dtype == torch.bool:
            kind = str(prompt.dtype).removeprefix("torch.")
            shape = ",".join(map(str, prompt.shape))
            raise PlanningError(f"a prompt is a tensor {kind}[{shape}].\nfix: {fix}")
        tokens = prompt.tolist()
    elif isinstance(prompt, str) or not isinstance(prompt, Iterable):
        raise PlanningError(f"a prompt is {shown(prompt)}.\nfix: {fix}, as a tokenizer gives it")
    else:
        tokens = list(cast(Iterable[Any], prompt))
    if not tokens:
        raise PlanningError("a prompt has no tokens.\nfix: give it at least one to begin with")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise PlanningError(f"a prompt has {shown(token)} in it.\nfix: {fix}")
        if not 0 <= int(token) < vocabulary:
            raise PlanningError(
                f"a prompt has the token {token}, and the model's are 0 to {vocabulary - 1}.\n"
                f"fix: the tokenizer of this model"
            )
    return tuple(map(int, tokens))


def eos_of(eos: object, model_eos: Sequence[int]) -> frozenset[int]:
    """Return the tokens that end a text; "model" stands for ``model_eos``, the model's own. Raises
    PlanningError for an invalid ``eos``."""
    if eos == "model":
        return frozenset(model_eos)
    if eos is None:
        return frozenset()
    listed = [eos] if isinstance(eos, Integral) else eos
    if isinstance(listed, str) or not isinstance(listed, Iterable):
        raise PlanningError(f'eos={eos!r}: it is "model", None, a token or tokens; fix: eos=2')
    tokens = list(cast(Iterable[Any], listed))
    for token in tokens:
        check_number("eos", token, least=0, whole=True, fix="eos=2, or eos=[2, 7]")
    return frozenset(map(int, tokens))


def per_prompt(name: str, value: object, num: int) -> list[Any]:
    """Return a list with a value for each prompt, from one value for all or such a list. Raises
    PlanningError for a list of another length."""
    if not isinstance(value, (list, tuple)):
        return [value] * num
    if len(value) != num:
        raise PlanningError(
            f"{name} has {len(value)} entries for {num} prompts.\n"
            f"fix: one for each prompt, or one number for all"
        )
    return list(value)
