"""Time of a recipe: multiply-adds and bytes of every phase, and the seconds that a machine needs for them.

A phase takes max(operations / (peak · utilisation), bytes / bandwidth). A forward over N tokens in rows of T takes
2·N·(weights of all products) + 4·N·T·A operations a layer; a backward twice that, or once where only adapters are
trained; the output layer 2·V·D per counted token forward, again in the backward, and as often for each gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from heedful.config.recipe import Stage
from heedful.plan.memory import moments_at_home, ppo_models, trained, waiting_models
from heedful.plan.parts import Model, Setup
from heedful.plan.shape import ModelShape
from heedful.plan.workload import StageWork

FORWARD_SHARE = {"cuda": 0.50, "cpu": 0.35}
TRAIN_SHARE = {"cuda": 0.40, "cpu": 0.15}
"""Shares of the peak matrix product that a forward alone, and a forward with its backward, reach. On a CPU as measured
with SmolLM2-135M on two quiet cores; on a GPU assumed, as is usual for models of a billion parameters and more."""
BANDWIDTH_SHARE = 0.6
"""Share of the bandwidth that decoding reaches; assumed."""
SECONDS_PER_LAYER = {"cuda": 0.5e-3, "cpu": 2.5e-3}
"""Of one decoding step beyond arithmetic: PyTorch starts some 30 small operations per layer. CPU: measured with 16 rows
of SmolLM2-135M; GPU: assumed."""

HOST_BYTES_PER_SECOND = 20e9
"""From page-locked main memory to a GPU, or back; assumed (PCIe 4.0 with 16 lanes)."""


@dataclass(frozen=True)
class Work:
    """Operations and bytes of one phase of one step."""

    phase: str
    operations: float
    bytes_moved: float
    seconds: float


@dataclass(frozen=True)
class StageTime:
    """One step of a stage, and all of them."""

    stage: Stage
    phases: tuple[Work, ...]
    steps: int | None

    @property
    def step_seconds(self) -> float:
        """Of one step."""
        return sum(work.seconds for work in self.phases)

    @property
    def total_seconds(self) -> float | None:
        """Of all steps; None where their number is not known."""
        return None if self.steps is None else self.steps * self.step_seconds


def plan_time(setup: Setup) -> list[StageTime]:
    """Every training stage of the recipe."""
    found = []
    for stage in setup.recipe.stages:
        if stage == "sft" and setup.work.sft is not None and setup.recipe.sft is not None:
            config, work = setup.recipe.sft, setup.work.sft
            model = trained(setup, "policy", config.lora, config.optimizer, scalar=False)
            counted = work.tokens_per_step * work.largest.counted_tokens / work.largest.tokens
            phases = (_train(setup, model, work, counted),)
            found.append(StageTime(stage, phases, work.steps))
        elif stage == "reward" and setup.work.reward is not None and setup.recipe.reward is not None:
            of_reward, work = setup.recipe.reward, setup.work.reward
            model = trained(setup, "reward", of_reward.lora, of_reward.optimizer, scalar=True)
            phases = (_train(setup, model, work, 0),)
            found.append(StageTime(stage, phases, work.steps))
        elif stage == "ppo" and setup.work.ppo is not None:
            found.append(_ppo(setup))
    return found


def _ppo(setup: Setup) -> StageTime:
    config, work = setup.recipe.ppo, setup.work.ppo
    assert config is not None and work is not None
    answers, tokens = config.samples_per_step, work.tokens_per_step
    counted, row = answers * config.sampling.max_new_tokens, work.largest.row_tokens
    models = {m.part: m for m in ppo_models(setup)}
    policy, value = models["policy"], models.get("value")
    score = forward(policy.shape, tokens, row) * 2 + output(policy.shape, counted) * 2  # policy and reference
    for model in [m for part, m in models.items() if part == "value" or part.startswith("reward")]:
        score += forward(model.shape, tokens, row)
    if value is not None and config.uses_own_reward and "reward" not in models:
        score += forward(value.shape, tokens, row)  # the reward, on the value's base
    phases = [_rollout(setup, answers, work.tokens_per_step / answers - config.sampling.max_new_tokens + 1)]
    scoring = _work(setup, "score", score, 4 * policy.num_own * setup.s, FORWARD_SHARE)
    coming = 0.0 if setup.machine.kind == "cpu" else (  # while the first compute
        sum(m.held_bytes for m in waiting_models(setup)) / HOST_BYTES_PER_SECOND
    )
    phases.append(replace(scoring, seconds=max(scoring.seconds, coming)))
    trained_models = [policy] if value is None else [policy, value]
    for model in trained_models:
        one = _train(setup, model, work, 0 if model.scalar else counted, updates=config.minibatches)
        phases.append(Work(f"train {model.part}", one.operations * config.epochs, one.bytes_moved * config.epochs,
                           one.seconds * config.epochs))  # fmt: skip
    return StageTime("ppo", tuple(phases), config.steps)


def forward(shape: ModelShape, tokens: float, row_tokens: int) -> float:
    """Operations of the trunk over so many tokens."""
    attention = 4 * tokens * row_tokens * shape.attention_width * shape.layers
    return 2 * tokens * shape.num_linear_weights + attention


def output(shape: ModelShape, counted: float) -> float:
    """Operations of the output layer over so many counted tokens."""
    return 2 * counted * shape.num_embedding


def _train(setup: Setup, model: Model, work: StageWork, counted: float, *, updates: int = 1) -> Work:
    """Forward, backward and the optimizer's pass over its state, for which moments that wait in main memory come and
    go at each update: counted one after the other, since nobody has measured how far the bus serves both at once."""
    full = model.training is not None and model.training.rank is None
    again = 1 if model.training is not None and model.training.recompute else 0
    passes = (3 if full else 2) + again if model.training is not None else 1
    operations = passes * forward(model.shape, work.tokens_per_step, work.largest.row_tokens)
    operations += (4 if full else 3) * output(model.shape, counted)
    moved = model.num_trained * (3 * 4 + 4 * 4) + model.num_own * setup.s * passes
    found = _work(setup, "train", operations, moved, TRAIN_SHARE)
    journeys = updates * 2 * moments_at_home(model, work) / HOST_BYTES_PER_SECOND
    return replace(found, seconds=found.seconds + journeys)


def _rollout(setup: Setup, answers: int, prompt_tokens: float) -> Work:
    """The prompts at once, then one step per token: every weight and all keys and values are read, B rows together."""
    shape, s, config = setup.base, setup.s, setup.recipe.ppo
    assert config is not None
    new, machine = config.sampling.max_new_tokens, setup.machine
    operations = moved = seconds = 0.0
    for start in range(0, answers, config.sampling.answers_together):
        rows = min(config.sampling.answers_together, answers - start)
        prefill = forward(shape, rows * prompt_tokens, round(prompt_tokens))
        length = prompt_tokens + new / 2
        attention = 4 * rows * length * shape.attention_width * shape.layers
        step = 2 * rows * (shape.num_linear_weights + shape.num_embedding) + attention
        read = shape.num_causal * s + 2 * rows * length * shape.kv_width * s * shape.layers
        speed = _speed(setup, FORWARD_SHARE)
        seconds += prefill / speed
        seconds += new * (
            max(step / speed, read / (machine.bytes_per_second * BANDWIDTH_SHARE))
            + shape.layers * SECONDS_PER_LAYER[machine.kind]
        )
        operations += prefill + new * step
        moved += new * read
    return Work("rollout", operations, moved, seconds)


def _work(setup: Setup, phase: str, operations: float, moved: float, share: dict[str, float]) -> Work:
    seconds = max(operations / _speed(setup, share), moved / setup.machine.bytes_per_second)
    return Work(phase, operations, moved, seconds)


def _speed(setup: Setup, share: dict[str, float]) -> float:
    """Operations per second."""
    return setup.machine.num_flops(setup.s) * share[setup.machine.kind]
