from __future__ import annotations

import json

import pytest

from heedful.data.stream import EpochStream, fingerprint
from heedful.errors import CheckpointError, DataError


def take(stream: EpochStream, num_batches: int) -> list[int]:
    return [index for _ in range(num_batches) for index in next(stream)]


def test_RES_01_resume_inside_an_epoch_that_is_no_whole_number_of_batches():
    straight = EpochStream(10, 4, seed=7)
    assert straight.num_steps(3) == 8
    whole = take(straight, 8)
    first = EpochStream(10, 4, seed=7)
    head = take(first, 3)
    state = json.loads(json.dumps(first.state_dict()))
    assert (state["epoch"], state["offset"]) == (1, 2)
    second = EpochStream(10, 4, seed=7)
    second.load_state_dict(state)
    assert head + take(second, 5) == whole
    assert [sorted(whole[e * 10 : e * 10 + 10]) for e in range(3)] == [list(range(10))] * 3


def test_RES_02_checkpoint_at_an_epoch_border_skips_nothing():
    stream = EpochStream(8, 4, seed=1)
    assert stream.num_steps(3) == 6
    seen = take(stream, 2)
    state = stream.state_dict()
    assert (state["epoch"], state["offset"]) == (1, 0)
    resumed = EpochStream(8, 4, seed=1)
    resumed.load_state_dict(state)
    seen += take(resumed, 4)
    assert all(seen.count(index) == 3 for index in range(8))
    assert seen == take(EpochStream(8, 4, seed=1), 6)


def test_RES_06_resume_on_other_data_is_refused_and_moves_nothing():
    rows_a, rows_b = [f"row {i}" for i in range(8)], [f"other {i}" for i in range(8)]
    saved = EpochStream(8, 3, seed=1, fingerprint=fingerprint(rows_a))
    take(saved, 2)
    for other in (
        EpochStream(4, 3, seed=1, fingerprint=fingerprint(rows_b[:4])),
        EpochStream(8, 3, seed=1, fingerprint=fingerprint(rows_b)),
        EpochStream(8, 3, seed=2, fingerprint=fingerprint(rows_a)),
        EpochStream(8, 3, seed=1, shuffle=False, fingerprint=fingerprint(rows_a)),
    ):
        with pytest.raises(CheckpointError, match="the checkpoint's data order has .* resume with the data"):
            other.load_state_dict(saved.state_dict())
        assert (other.epoch, other.offset) == (0, 0)
    with pytest.raises(CheckpointError, match="no such place"):
        saved.load_state_dict({**saved.state_dict(), "offset": 9})


def test_fingerprint_sees_content_and_order():
    assert fingerprint(["a", "b"]) != fingerprint(["b", "a"])
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"])
    assert fingerprint([[1, 2]]) == fingerprint([[1, 2]])
    assert len(fingerprint(["\ud800"])) == 16


def test_epochs_are_different_permutations_and_seeds_matter():
    ids = take(EpochStream(50, 50, seed=0), 2)
    assert sorted(ids[:50]) == sorted(ids[50:]) == list(range(50))
    assert ids[:50] != ids[50:] != list(range(50))
    assert take(EpochStream(50, 50, seed=1), 1) != ids[:50]
    assert take(EpochStream(50, 7, seed=0), 14) == ids[:98], "the order does not depend on the batch size"


def test_without_shuffle_the_order_is_that_of_the_file_and_small_data_wraps():
    assert list(zip(range(3), EpochStream(3, 7, seed=0, shuffle=False))) == [
        (0, [0, 1, 2, 0, 1, 2, 0]),
        (1, [1, 2, 0, 1, 2, 0, 1]),
        (2, [2, 0, 1, 2, 0, 1, 2]),
    ]


def test_batch_size_may_change_on_resume():
    stream = EpochStream(10, 4, seed=3)
    head = take(stream, 2)
    resumed = EpochStream(10, 6, seed=3)
    resumed.load_state_dict(stream.state_dict())
    assert head + take(resumed, 2) == take(EpochStream(10, 20, seed=3), 1)


@pytest.mark.parametrize(
    "rows, size, epochs, steps", [(10, 4, 3, 8), (8, 4, 3, 6), (8, 4, 0.5, 1), (100, 1, 0.07, 7), (7, 3, 1, 3)]
)
def test_num_steps(rows, size, epochs, steps):
    assert EpochStream(rows, size, seed=0).num_steps(epochs) == steps


def test_empty_data_is_an_error():
    with pytest.raises(DataError, match="0 rows in batches of 4"):
        EpochStream(0, 4, seed=0)
