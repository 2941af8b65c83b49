"""The reward card on the page: parts, sentences and the calibration plot; what is missing or hostile does no harm."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import xml.etree.ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from heedful.evaluate.reward_card import ScoredRanking, build_card
from heedful.report import figures
from heedful.report.build import write_report
from heedful.report.card import MAX_BARS, CardView, learning_curve, view


def pairs(num, source="arena", sharpness=3.0):
    """Pairs whose true log odds are 1; the scores say ``sharpness``."""
    rng = np.random.default_rng(0)
    wins = rng.random(num) < 1 / (1 + math.exp(-1))
    return [
        ScoredRanking([sharpness, 0.0], [1, 2] if win else [2, 1], [9 + n % 3, 10], category="chat", source=source)
        for n, win in enumerate(wins)
    ]


@pytest.fixture(scope="module")
def card():
    return build_card([*pairs(200), ScoredRanking([2.0, 1.0], [1, 2], [5, 6], gold=((0, 1),))], train_accuracy=0.99)


def page_of(make_run, card):
    with make_run() as run:
        run.stage("reward", 1).finish({"card": card})
    return write_report(run.path).read_text()


def test_the_page_shows_parts_sentences_and_the_plot(make_run, card):
    page = page_of(make_run, card.to_json())
    section = page.split('<h2 id="reward">')[1].split("<h2")[0]
    assert section.count('<div class="bar">') == len(view(card.to_json()).bars) == 5
    assert "where the shorter is better" in section and "category chat" in section and "source arena" in section
    assert "overconfident by 0.2" in section and "Gold controls: 1 of 1 in the known order" in section
    assert "learned by heart" in section and "the people in" in section
    figure = re.findall(r"<svg.*?</svg>", section, flags=re.DOTALL)
    assert len(figure) == 1 and "#01020" not in figure[0]
    xml.etree.ElementTree.fromstring(figure[0].replace("<svg ", '<svg xmlns:xlink="x" ', 1))


def test_the_plot_puts_every_bin_and_its_interval_where_it_belongs(monkeypatch):
    points = [figures.Point(0.6, 0.3, 0.1, 0.5), figures.Point(0.9, 0.8, 0.7, 0.85)]
    options = {"ident": "r", "x_label": "confidence", "diagonal": True}
    svg = figures.intervals(points, **options)
    assert svg == figures.intervals(points, **options) and svg != figures.intervals(points[:1], **options)
    axes = Figure().add_subplot()
    monkeypatch.setattr(figures, "_render", lambda draw, ident: draw(axes))
    figures.intervals(points, **options)
    (errorbar,) = axes.containers
    line, _, (spans,) = errorbar
    assert line.get_xydata() == pytest.approx(np.array([[0.6, 0.3], [0.9, 0.8]]))
    assert [s[:, 1].tolist() for s in spans.get_segments()] == [pytest.approx([0.1, 0.5]), pytest.approx([0.7, 0.85])]
    assert axes.get_ylim()[0] < 0.1 and axes.lines[-1].get_xydata().tolist() == [[0.5, 0.5], [1.0, 1.0]]


def test_the_learning_curve_is_drawn_where_there_is_one(make_run, card):
    point = {"share": 0.5, "num_rankings": 50, "accuracy": 0.6, "accuracy_low": 0.5, "accuracy_high": 0.7}
    curve = [point, {**point, "num_rankings": 100, "accuracy": 0.65}]
    with make_run() as run:
        run.stage("reward", 1).finish({"card": card.to_json(), "learning_curve": curve})
    page = write_report(run.path).read_text()
    assert "Accuracy by the amount of data" in page and page.count("<svg") == 2
    for none in ([], [point], None, [{"share": 1}], 3):
        assert learning_curve(none) == ""


def test_older_newer_and_broken_cards_show_what_they_have(make_run, card):
    old = {"model": "m", "accuracy": 0.7, "accuracy_low": 0.6, "accuracy_high": 0.8, "num_prompts": 9, "num_pairs": 9,
           "accuracy_by_category": {"chat": 0.5}}  # fmt: skip
    for found in (old, {**card.to_json(), "from_the_future": 1}, None, {}, {"accuracy": 0.7, "calibration": 3}):
        assert view(found) == CardView()
    page = page_of(make_run, old)
    assert "By category" in page and "In parts" not in page


def test_what_a_card_names_is_escaped_and_many_sources_do_not_flood_the_page(make_run):
    rankings = [dataclasses.replace(r, source=f"<b>source {n}") for n, r in enumerate(pairs(60))]
    card = build_card(rankings).to_json()
    page = page_of(make_run, card)
    assert "<b>source" not in page and "&lt;b&gt;source" in page
    assert len(view(card).bars) == MAX_BARS and "more categories and sources are in report.json" in page
    assert json.dumps(card)  # all plain
