"""What a group holds and what it was given back, against plain dictionaries, over pieces that split and empty."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realtime import held as held_module
from realtime.held import Held, Run
from realtime.offers import Offer, Offers

CHANGES = st.lists(
    st.tuples(st.booleans(), st.integers(0, 60), st.integers(1, 9), st.integers(1, 2)), min_size=1, max_size=60
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_module, "PIECE_RUNS", 3)


@given(CHANGES, st.integers(0, 60), st.integers(1, 20))
def test_held_runs_are_what_a_dictionary_holds(
    changes: list[tuple[bool, int, int, int]], start: int, length: int
) -> None:
    held, model, end = Held(), dict[int, tuple[int, int]](), 0
    for adds, first, count, incarnation in changes:
        if adds:
            held.add(Run(end, end + count, 1000 - end, 1, incarnation))
            model.update({end + at: (1000 - end + at, incarnation) for at in range(count)})
            end += count
        else:
            taken = held.take(first, first + 4 * count, incarnation)
            numbers = {number for run in taken for number in range(run.start, run.end)}
            wanted = {n for n in model if first <= n < first + 4 * count and model[n][1] == incarnation}
            assert numbers == wanted
            for number in wanted:
                del model[number]
        runs = list(held)
        assert runs == sorted(runs) == held.copy() and len(runs) == len(held)
        found = {
            run.start + at: (run.consume_first + at, run.incarnation) for run in runs for at in range(run.messages)
        }
        assert found == model and held.messages == len(model)
        assert held.oldest == min((consume for consume, _ in model.values()), default=None)
    inside = {number for number in model if start <= number < start + length}
    assert held.overlaps(start, start + length) == bool(inside)
    within = held.within(start, start + length)
    assert [number for run in within for number in range(run.start, run.end)] == sorted(inside)


@given(st.integers(20, 200), st.data())
def test_single_messages_of_a_long_run_are_taken_in_any_order(messages: int, data: st.DataObject) -> None:
    held = Held()
    held.add(Run(0, messages, 500, 1, 7))
    left = set(range(messages))
    order = data.draw(st.permutations(range(0, messages, data.draw(st.integers(1, 3)))))
    for number in data.draw(st.sampled_from([order, sorted(order), sorted(order, reverse=True)])):
        assert held.take(number, number + 1, 7) == [Run(number, number + 1, 500 + number, 1, 7)]
        left.discard(number)
        assert held.messages == len(left)
    assert [number for run in held for number in range(run.start, run.end)] == sorted(left)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 6)), max_size=40))
def test_offers_are_what_a_dictionary_holds(changes: list[tuple[bool, int, int]]) -> None:
    offers, model = Offers(), dict[int, int]()
    for gives, first, count in changes:
        numbers = range(first, first + count)
        if gives and not any(number in model for number in numbers):
            offers.append(Offer(first, count, 1 + first % 2))
            model.update(dict.fromkeys(numbers, 1 + first % 2))
        else:
            offers.take(first, first + count)
            for number in numbers:
                model.pop(number, None)
        found = [
            (at, offer.attempt)
            for offer in offers
            for at in range(offer.consume_first, offer.consume_first + offer.count)
        ]
        assert sorted(found) == sorted(model.items()) and offers.messages == len(model)
        assert offers.oldest == min(model, default=None)
