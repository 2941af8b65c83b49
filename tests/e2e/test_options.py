"""CLI-03: every key of a recipe does something. Each is changed alone, and something else than the recipe must change.

A new key without a row in the table fails ``test_every_key_is_in_the_table``.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from outcome import TIMINGS

from heedful import pipeline
from heedful.config.read import dotted_keys, load_recipe
from heedful.config.recipe import Recipe
from heedful.config.section import LoraConfig
from heedful.errors import HeedfulError
from heedful.models.parts import Part
from heedful.rollout.hf import HFEngine
from heedful.train import checkpoint
from toy_parts import CPU, model_folder

LORA: dict[str, Any] = {"rank": 4}

OPTIMIZER = {
    "learning_rate": 0.002, "schedule": "cosine", "warmup_fraction": 0.9, "weight_decay": 0.5, "beta1": 0.5,
    "beta2": 0.5, "epsilon": 0.01, "max_gradient_norm": 0.001,
}  # fmt: skip
LORA_KEYS = {"rank": 2, "alpha": 4.0, "targets": "q_proj", "base": "nf4"}
CHECKPOINT = {"every_steps": 2, "keep": 2}

FUNCTION = {"ppo.rewards": {"own": {"model": "run:reward"}, "part": {"function": "toy_parts:length"}}}
HEADS = {"ppo.rewards": {"own": {"model": "run:reward"}, "part": {"model": "{heads}"}}}
REWARD_KEYS = {
    "model": ("{other_reward}", {"ppo.rewards": {"part": {"model": "run:reward"}}}), "head": (1, HEADS),
    "function": ("toy_parts:brevity", FUNCTION), "weight": (-0.5, FUNCTION), "scaling": ("batch", FUNCTION),
}  # fmt: skip

GUARD: dict[str, Any] = {"window_steps": 1, "score_rise": 0.001, "kl_rise_nats": 0.001}
GUARDED = {"seed": 3, "ppo.steps": 6, "ppo.kl.guard": GUARD}  # in this run score and KL climb together, twice
GUARD_KEYS = {"window_steps": 2, "score_rise": 100.0, "kl_rise_nats": 100.0, "factor": 2.0, "limit": 1.2}
OUTLIERS = {"threshold": 0.1, "slope": 0.1}
OUTLIER_KEYS = {"threshold": 0.5, "slope": 0.9, "max_weight": 1.01}
PTX = {"prompts_per_step": 2}
PTX_KEYS = {"coefficient": 5.0, "data": "{data}/more.jsonl", "prompts_per_step": 3, "max_tokens": 50}
BEST = {"every_steps": 1, "num_prompts": 2}
GOLD = {"gold": "heedful.evaluate.panel:utility", "max_prompts": 2, "max_new_tokens": 2}

# stage: {key: changed value}; a pair (changed value, {other keys of both runs}) where the key needs company
TABLE: dict[str, dict[str, Any]] = {
    "sft": {
        "seed": 1, "model.name": "{other}", "model.device": "cuda:99", "model.dtype": "bfloat16",
        "model.attention": "sdpa", "data.demonstrations": "{data}/more.jsonl", "data.heldout_fraction": 0.6,
        "data.on_bad_row": ("skip", {"data.demonstrations": "{data}/bad.jsonl"}),
        "sft.epochs": 1.0, "sft.prompts_per_step": 2, "sft.micro_batch_tokens": 64, "sft.max_tokens": 50,
        "sft.too_long": "cut", "sft.packing": True, "sft.train_on": "last", "sft.lora": LORA,
        **{f"sft.optimizer.{key}": value for key, value in OPTIMIZER.items()},
        **{f"sft.lora.{key}": (value, {"sft.lora": LORA}) for key, value in LORA_KEYS.items()},
        **{f"sft.checkpoint.{key}": value for key, value in CHECKPOINT.items()},
    },
    "reward": {
        "model.policy": "{other}", "data.rankings": "{data}/more-rankings.jsonl", "data.max_prompt_tokens": 45,
        "data.heldout_rankings": "{data}/more-rankings.jsonl",
        "reward.epochs": 1.0, "reward.prompts_per_step": 2, "reward.micro_batch_tokens": 64, "reward.max_tokens": 50,
        "reward.label_smoothing": 0.2, "reward.evaluate_every_steps": 1, "reward.lora": LORA,
        **{f"reward.optimizer.{key}": value for key, value in OPTIMIZER.items()},
        **{f"reward.lora.{key}": (value, {"reward.lora": LORA}) for key, value in LORA_KEYS.items()},
        **{f"reward.checkpoint.{key}": value for key, value in CHECKPOINT.items()},
        "reward.labels": ("scores", {"data.rankings": "{data}/judged.jsonl"}),
        "reward.ties": ("half", {"data.rankings": "{data}/judged.jsonl"}), "reward.margin": 0.5,
        "reward.weigh": ("pairs", {"data.rankings": "{data}/judged.jsonl"}),
        "reward.form": "every_token", "reward.zero_centre": 0.5, "reward.length_penalty": 1.0,
        "reward.length_target": (0.5, {"reward.length_penalty": 1.0}),
        "reward.length_head": True, "reward.length_offset": 0.5, "reward.correct_length": True,
        "reward.max_spread": 0.01, "reward.baits_per_ranking": 1, "reward.train": "head",
        "reward.keep": ("best", {"reward.evaluate_every_steps": 1, "reward.epochs": 6}),
        "reward.learning_curve": [0.5], "reward.audit": True, "reward.attributes": {"helpful": 1.0, "short": -0.5},
        "reward.ensemble": 2,
    },
    "ppo": {
        "model.reward": "{other_reward}", "data.prompts": "{data}/more-prompts.jsonl", "ppo.steps": 2,
        "ppo.prompts_per_step": 2, "ppo.samples_per_prompt": 2, "ppo.micro_batch_tokens": 64, "ppo.epochs": 1,
        "ppo.minibatches": 1, "ppo.sampling.max_new_tokens": 3, "ppo.sampling.temperature": 0.5,
        "ppo.sampling.answers_together": 3,
        "ppo.kl.coefficient": 0.5, "ppo.kl.target": 2.0, "ppo.kl.horizon": (50, {"ppo.kl.target": 2.0}),
        "ppo.kl.in_reward": "k2", "ppo.gamma": 0.5, "ppo.lam": 0.5, "ppo.clip_low": 0.01, "ppo.clip_high": 0.01,
        "ppo.dual_clip": 1.001, "ppo.value_clip": 0.001, "ppo.value_warmup_steps": 1, "ppo.score_scaling": "none",
        "ppo.score_clip": 0.1, "ppo.whiten_advantages": False, "ppo.missing_end_penalty": 3.0,
        "ppo.bootstrap_truncated": True, "ppo.accept_weak_reward": False, "ppo.lora": LORA, "ppo.sample_rows": 1,
        "ppo.histogram_every_steps": 2,
        "ppo.kl.in_loss": "exact", "ppo.kl.stop_above_nats": 1e-6, "ppo.kl.guard": (GUARD, {"seed": 3, "ppo.steps": 6}),
        "ppo.kl.outliers": OUTLIERS, "ppo.missing_end_score": -1.0, "ppo.overlong_from_tokens": 2,
        "ppo.overlong_penalty": (3.0, {"ppo.overlong_from_tokens": 2}), "ppo.whiten_rewards": True,
        "ppo.value_lam": 0.5, "ppo.skip_ratio_above": 1.0001, "ppo.entropy_coefficient": 0.1,
        "ppo.loss_average": ("sequences", {"ppo.sampling.max_new_tokens": 60}),  # answers of unequal length
        "ppo.ptx": PTX, "ppo.value_from": "policy", "ppo.value_coefficient": (1.0, {"ppo.value_from": "trunk"}),
        "ppo.self_test": False, "ppo.activation_checkpointing": True, "ppo.ema_decay": 0.5, "ppo.best": BEST,
        "ppo.best.by": ("gold", {
            "ppo.best": BEST, "evaluate": GOLD, "data.heldout_prompts": "{data}/more-prompts.jsonl"}),
        **{f"ppo.best.{key}": (value, {"ppo.best": BEST}) for key, value in (("every_steps", 2), ("num_prompts", 1))},
        **{f"ppo.kl.guard.{key}": (value, GUARDED) for key, value in GUARD_KEYS.items()},
        **{f"ppo.kl.outliers.{key}": (value, {"ppo.kl.outliers": OUTLIERS}) for key, value in OUTLIER_KEYS.items()},
        **{f"ppo.ptx.{key}": (value, {"ppo.ptx": PTX}) for key, value in PTX_KEYS.items()},
        **{f"ppo.optimizer.{key}": value for key, value in OPTIMIZER.items()},
        **{f"ppo.value_optimizer.{key}": value for key, value in OPTIMIZER.items()},
        **{f"ppo.lora.{key}": (value, {"ppo.lora": LORA}) for key, value in LORA_KEYS.items()},
        # 4 bits move the scores of this reward model too far, which is refused where it shares the value's base
        "ppo.lora.base": ("nf4", {"ppo.lora": LORA, "ppo.value_from": "policy"}),
        **{f"ppo.checkpoint.{key}": value for key, value in CHECKPOINT.items()},
        **{f"ppo.rewards.<name>.{key}": value for key, value in REWARD_KEYS.items()},
        "ppo.disagreement_penalty": (3.0, {"model.reward": "{ensemble}"}),
        "ppo.roles": ("shared", {"model.reward": "{adapter}", "ppo.lora": LORA}),
        "ppo.frozen_weights": "int8",
    },
    "evaluate": {
        "data.heldout_prompts": "{data}/more-prompts.jsonl", "evaluate.max_prompts": 3, "evaluate.max_new_tokens": 3,
        "evaluate.temperature": 0.0, "evaluate.gold": "heedful.evaluate.panel:utility", "evaluate.batch_size": 2,
    },
}  # fmt: skip
ELSEWHERE = {
    **{f"ppo.rewards.<name>.{key}": "test_sources: a server" for key in ("url", "timeout_seconds", "retries")},
    "name": "test_whole_run: the folder", "output": "test_whole_run: the folder",
    "reward.min_accuracy": "test_the_gate_reads_min_accuracy",
    "ppo.offload_frozen": "test_models_offload: equal numbers",
    **{f"{section}.offload": "test_adam_offload: equal weights"
       for section in ("sft.optimizer", "reward.optimizer", "ppo.optimizer", "ppo.value_optimizer")},
    "reward.share_prompts": "test_models_packed_rankings: equal scores and gradients, so nothing else may change",
}  # fmt: skip
CASES = [(stage, key) for stage, keys in TABLE.items() for key in keys]


OPTIONAL = (".lora", ".guard", ".outliers", ".ptx", ".best")
"""Sections that are left out unless written: writing them is a change of its own."""


def test_every_key_is_in_the_table():
    sections = {key.rsplit(".", 1)[0] for key in dotted_keys(Recipe) if "." in key}
    expected = {key for key in dotted_keys(Recipe) if key not in sections or key.endswith(OPTIONAL)}
    assert {key for _, key in CASES} | ELSEWHERE.keys() == expected


def write(path: Path, rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class World:
    """Data, models and the runs made from them; a run that is asked for twice is made once."""

    def __init__(self, folder: Path, model: Path) -> None:
        from heedful.models.export import save_reward
        from heedful.models.heads import new_heads
        from heedful.models.roles import build_scalar
        from heedful.records import RewardCard
        self._folder, self._made, self._numbers = folder, {}, itertools.count()
        self._places = {"model": model, "other": model_folder(folder / "other", seed=3), "data": folder,
                        "heads": model_folder(folder / "heads", scalar=2)}  # fmt: skip
        for name, seed, lora in (("reward", 0, None), ("other_reward", 9, None), ("adapter", 0, LoraConfig(**LORA))):
            part = build_scalar(model, lora=lora, device=CPU, dtype=torch.float32, new_head=True, seed=seed)
            card = RewardCard(name, 0.5, 0.4, 0.6, 10, 10, score_mean=0.3, score_std=2.0)
            save_reward(part.model, part.tokenizer, folder / name, score_mean=0.3, score_std=2.0, card=card)
            self._places[name] = folder / name
        heads = new_heads("ensemble", {"member_1": 0.5, "member_2": 0.5}, 32, seed=1, device=CPU)
        heads.means, heads.deviations = (0.0, 0.1), (1.0, 2.0)
        part.set_head(heads.row())
        numbers = {"score_mean": 0.3, "score_std": 2.0, "card": card, "heads": heads}
        save_reward(part.model, part.tokenizer, folder / "ensemble", **numbers)
        self._places["ensemble"] = folder / "ensemble"
        self._write_data()

    def _write_data(self) -> None:
        def turns(*texts):
            return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]

        talks = [turns(f"Say {n}", f"It is {n}") for n in range(8)]
        talks += [turns("Hi", "Hello", "And now", "Bye"), turns("Long", "long " * 25)]
        write(self._folder / "demonstrations.jsonl", ({"messages": t} for t in talks))
        write(self._folder / "more.jsonl", ({"messages": t} for t in talks[::-1] + [turns("New", "One")]))
        write(self._folder / "bad.jsonl", [*({"messages": t} for t in talks), {"messages": turns("Only", "")}])
        rankings = [
            {"id": f"r{n}", "prompt": f"Rank {n} " + "really " * (n % 4), "answers": [
                {"text": f"good {n}", "score": 3}, {"text": "fair", "score": 2}, {"text": "bad " * 4, "score": 1}],
             "ratings": {"helpful": [3, 3, 1], "short": [2, None, 1]}}
            for n in range(12)
        ]  # fmt: skip
        write(self._folder / "rankings.jsonl", rankings)
        judged = [(0.9, 0.6, 0.6) if n % 2 else (0.8, 0.5, 0.1) for n in range(len(rankings))]
        write(self._folder / "judged.jsonl", (
            {**ranking, "answers": [{**a, "score": s} for a, s in zip(ranking["answers"], scores, strict=True)]}
            for ranking, scores in zip(rankings, judged, strict=True)))  # fmt: skip
        write(self._folder / "more-rankings.jsonl", [{**r, "id": r["id"] + "x"} for r in rankings[6:]])
        write(self._folder / "prompts.jsonl", ({"prompt": f"Ask {n}"} for n in range(6)))
        write(self._folder / "more-prompts.jsonl", ({"prompt": f"Tell me {n}"} for n in range(6)))

    def recipe(self, stage: str, **changes: Any) -> Recipe:
        """The recipe of one stage with ``changes`` (dotted keys), by the same road as the command line."""
        ppo_only = {"model.reward": "{reward}"} if stage == "ppo" else {}
        values = {
            "name": f"run{next(self._numbers)}", "output": f"{self._folder}/runs", "model.name": "{model}",
            "model.dtype": "float32", "model.device": "cpu", "data.demonstrations": "{data}/demonstrations.jsonl",
            "data.rankings": "{data}/rankings.jsonl", "data.prompts": "{data}/prompts.jsonl",
            "data.heldout_prompts": "{data}/prompts.jsonl", **ppo_only, **STAGES[stage], **changes,
        }  # fmt: skip
        overrides = []
        for key, value in values.items():
            text = value if isinstance(value, str) else json.dumps(value)
            for place, path in self._places.items():
                text = text.replace("{" + place + "}", str(path))
            overrides += [f"--{key}", text]
        file = self._folder / "empty.yaml"
        file.write_text(f"data: {{demonstrations: x, rankings: x}}\n{'reward' if stage == 'reward' else 'sft'}: {{}}\n")
        return load_recipe(file, overrides)

    def observe(self, stage: str, **changes: Any) -> tuple[Recipe | None, dict[str, Any]]:
        """The resolved recipe of a run and all that can be seen of it; an error is what is seen then."""
        key = json.dumps([stage, changes], sort_keys=True)
        if key not in self._made:
            self._made[key] = self._run(stage, changes)
        return self._made[key]

    def _run(self, stage: str, changes: dict[str, Any]) -> tuple[Recipe | None, dict[str, Any]]:
        recipe = self.recipe(stage, **changes)
        seen: dict[str, Any] = {"forwards": [], "decoded": [], "checkpoints": []}
        with pytest.MonkeyPatch.context() as patch:
            spy(patch, seen)
            try:
                pipeline.run(recipe)
            except HeedfulError as error:
                return recipe, {"error": str(error)}
        for folder in (Path(recipe.output) / recipe.name / "stages").iterdir():
            for name in ("metrics.jsonl", "histograms.jsonl", "samples.jsonl", "evaluation.jsonl"):
                lines = (folder / name).read_text().splitlines() if (folder / name).exists() else []
                seen[f"{folder.name}/{name}"] = [
                    {k: v for k, v in json.loads(line).items() if k not in TIMINGS} for line in lines
                ]
            results = json.loads((folder / "finished.json").read_text())["results"]
            echoes = "seconds|memory|before$|after$|^temperature$|^min_accuracy$|^steps$"  # clocks, paths, the recipe
            seen[f"{folder.name}/results"] = {k: v for k, v in results.items() if not re.search(echoes, k)}
            seen[f"{folder.name}/files"] = sorted(p.name for p in folder.glob("model/*"))
        return recipe, seen


RATE = {"learning_rate": 0.02, "schedule": "constant", "warmup_fraction": 0.0}
STAGES: dict[str, dict[str, Any]] = {
    "sft": {"sft": {"epochs": 2, "prompts_per_step": 6, "max_tokens": 100, "optimizer": RATE,
                    "checkpoint": {"every_steps": 1}}},
    "reward": {"sft": None, "model.policy": "{model}", "reward": {
        "epochs": 2, "prompts_per_step": 6, "max_tokens": 100, "optimizer": RATE, "checkpoint": {"every_steps": 1}}},
    "ppo": {"sft": None, "model.policy": "{model}", "ppo": {
        "steps": 3, "prompts_per_step": 4, "epochs": 2, "minibatches": 2, "sampling": {"max_new_tokens": 5},
        "accept_weak_reward": True, "optimizer": RATE, "value_optimizer": RATE, "checkpoint": {"every_steps": 1}}},
    "evaluate": {"sft": {"epochs": 1, "prompts_per_step": 16, "optimizer": RATE},
                 "evaluate": {"max_new_tokens": 5}},
}  # fmt: skip


def spy(patch: pytest.MonkeyPatch, seen: dict[str, Any]) -> None:
    """Note the shape and kernel of every forward, the rows of every decode and the checkpoints after every save."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    trunk, decode, save, layer = Part._trunk, HFEngine._decode, checkpoint.save, LlamaAttention.forward
    seen["layers"] = 0  # counted, since recomputed activations are the same numbers

    def noting_trunk(self, ids_BT, *rest, **options):
        seen["forwards"].append((*ids_BT.shape, self.base.config._attn_implementation))
        return trunk(self, ids_BT, *rest, **options)

    def noting_decode(self, rows, sampling):
        seen["decoded"].append(len(rows))
        return decode(self, rows, sampling)

    def noting_save(folder, step, state, **options):
        saved = save(folder, step, state, **options)
        seen["checkpoints"].append(sorted(p.name for p in folder.iterdir()))
        return saved

    def counting_layer(self, *rest, **options):
        seen["layers"] += 1
        return layer(self, *rest, **options)

    patch.setattr(LlamaAttention, "forward", counting_layer)
    patch.setattr(Part, "_trunk", noting_trunk)
    patch.setattr(HFEngine, "_decode", noting_decode)
    patch.setattr(checkpoint, "save", noting_save)
    patch.setattr("heedful.report.build.write_report", lambda path: path)


