"""Every stage in order, each resumable: sft → reward → ppo → evaluate → report.

    from heedful import pipeline
    from heedful.config.read import load_recipe

    report = pipeline.run(load_recipe("quickstart"))

A stage that is finished is never run again; an unfinished one goes on from its newest complete checkpoint. Every stage
loads what it needs from disk, so that a run continued after a kill is the run that was never killed.
"""

from heedful.pipeline.ppo import gate
from heedful.pipeline.stages import results, run

__all__ = ["gate", "results", "run"]
