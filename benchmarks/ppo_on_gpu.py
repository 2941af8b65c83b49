"""PPO on one GPU at DeepSpeed-Chat's published shape: pairs per second, memory, phases, shares of the ceilings.

    python benchmarks/ppo_on_gpu.py
    python benchmarks/ppo_on_gpu.py --roles shared --batch 128 --heedful '{"activation_checkpointing": true}'
    python benchmarks/ppo_on_gpu.py --heedful '{"offload_frozen": true}'
    python benchmarks/ppo_on_gpu.py --shape tiny --device cpu --batch 4 --prompt_tokens 40 --new_tokens 8

The policy has OPT-1.3B's dimensions; reward and value have OPT-350M's in `separate`, the reward alone in `trunk` (the
value is a head on the policy), and in `shared` both are adapters on the policy's base. Weights are random, made here
and kept in a temporary folder (4 GB) while it runs; nothing is downloaded, and no time depends on what weights are. A
pair is a prompt of --prompt_tokens and an answer of --new_tokens, which no end token shortens. DeepSpeed-Chat published
3.1 pairs per second for these models and 256 + 256 tokens on one A100 with 80 GB.

Seconds are medians over the updates after the warm-up. The ceilings are measured first: a large matrix product in the
compute precision, and a copy. Scoring and training count the multiplications that they need, without attention and
without what is computed again to save memory. Decoding counts them too, and at every step the bytes of the weights and
of all keys and values; its bound is the longer of the two, step by step. Peak memory is of all tensors, loading
included; on a CPU it is the whole process's. The plan is that of `heedful plan`, for this machine as it was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sides
import torch
from ceilings import (
    Weights,
    bound_seconds,
    bytes_per_second,
    kept_forwards,
    matrix_operations_per_second,
    training_operations,
    trunk_weights,
)

import heedful
from heedful.config.ppo import PPOConfig
from heedful.config.recipe import DataConfig, ModelConfig, Recipe
from heedful.data.chat import prompt_ids
from heedful.errors import HeedfulError
from heedful.models import hardware
from heedful.models.folders import quiet
from heedful.models.load import load_tokenizer
from heedful.models.roles import Roles, build_roles
from heedful.models.value import TrunkHead
from heedful.pipeline.memory import PeakMeter, compared
from heedful.plan.machine import Machine, this_machine
from heedful.plan.memory import plan_memory
from heedful.plan.parts import Setup
from heedful.plan.shape import read_shape
from heedful.plan.time import plan_time
from heedful.plan.workload import Workload, of_ppo
from heedful.records import Message, Prompt

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "opt-1.3b": (
        {"vocab_size": 50272, "hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
         "max_position_embeddings": 2048, "word_embed_proj_dim": 2048},
        {"vocab_size": 50272, "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
         "max_position_embeddings": 2048, "word_embed_proj_dim": 512, "do_layer_norm_before": False},
    ),
    "tiny": (
        {"vocab_size": 160, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
         "max_position_embeddings": 128, "word_embed_proj_dim": 32},
        {"vocab_size": 160, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "max_position_embeddings": 128, "word_embed_proj_dim": 8, "do_layer_norm_before": False},
    ),
}  # fmt: skip
"""Policy and reward, as their authors' config.json has them."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIRST_IDEOGRAPH = 0x20000
"""Of a range with more characters than a vocabulary has tokens."""
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLANNED = {"rollout": ("rollout",), "scoring": ("score",), "training": ("train policy", "train value")}
"""A phase and what the plan calls it."""


def tokenizer_of(size: int) -> Any:
    """One character per token, so that the text of any answer is read as the tokens that it was sampled as."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = ["\n", *map(chr, range(32, 127))]
    rest = [chr(FIRST_IDEOGRAPH + n) for n in range(size - len(SPECIAL) - len(letters))]
    words = [*SPECIAL, *letters, *rest]
    core = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[2], additional_special_tokens=list(SPECIAL),
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_models(folder: Path, shape: str, device: torch.device) -> tuple[Path, Path]:
    """The folders of a policy and of a reward model with random weights in bfloat16."""
    import transformers

    torch.manual_seed(0)
    tokenizer = tokenizer_of(SHAPES[shape][0]["vocab_size"])
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    of_policy, of_reward = (transformers.OPTConfig(**dimensions, **ends) for dimensions in SHAPES[shape])
    of_reward.num_labels, of_reward.problem_type = 1, "regression"
    for name, kind, config in (
        ("policy", transformers.OPTForCausalLM, of_policy),
        ("reward", transformers.OPTForSequenceClassification, of_reward),
    ):
        with torch.device(device), quiet():
            model = kind._from_config(config, dtype=torch.bfloat16)
            model.save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
        del model
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return folder / "policy", folder / "reward"


def make_prompts(tokenizer: Any, num: int, num_tokens: int, seed: int) -> list[tuple[Prompt, list[int]]]:
    """Random prompts of that many tokens, the template's included."""
    draw = random.Random(seed)
    room = num_tokens - len(prompt_ids(tokenizer, [Message("user", "?")])) + 1
    if room < 1:
        raise SystemExit(f"--prompt_tokens {num_tokens} leaves no room for a question; {num_tokens - room + 1} would")
    ideographs = [chr(FIRST_IDEOGRAPH + n) for n in range(len(tokenizer) - len(SPECIAL) - 96)]
    messages = [(Message("user", "".join(draw.choices(ideographs, k=room))),) for _ in range(num)]
    prompts = [(Prompt(f"p{n}", said), prompt_ids(tokenizer, said)) for n, said in enumerate(messages)]
    assert all(len(ids) == num_tokens for _, ids in prompts)
    return prompts