@pytest.fixture(scope="module")
def world(tmp_path_factory, toy_model):
    return World(tmp_path_factory.mktemp("options"), toy_model)


@pytest.mark.parametrize("stage, key", CASES)
def test_CLI_03_the_option_does_something(world, stage, key):
    value = TABLE[stage][key]
    value, company = value if isinstance(value, tuple) else (value, {})
    before_recipe, before = world.observe(stage, **company)
    after_recipe, after = world.observe(stage, **{**company, key.replace("<name>", "part"): value})
    assert "error" not in before or key == "data.on_bad_row", before
    names = {"name": "same"}
    assert before_recipe.model_copy(update=names) != after_recipe.model_copy(update=names)
    refused = {"model.device": "cuda:99", "ppo.accept_weak_reward": "accept_weak_reward"}
    if key in refused:
        assert refused[key] in after["error"]
    else:
        assert "error" not in after, after
        assert [name for name in after if after[name] != before.get(name)], f"{key} changed nothing"


def test_the_same_recipe_changes_nothing(world):
    """Else any difference in the table would mean nothing."""
    for stage in TABLE:
        assert world._run(stage, {})[1] == world.observe(stage)[1]


@pytest.mark.parametrize("min_accuracy", [0.0, 1.0])
def test_the_gate_reads_min_accuracy(world, tmp_path, min_accuracy):
    changes = {"output": str(tmp_path), "reward": {"epochs": 0.1, "min_accuracy": min_accuracy},
               "ppo": {"steps": 1, "prompts_per_step": 2, "sampling": {"max_new_tokens": 2}}}  # fmt: skip
    recipe = world.recipe("reward", **changes)
    pipeline.run(recipe, only="reward")
    if min_accuracy == 0:
        pipeline.run(recipe, existing="resume", only="ppo")
    else:
        with pytest.raises(HeedfulError, match="at least 100% is asked.*accept_weak_reward"):
            pipeline.run(recipe, existing="resume", only="ppo")
