"""What a reward model likes that it should not: probes on any scorer, each with an interval and a verdict.

No model is known here: a probe sees a function from (prompts, answers) to numbers.
"""
