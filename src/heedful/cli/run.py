"""``heedful run|quickstart|sft|reward|ppo|evaluate``: recipes become runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERBS = {
    "quickstart": (
        "the whole pipeline on a small real model; needs nothing of yours",
        """Run the shipped recipe `quickstart`: SFT, reward model, PPO and evaluation of
SmolLM2-135M on data that comes with heedful, about twelve minutes on two cores.
The model (about 90 MB) is fetched once. A run that was cut off goes on by
itself.""",
    ),
    "run": (
        "every stage of a recipe in order, then the report",
        """Run every stage that RECIPE has, in order: sft, reward, ppo, evaluate. Then
write the report.""",
    ),
    "sft": (
        "only supervised fine-tuning: imitate demonstrations",
        "Run only the sft stage of RECIPE: imitate the demonstrations.",
    ),
    "reward": (
        "only the reward model: learn which answers people prefer",
        """Run only the reward stage of RECIPE: learn from rankings which answers people
prefer. The sft stage must be finished, if RECIPE has one.""",
    ),
    "ppo": (
        "only PPO: train the policy against the reward model",
        """Run only the ppo stage of RECIPE: train the policy against the reward model.
The stages before it must be finished.""",
    ),
    "evaluate": (
        "only the evaluation: answers before and after, compared",
        """Run only the evaluate stage of RECIPE: answer held-out prompts with the policy
before and after training and compare. The stages before it must be finished.""",
    ),
}
EPILOG = """Every key of the recipe is an option too: --ppo.steps 50, --seed 1.
`heedful run --list_keys` prints all keys with their defaults and meanings.

The run is the folder OUTPUT/NAME, by default runs/NAME; it is never written
over. Ctrl-C finishes the current step and saves; the same command with
--resume goes on from there."""
SINGLE_EPILOG = """The stages of one recipe share its run folder: a single stage goes on with the
run that is there without --resume."""


TAKE_KEYS = (*VERBS, "check", "plan")
"""Verbs that take every key of the recipe as an option."""
SINGLE_STAGES = ("sft", "reward", "ppo", "evaluate")
OWN_OPTIONS = (
    "resume", "new", "accept_weak_reward", "print_config", "list_keys", "json", "help", "gpu", "gpus", "shape",
    "measure",
)  # fmt: skip


def take_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command line without ``--dotted.key VALUE`` pairs, and those pairs."""
    rest: list[str] = []
    overrides: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("--") or word.removeprefix("--").partition("=")[0] in OWN_OPTIONS:
            rest.append(word)
            continue
        overrides.append(word)
        if "=" not in word:
            overrides += [value for value in [next(remaining, None)] if value is not None]
    return rest, overrides


def add_parser(verbs: Any) -> None:
    """Register the verbs."""
    for verb, (text, description) in VERBS.items():
        takes_recipe, single = verb != "quickstart", verb in SINGLE_STAGES
        sub = verbs.add_parser(
            verb, help=text, description=description, epilog=f"{EPILOG}\n\n{SINGLE_EPILOG}" if single else EPILOG,
            usage=f"heedful {verb} {'RECIPE ' if takes_recipe else ''}[options] [--dotted.key VALUE ...]",
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        )  # fmt: skip
        if takes_recipe:
            recipe_help = "a YAML file, or the name of a recipe that ships with heedful (quickstart)"
            sub.add_argument("recipe", nargs="?", metavar="RECIPE", help=recipe_help)
        sub.add_argument("--resume", action="store_true", help="go on with the run that is there")
        sub.add_argument("--new", action="store_true", help="start another run beside it, named NAME-2, NAME-3, …")
        weak_help = "let PPO start with a reward model below reward.min_accuracy (sets ppo.accept_weak_reward)"
        sub.add_argument("--accept_weak_reward", action="store_true", help=weak_help)
        sub.add_argument("--print_config", action="store_true", help="print the recipe as it would run, and stop")
        sub.add_argument("--list_keys", action="store_true", help="print every recipe key with its meaning, and stop")
        sub.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Read the recipe, then run it, or print what was asked for."""
    from heedful.config import read
    from heedful.errors import ConfigError

    if arguments.list_keys:
        print(read.help_text())
        return 0
    name = "quickstart" if arguments.verb == "quickstart" else arguments.recipe
    if name is None:
        raise ConfigError(f"heedful {arguments.verb} needs a recipe: a YAML file, or a shipped one such as quickstart")
    overrides = list(arguments.overrides)
    if arguments.accept_weak_reward:
        overrides += ["--ppo.accept_weak_reward", "true"]
    recipe = read.load_recipe(name, overrides)
    if arguments.print_config:
        print(read.to_yaml(recipe), end="")
        return 0
    if arguments.resume and arguments.new:
        raise ConfigError("--resume and --new exclude each other")
    stage = arguments.verb if arguments.verb in SINGLE_STAGES else None
    if stage is not None and getattr(recipe, stage) is None:
        raise ConfigError(f"{name} has no {stage} section, so there is nothing to run")
    existing = "new" if arguments.new else "resume" if arguments.resume else "refuse"
    if existing == "refuse" and stage is not None:
        existing = "resume"  # single stages of one recipe share its run folder
    if existing == "refuse" and arguments.verb == "quickstart":
        existing = _quickstart_existing(Path(recipe.output) / recipe.name)
        if existing == "finished":
            return 0
    from heedful import pipeline

    print(pipeline.run(recipe, existing=existing, only=stage))
    return 0


def _quickstart_existing(path: Path) -> str:
    """The quickstart goes on by itself with a run that was cut off; a finished one is shown, never run over."""
    from heedful.runs.folder import RunFolder

    if not (path / "recipe.yaml").exists():
        return "refuse"
    run = RunFolder.open(path)
    if run.status["state"] == "finished":
        print(f"{path} is finished: see {path / 'report.html'}; --new starts another run")
        return "finished"
    print(f"{path} is {run.status['state']}; going on with it (--new starts another run instead)")
    return "resume"
