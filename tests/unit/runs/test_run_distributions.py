import numpy as np
import pytest

from heedful.runs.distributions import NUM_BINS, Histogram, summarise


def test_moments_are_exact_and_every_value_is_counted() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 10_000)
    histogram = summarise(list(values))
    assert histogram is not None
    assert histogram.num_values == 10_000 and len(histogram.counts) == NUM_BINS
    assert len(histogram.edges) == len(histogram.counts) + 1
    assert histogram.mean == pytest.approx(values.mean()) and histogram.std == pytest.approx(values.std())
    assert (histogram.minimum, histogram.maximum) == (values.min(), values.max())


def test_one_far_outlier_does_not_flatten_the_picture() -> None:
    values = [*np.random.default_rng(0).uniform(0.0, 1.0, 1000), 1e9]
    histogram = summarise(values)
    assert histogram is not None and histogram.num_values == 1001
    assert max(histogram.counts) < 40  # with equal bins from 0 to 1e9, one would hold 1000


@pytest.mark.parametrize("values", [[1.0] * 5, [0.0], [1.0] * 1000 + [2.0], [-5.0, 5.0], list(range(3))])
def test_odd_inputs_keep_their_counts(values: list[float]) -> None:
    histogram = summarise(values)
    assert histogram is not None and histogram.num_values == len(values)
    assert histogram.edges == sorted(set(histogram.edges))
    assert Histogram.from_json(histogram.to_json()) == histogram


def test_nothing_finite_gives_none() -> None:
    assert summarise([]) is None
    assert summarise([float("nan"), float("inf")]) is None