def measured_machine(device: torch.device, speeds: Mapping[str, float]) -> Machine:
    """The machine of the plan, as fast as it was measured."""
    if device.type != "cuda":
        return dataclasses.replace(this_machine("cpu"), **speeds, source="measured")
    found = torch.cuda.get_device_properties(device)
    return Machine(found.name, "cuda", found.total_memory, **speeds, source="measured")


def setup_of(
    asked: argparse.Namespace, config: PPOConfig, policy: Path, reward: Path, dtype: torch.dtype, machine: Machine
) -> Setup:
    """What the plan is made from."""
    recipe = Recipe(
        model=ModelConfig(policy=str(policy), reward=str(reward), dtype=str(dtype).removeprefix("torch.")),  # type: ignore[arg-type]
        data=DataConfig(prompts="made here", max_prompt_tokens=asked.prompt_tokens), ppo=config,
    )  # fmt: skip
    work = Workload(ppo=of_ppo(config, asked.prompt_tokens), prompt_tokens=asked.prompt_tokens)
    return Setup(recipe, read_shape(policy), read_shape(reward), machine, work)


def needed_operations(asked: argparse.Namespace, config: PPOConfig, roles: Roles) -> dict[str, float]:
    """Multiplications and additions of scoring and training, attention left out."""
    policy, part = Weights.of(roles.policy), roles.value.part
    value = Weights(0 if isinstance(part, TrunkHead) else trunk_weights(part.base), 0, 0)
    assert roles.reward is not None
    row, answers = asked.prompt_tokens + asked.new_tokens - 1, asked.batch
    read, counted = row * answers, asked.new_tokens * answers
    forward = 2 * (policy.trunk * read + policy.head * counted)
    score = 2 * forward + 2 * value.trunk * read  # the reference's too
    score += 2 * trunk_weights(roles.reward.part.base) * (read + 2 * answers)  # whole answers with their ends
    full = config.lora is None
    kept = kept_forwards(config, row)
    train = training_operations(policy, read=read, counted=counted, trunks=1, full=full, kept=kept & {"policy"})
    train += training_operations(value, read=read, counted=0, trunks=1, full=full, kept=kept & {"value"})
    return {"scoring": score, "training": config.epochs * train}


