"""The audit of a reward model by name, and of the one that the reward stage has just saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.audit.audit import Audit, audit
from heedful.audit.cases import LANGUAGES
from heedful.errors import DataError, ModelError
from heedful.pipeline.fits import why_unfit
from heedful.pipeline.scorer import kind_of, open_scorer
from heedful.records import Prompt, Ranking, RewardCard
from heedful.runs.files import write_json
from heedful.runs.progress import tell

if TYPE_CHECKING:
    from heedful.rollout.cache import ScoreCache

SECONDS_BETWEEN_LINES = 5.0


def audit_model(
    model: str,
    data: str | None = None,
    *,
    on_bad_row: str = "error",
    max_prompts: int = 64,
    languages: Sequence[str] = LANGUAGES,
    seed: int = 0,
    update_card: bool = False,
    cache: ScoreCache | None = None,
    say: Callable[[str], None] = tell,
    **options: Any,
) -> Audit:
    """Audit a reward model's folder, a server or a Python function.

    Args:
        model, cache, options: as :func:`open_scorer` takes them.
        data: a file of rankings or pairs that the model was not trained on; None takes the shipped texts.
        max_prompts, languages, seed: as :func:`heedful.audit.audit.audit` takes them.
        update_card: write the probes into the reward card of the folder, which the gate of PPO reads.

    Raises:
        ConfigError, ModelError, EngineError: as :func:`open_scorer` and its scorer; no folder or card to update.
        DataError: the file cannot be used, or has fewer than eight usable rankings.
    """
    from heedful.data.load import load_rankings
    from heedful.data.shipped import data_path

    folder = _card_folder(model, data) if update_card else None
    rankings = load_rankings(data_path(data), on_bad_row=on_bad_row) if data else None
    scorer = open_scorer(model, cache=cache, finite=False, say=say, **options)
    found = audit(
        scorer, rankings, model=model, max_prompts=max_prompts, languages=languages, seed=seed,
        ask_again=cache is None or kind_of(model) != "folder", fits=_fits(model), on_scored=_progress(say),
    )  # fmt: skip
    if folder is not None:
        add_to_card(folder, found)
    return found


def audit_saved(path: Path, heldout: Sequence[Ranking], *, seed: int, hardware: dict[str, Any]) -> RewardCard:
    """Audit the reward model that a stage has saved, on its held-out rankings or, where they are too few, on the
    shipped texts; the card in the folder holds what was found."""
    tell("audit: probing the reward model")
    scorer = open_scorer(
        str(path), device=str(hardware["device"]), dtype=str(hardware["dtype"]).removeprefix("torch."),
        attention=hardware["attention"], finite=False,
    )  # fmt: skip
    options: dict[str, Any] = {"seed": seed, "fits": _fits(str(path)), "on_scored": _progress(tell)}
    try:
        found = audit(scorer, heldout, **options)
    except DataError as error:
        tell(f"audit: {error}; it goes on with those")
        found = audit(scorer, **options)
    for line in sentences(found):
        tell(f"audit: {line}")
    return add_to_card(path, found)


def sentences(found: Audit) -> list[str]:
    """The verdict, and one sentence for every probe that failed."""
    warned = sum(p.verdict == "warn" for p in found.probes)
    failed = len(found.failures)
    summary = f"{found.verdict}: {failed} of {len(found.probes)} probes failed, {warned} warned"
    return [summary, *(f"{p.name}: {p.says}" for p in found.failures)]


def add_to_card(path: Path, found: Audit) -> RewardCard:
    """Write the probes into the card of a reward model's folder, or the audit's own card where there is none."""
    from heedful.models.export import CARD_FILE, load_reward_card
    from heedful.pipeline.model_card import write_model_card

    card = load_reward_card(path) or found.card
    assert card is not None
    card = replace(card, probes=found.probes, audit_verdict=found.verdict)
    write_json(path / CARD_FILE, card.to_json())
    write_model_card(path)
    return card


def _card_folder(model: str, data: str | None) -> Path:
    """The folder whose card is to be updated."""
    from heedful.models.export import load_reward_card
    from heedful.models.load import resolve

    if kind_of(model) != "folder":
        raise ModelError(f"{model}: only a reward model's folder has a card to update")
    path = resolve(model)
    if load_reward_card(path) is None and data is None:
        raise ModelError(f"{path} has no reward card to update; give --data, so that one can be written")
    return path


def _fits(model: str) -> Callable[[Prompt, str], bool] | None:
    """Whether a folder's model can read a text."""
    why = why_unfit(model)
    return None if why is None else lambda prompt, answer: why(prompt, answer) is None


def _progress(say: Callable[[str], None]) -> Callable[[int, int], None]:
    """Says every few seconds how far the scoring is."""
    last = time.monotonic()

    def on_scored(num_scored: int, num_asked: int) -> None:
        nonlocal last
        if time.monotonic() - last > SECONDS_BETWEEN_LINES and num_scored < num_asked:
            last = time.monotonic()
            say(f"audit: {num_scored:,} of {num_asked:,} texts scored")

    return on_scored
