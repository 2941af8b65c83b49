"""What the rounds of a folder have in common, as its rounds.yaml says it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from heedful.config.read import read_yaml, wrong_key
from heedful.config.section import Fraction, NonNegative, Positive, Section
from heedful.errors import ConfigError

FILE = "rounds.yaml"


class RoundsConfig(Section):
    """Rounds of: sample, let people rank, train the reward model anew, PPO. Paths as in recipes."""

    recipe: str
    """File or shipped recipe with a reward and a ppo section; its sft section and its rankings are not used."""
    policy: str
    """The first policy: folder, hub id or alias."""
    prompts: str
    """The pool that every round takes new prompts from."""
    num_prompts: Positive
    """Asked in each round; none is asked in two."""
    guideline: str
    """Markdown file with the criteria, put in force when the project is made."""
    rankings: str | None = None
    """Rankings from before, trained on in every round."""
    project: str | None = None
    """Folder of the annotation project; None = `project` beside this file, made in the first round."""
    num_answers: Annotated[int, Field(ge=2, le=9)] = 4
    temperatures: tuple[NonNegative, ...] = (1.0,)
    max_new_tokens: Positive = 256
    older_share: Annotated[float, Field(ge=0, lt=1)] = 0.15
    """Part of the answers that the policy before the newest gives, from round 2 on."""
    quotas: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Category → share; {} = as the prompts are."""
    bait_rate: Fraction = 0.0
    gold: str | None = None
    """File of control items."""
    gold_rate: Annotated[float, Field(ge=0, lt=1)] = 0.09
    start_from: Literal["first", "newest"] = "first"
    """Where reward model and PPO start in every round: the first policy (KL and scores then mean the same in all
    rounds), or the newest."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0


def load_rounds(folder: Path) -> RoundsConfig:
    """The rounds.yaml of a folder.

    Raises:
        ConfigError: it is missing, is no YAML, or has a wrong key.
    """
    path = folder / FILE
    if not path.is_file():
        needed = ", ".join(name for name, field in RoundsConfig.model_fields.items() if field.is_required())
        raise ConfigError(f"{folder}: {FILE} is missing; write one with the keys {needed} (see docs/15c)")
    content = read_yaml(path, "must be a mapping of keys such as recipe and prompts")
    try:
        return RoundsConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{path}: {wrong_key(error, RoundsConfig)}") from None
