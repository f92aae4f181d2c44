"""Batches of a ledger: the bound on staleness, who is in which, and that none starves."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor.api.generation.staleness import Ledger


def test_without_staleness_batches_come_in_order_of_submission() -> None:
    ledger = Ledger(batch_size=3, staleness=0)
    numbers = [ledger.submit(0) for _ in range(ledger.room(0))]
    assert numbers == [0, 1, 2] and not ledger.room(0)
    for number in (2, 0):
        ledger.complete(number)
    assert ledger.take() is None
    ledger.complete(1)
    assert ledger.take() == (0, 1, 2)
    assert not ledger.room(0) and ledger.starves(0)  # nothing before the next sync
    assert not ledger.starves(1) and ledger.room(1) == 3


def test_stale_ones_come_first_and_then_those_that_are_done_first() -> None:
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


def test_syncs_without_a_batch_between_them_count_once() -> None:
    ledger = Ledger(batch_size=2, staleness=0)
    assert ledger.room(5) == 2


def test_the_last_batch_of_a_source_that_has_ended() -> None:
    ledger = Ledger(batch_size=4, staleness=0)
    for _ in range(3):
        ledger.complete(ledger.submit(0))
    assert ledger.take() is None and ledger.take(ended=True) == (0, 1, 2)
    assert ledger.take(ended=True) is None


@settings(deadline=None)
@given(
    st.integers(1, 4), st.integers(0, 3), st.integers(1, 6), st.integers(0, 2**32), st.booleans()
)
def test_the_bound_holds_and_none_starves(
    size: int, staleness: int, slots: int, seed: int, lags: bool
) -> None:
    """1,000 requests are completed in random order, at most `slots` of them under way at once."""
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
        if not lags or rng.random() < 0.5 or ledger.starves(synced):
            synced = done