def decoding_bounds(
    asked: argparse.Namespace, roles: Roles, setup: Setup, speeds: Mapping[str, float]
) -> dict[str, float]:
    """:func:`ceilings.bound_seconds` of all answers, as many at a time as the engine decodes together."""
    cache = 2 * setup.base.layers * setup.base.kv_width * roles.policy.dtype.itemsize
    total: dict[str, float] = {}
    assert setup.recipe.ppo is not None
    together = setup.recipe.ppo.sampling.answers_together
    for start in range(0, asked.batch, together):
        rows = min(together, asked.batch - start)
        found = bound_seconds(
            [asked.prompt_tokens] * rows, [asked.new_tokens] * rows, Weights.of(roles.policy), speeds, cache_bytes=cache
        )
        total = {name: total.get(name, 0.0) + seconds for name, seconds in found.items()}
    return total


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything that is measured, with the plan beside it."""
    device = hardware.device(asked.device)
    dtype = hardware.compute_dtype(device)
    speeds = {
        "flops": matrix_operations_per_second(dtype, device), "bytes_per_second": bytes_per_second(device)
    }  # fmt: skip
    machine = measured_machine(device, speeds)
    say(f"{machine.name}, {str(dtype).removeprefix('torch.')}: matrix product {speeds['flops'] / 1e12:.2f} TFLOP/s, "
        f"copy {speeds['bytes_per_second'] / 1e9:.0f} GB/s; torch {torch.__version__}")  # fmt: skip
    policy, reward = make_models(folder, asked.shape, device)
    if asked.roles == "shared":
        reward = policy
    config = PPOConfig(**{
        "roles": asked.roles, "steps": asked.warm_up + asked.updates, "prompts_per_step": asked.batch,
        "sampling": {"max_new_tokens": asked.new_tokens}, "micro_batch_tokens": asked.micro_batch_tokens,
        "checkpoint": {"every_steps": 10**9}, **json.loads(asked.heedful),
    })  # fmt: skip
    setup = setup_of(asked, config, policy, reward, dtype, machine)
    plan, time = plan_memory(setup)[0], plan_time(setup)[0]
    say(f"planned peak {plan.peak_bytes / 2**30:.1f} GiB in {plan.largest.name}, of {machine.memory_bytes / 2**30:.1f}")
    hardware.seed_everything(asked.seed)
    meter = PeakMeter(device)
    roles = build_roles(
        policy, reward, policy_lora=config.lora, value_lora=config.lora, value_from=config.value_from, device=device,
        dtype=dtype, new_reward_head=asked.roles == "shared", sharing=config.roles,
        activation_checkpointing=config.activation_checkpointing, offload_frozen=config.offload_frozen,
    )  # fmt: skip
    roles.offload.restore()  # weights are counted
    needed, bounds = needed_operations(asked, config, roles), decoding_bounds(asked, roles, setup, speeds)
    prompts = make_prompts(load_tokenizer(policy), asked.batch * config.steps, asked.prompt_tokens, asked.seed)
    clock, log = sides.train_ppo(roles, config, prompts, folder / "run", end_id=None, seed=asked.seed)
    lengths = set(log.column("ppo/answer_tokens_mean")[1])
    if lengths != {float(asked.new_tokens)}:
        raise SystemExit(f"answers have {sorted(lengths)} tokens on the mean, not {asked.new_tokens}")
    phases = {phase: log.column(f"ppo/{name}")[1] for name, phase in sides.PHASES.items()}
    return {
        "version": heedful.__version__, "torch": torch.__version__, "device": machine.name, "dtype": str(dtype),
        **{name: x for name, x in vars(asked).items() if name != "out"}, **speeds, **clock.per_update(),
        "phases": phases, "needed_operations": needed, "bound_seconds": bounds, "memory": compared(meter, plan),
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
        "planned_phases": {phase.name: phase.total_bytes for phase in plan.phases},
        "planned_seconds": {
            phase: sum(work.seconds for work in time.phases if work.phase in names) for phase, names in PLANNED.items()
        },
    }  # fmt: skip


def say(line: str) -> None:
    """At once, in a run that takes minutes."""
    print(line, flush=True)


def table(found: Mapping[str, Any]) -> str:
    """The figures of a run, medians over the updates after the warm-up."""

    def middle(seconds: Sequence[float]) -> float:
        return statistics.median(seconds[found["warm_up"] :])

    def share(part: float, whole: float) -> str:
        return f"{part / whole:.1%}"

    phases, memory = {phase: middle(seconds) for phase, seconds in found["phases"].items()}, found["memory"]
    seconds, planned = middle(found["seconds"]), found["planned_seconds"]
    rows = {
        "pairs per second": f"{found['batch'] / seconds:.3f}",
        "seconds per update": f"{seconds:.3f}",
        **{f"of which {phase}": f"{x:.3f} (planned {planned[phase]:.3f})" for phase, x in phases.items()},
        "answer tokens per second of rollout": f"{found['batch'] * found['new_tokens'] / phases['rollout']:.0f}",
        "rollout's share of the copy": share(found["bound_seconds"]["bandwidth"], phases["rollout"]),
        "rollout's share of the matrix product": share(found["bound_seconds"]["matrix"], phases["rollout"]),
        "rollout's share of its bound": share(found["bound_seconds"]["step by step"], phases["rollout"]),
        **{
            f"{phase}'s share of the matrix product": share(operations, phases[phase] * found["flops"])
            for phase, operations in found["needed_operations"].items()
        },
        "peak memory": f"{memory['measured_bytes'] / 2**30:.2f} GiB",
        "planned peak": f"{memory['planned_bytes'] / 2**30:.2f} GiB in {memory['phase']}",
        "planned / measured": f"{memory['planned_bytes'] / memory['measured_bytes']:.3f}",
    }  # fmt: skip
    if found["reserved_bytes"] is not None:
        rows["peak of what torch reserved"] = f"{found['reserved_bytes'] / 2**30:.2f} GiB"
    return sides.table([list(rows), list(rows.values())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="opt-1.3b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--roles", choices=("separate", "shared", "trunk"), default="separate")
    parser.add_argument("--batch", type=int, default=64, help="pairs per update")
    parser.add_argument("--prompt_tokens", type=int, default=256, help="with the chat template's")
    parser.add_argument("--new_tokens", type=int, default=256, help="of every answer")
    parser.add_argument("--updates", type=int, default=5, help="that count")
    parser.add_argument("--warm_up", type=int, default=2, help="updates before those")
    parser.add_argument("--micro_batch_tokens", type=int, default=8192, help="per forward in scoring and training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heedful", default="{}", metavar="JSON", help="more keys of the recipe's ppo section")
    parser.add_argument("--out", type=Path, help="a file for all figures, as JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = measure(asked, Path(folder))
        except HeedfulError as error:
            raise SystemExit(str(error)) from None
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
