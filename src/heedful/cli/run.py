"""``heedful run|quickstart|sft|reward|ppo|evaluate``: recipes become runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

VERBS = {
    "quickstart": "the whole pipeline on SmolLM2-135M and data that ships with heedful, about ten minutes on two cores",
    "run": "every stage of a recipe in order",
    "sft": "only the sft stage of a recipe",
    "reward": "only the reward stage of a recipe (the sft stage must be finished, if the recipe has one)",
    "ppo": "only the ppo stage of a recipe (the stages before it must be finished)",
    "evaluate": "only the evaluate stage of a recipe (the stages before it must be finished)",
}
EPILOG = """Any key of the recipe can be set as --dotted.key VALUE, for example --ppo.steps 50.
`heedful run --list_keys` prints every key with its default and meaning; `--print_config` the resolved recipe.
Results go to OUTPUT/NAME (the recipe's keys `output` and `name`). A run that is there already is continued with
--resume; --new starts another one beside it. Ctrl-C saves a checkpoint after the current step."""


def add_parser(verbs: Any) -> None:
    """Register the verbs."""
    for verb, text in VERBS.items():
        sub = verbs.add_parser(
            verb, help=text, description=text[0].upper() + text[1:] + ".", epilog=EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        )  # fmt: skip
        if verb != "quickstart":
            sub.add_argument("recipe", nargs="?", help="a YAML file, or the name of a recipe that ships with heedful")
        sub.add_argument("--resume", action="store_true", help="go on with the run that is there")
        sub.add_argument("--new", action="store_true", help="start a new run in a numbered folder beside it")
        sub.add_argument("--accept_weak_reward", action="store_true", help="let PPO start below the reward gate")
        sub.add_argument("--print_config", action="store_true", help="print the resolved recipe and stop")
        sub.add_argument("--list_keys", action="store_true", help="print every recipe key with its meaning and stop")
        sub.set_defaults(handler=handle, overrides=[])


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
    stage = arguments.verb if arguments.verb in ("sft", "reward", "ppo", "evaluate") else None
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
