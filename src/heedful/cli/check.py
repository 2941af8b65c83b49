"""``heedful check RECIPE``: prove the set-up of a recipe before anything long starts."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heedful.train.selftest import Proof

DESCRIPTION = """Run the self-test of RECIPE's ppo stage by itself, on its own model, data and
rewards: does the longest batch fit, do sampler and trainer agree, is the reward
read at the right token, and so on. PPO runs it at its start, too. Where a stage
before PPO has not run yet, the base model stands in. Nothing is written."""
EPILOG = """Every key of the recipe is an option too: --ppo.micro_batch_tokens 2048.

Exit code 0: every proof holds. 2: one does not, or RECIPE cannot be used."""


def add_parser(verbs: Any) -> None:
    """Register the verb."""
    sub = verbs.add_parser(
        "check", help="prove the set-up of a recipe before anything long starts", description=DESCRIPTION,
        epilog=EPILOG, usage="heedful check RECIPE [--json] [--dotted.key VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    sub.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a recipe that ships with heedful")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Run the proofs and print each as soon as it is done."""
    from heedful.config.read import load_recipe
    from heedful.pipeline.check import check

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    found = check(recipe, on_proof=None if arguments.json else lambda proof: print(as_text(proof), flush=True))
    failed = sum(not proof.passed for proof in found.proofs)
    if arguments.json:
        content = {"passed": found.passed, **dataclasses.asdict(found)}
        print(json.dumps(content, indent=2, ensure_ascii=False))
        return 0 if found.passed else 2
    for part, model in found.stand_ins.items():
        print(f"The {part} is not trained yet; {model} stood in for it.")
    seconds = sum(proof.seconds for proof in found.proofs)
    verdict = f"{failed} of {len(found.proofs)} proofs failed" if failed else f"all {len(found.proofs)} proofs hold"
    print(f"{recipe.name}: {verdict} ({seconds:.0f} s)")
    return 2 if failed else 0


def as_text(proof: Proof) -> str:
    """One line of the table; two more for a proof that failed."""
    line = f"{'ok' if proof.passed else 'FAILED':<7}{proof.name:<24}{proof.seconds:>6.1f} s  {proof.measured}"
    if proof.passed:
        return line
    return f"{line}\n{'':<7}it must be: {proof.bound}\n{'':<7}what to do: {proof.advice}"
