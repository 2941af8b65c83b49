"""``heedful annotate simulate``: a crowd of simulated raters works on a project through its web app."""

from __future__ import annotations

import argparse

from heedful.cli.numbers import SEEDS, shares, whole

ABOUT = "let simulated raters work on a project, through its app"
UTILITY = "heedful.evaluate.panel:utility"


def add_options(parser: argparse._ActionsContainer) -> None:
    """What a crowd is."""
    parser.add_argument(
        "--raters", type=shares, default={"honest": 5.0}, metavar="PROFILE=N,…",
        help="honest, noisy, length_lover, position_lover, spammer or drifter, as in honest=8,spammer=1 "
        "(default honest=5)",
    )  # fmt: skip
    parser.add_argument(
        "--utility", default=UTILITY, metavar="MODULE:FUNCTION",
        help=f"how good an answer truly is, as (prompt, answer, finished) (default {UTILITY})",
    )  # fmt: skip
    parser.add_argument(
        "--known", metavar="FILE", help="prompts with what people know of them besides their text (category, info)"
    )
    parser.add_argument("--limit", type=whole(1), metavar="N", help="rankings by one rater (default: all there are)")
    parser.add_argument("--url", help="where the project is served (default: it is served meanwhile)")
    parser.add_argument("--seed", type=whole(*SEEDS), default=0, metavar="N", help="another seed, other opinions")


def run(arguments: argparse.Namespace) -> None:
    """``heedful annotate simulate``."""
    for line in work(arguments, arguments.project):
        print(line)


def work(arguments: argparse.Namespace, project: str) -> list[str]:
    """Let the crowd of the options work on a project; a line for each rater."""
    from heedful.annotate.simulate.crowd import simulate
    from heedful.annotate.simulate.raters import utility_of
    from heedful.data.load import load_prompts
    from heedful.data.shipped import data_path
    from heedful.evaluate.gold import load_scorer

    utility = utility_of(
        load_scorer(arguments.utility), load_prompts(data_path(arguments.known)) if arguments.known else ()
    )
    done = simulate(
        project, arguments.raters, utility, url=arguments.url, limit=arguments.limit, seed=arguments.seed
    )
    return [f"{one.name}: {len(one.acknowledged):,} rankings" for one in done]
