import pytest

from heedful.errors import ConfigError
from heedful.runs import metrics


def test_names_are_unique_and_described() -> None:
    for known in (metrics.METRICS, metrics.HISTOGRAMS):
        names = [m.name for m in known]
        assert len(names) == len(set(names))
        for metric in known:
            assert metric.description and metric.direction in ("up", "down", "none")
            assert metric.name.count("/") >= 1


def test_units_in_names_agree_with_the_unit() -> None:
    for metric in (*metrics.METRICS, *metrics.HISTOGRAMS):
        for suffix in ("nats", "bytes", "seconds"):
            if metric.name.endswith(f"_{suffix}"):
                assert metric.unit == suffix, metric.name


def test_pattern_stands_for_one_word() -> None:
    found = metrics.lookup("ppo/score/reward_model")
    assert found is not None and found.name == "ppo/score/<part>"
    assert metrics.lookup("ppo/score/a/b") is None
    assert metrics.lookup("ppo/score/") is None
    assert metrics.lookup("ppo/kl_natsx") is None


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'ppo/kl_nats'"):
        metrics.require("ppo/kl_nat")
    with pytest.raises(ConfigError, match="list of histograms"):
        metrics.require("ppo/kl_nats", metrics.HISTOGRAMS)
