"""``heedful plan RECIPE``: will it fit, how long will it take, and what to change if it does not."""

from __future__ import annotations

import argparse
import json
from typing import Any

GIB = 2**30
DESCRIPTION = """Say before a run how much memory, time and disk every stage of RECIPE takes, by
arithmetic: no model is loaded. The lengths are those of the recipe's data where
they are on this machine, its limits otherwise. Every run compares this plan with
the memory that it measures."""
EPILOG = """Every key of the recipe is an option too: --ppo.lora.rank 16.

Exit code 0: every stage fits. 2: one does not, or RECIPE cannot be used."""
GROUPS = {
    "weights": ("parameters", "averaged and best weights", "best weights", "merged copy", "float weights", "file"),
    "gradients": ("gradients", "embedding gradient"),
    "optimizer": ("optimizer",),
    "activations": ("activations", "working memory", "casts of weights", "holes in the heap"),
    "logits": ("logits and output layer", "prefill and sampling"),
    "cache": ("key-value cache",),
    "libraries": ("libraries",),
}
"""Columns of the table → the ends of the parts' names."""


def add_parser(verbs: Any) -> None:
    """Register the verb."""
    sub = verbs.add_parser(
        "plan", help="memory, time and disk of a recipe, before it runs", description=DESCRIPTION, epilog=EPILOG,
        usage="heedful plan RECIPE [--gpu NAME] [--gpus N] [--shape NAME] [--measure] [--json] [--dotted.key VALUE]",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    sub.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a recipe that ships with heedful")
    sub.add_argument("--gpu", metavar="NAME", help="plan for this GPU, such as a100-80g, instead of this machine")
    sub.add_argument("--gpus", metavar="N", type=int, default=1, help="so many of them (default 1)")
    sub.add_argument("--shape", metavar="NAME", help="plan for a published model, such as 7b, in place of the recipe's")
    sub.add_argument("--measure", action="store_true", help="first measure how fast this machine multiplies and reads")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Plan and print."""
    from heedful.config.read import load_recipe
    from heedful.errors import ConfigError
    from heedful.pipeline.plan import setup_of, to_json
    from heedful.plan.machine import gpu

    if arguments.gpus < 1 or (arguments.gpus > 1 and not arguments.gpu):
        raise ConfigError(f"--gpus {arguments.gpus} says how many of the GPU that --gpu names: 1 or more, with --gpu")
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.measure:
        from heedful.pipeline.measure import measure_machine

        measure_machine()
    machine = gpu(arguments.gpu, arguments.gpus) if arguments.gpu else None
    found = to_json(setup_of(recipe, machine, shape=arguments.shape))
    print(json.dumps(found, indent=2, ensure_ascii=False) if arguments.json else as_text(recipe.name, found))
    return 2 if any(stage["verdict"] == "does not fit" for stage in found["stages"]) else 0


def as_text(name: str, found: dict[str, Any]) -> str:
    """The plan as a table for people."""
    machine, shape = found["machine"], found["model"]
    count = f"{machine['num']} × " if machine["num"] > 1 else ""
    lines = [
        f"{name} on {count}{machine['name']}, {machine['usable_bytes'] / GIB:.1f} GiB usable; {found['precision']}",
        f"model {shape['name']}: {shape['num_parameters'] / 1e6:.0f} M parameters, {shape['layers']} layers; lengths: "
        f"{found['lengths']}",
        "",
        f"{'GiB':<24}" + "".join(f"{group:>12}" for group in GROUPS) + f"{'total':>9}",
    ]
    for stage in found["stages"]:
        for phase in stage["phases"]:
            label = f"{stage['stage']}: {phase['name']}"
            mark = " ←" if phase["name"] == stage["peak_phase"] else ""
            lines.append(f"{label:<24}" + "".join(f"{_cell(phase['parts'], g):>12}" for g in GROUPS)
                         + f"{phase['total_bytes'] / GIB:>9.2f}{mark}")  # fmt: skip
    lines.append("")
    for stage in found["stages"]:
        lines += _says(stage)
    lines += ["", f"disk: up to {found['disk_bytes'] / GIB:.1f} GiB (models, and the checkpoints of one stage)"]
    return "\n".join(lines)


def _cell(parts: dict[str, int], group: str) -> str:
    size = sum(n for name, n in parts.items() if name.rpartition(": ")[2] in GROUPS[group])
    return f"{size / GIB:.2f}" if size else "·"


def _says(stage: dict[str, Any]) -> list[str]:
    from heedful.runs.progress import duration

    time = stage.get("time")
    took = ""
    if time:
        parts = ", ".join(f"{phase['phase']} {_seconds(phase['seconds'])}" for phase in time["phases"])
        total = f"; {time['steps']} steps: about {duration(time['total_seconds'])}" if time["total_seconds"] else ""
        took = f"; a step about {_seconds(time['step_seconds'])} ({parts}){total}"
    lines = [f"{stage['stage']}: peak {stage['peak_bytes'] / GIB:.2f} GiB, {stage['verdict']}{took}"]
    if stage["main_memory_bytes"]:
        beside = stage["main_memory_bytes"] / GIB
        lines.append(f"  main memory beside it: {beside:.1f} GiB (what waits there, and a model that is saved)")
    if stage["verdict"] != "fits":
        remedy = stage["remedy"]
        if remedy is None:
            lines.append("  no switch of heedful makes it fit")
        elif remedy["switches"]:
            lines.append(f"  fits with {' '.join(remedy['switches'])} ({remedy['peak_bytes'] / GIB:.1f} GiB)")
        more = "; ".join(f"{name} {peak / GIB:.1f} GiB" for name, peak in stage["not_in_heedful_yet"].items())
        if more:
            lines.append(f"  not in heedful yet: {more}")
    return lines


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
