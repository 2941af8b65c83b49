"""The sft stage: demonstrations → policy."""

from __future__ import annotations

from typing import Any

from heedful.pipeline.context import Context
from heedful.records import Prompt
from heedful.runs.folder import StageFolder
from heedful.runs.progress import tell


def run_sft(context: Context, stage: StageFolder) -> dict[str, Any]:
    from heedful.data import tokenise
    from heedful.data.load import load_demonstrations
    from heedful.data.splits import split
    from heedful.models.export import save_policy
    from heedful.models.load import load_tokenizer
    from heedful.models.quantise import Rounding
    from heedful.models.roles import build_policy
    from heedful.train.sft import train_sft

    recipe, config = context.recipe, context.recipe.sft
    assert config is not None and recipe.data.demonstrations is not None
    records = context.read(load_demonstrations, recipe.data.demonstrations)
    train, heldout = split(records, recipe.data.heldout_fraction / 2, seed=recipe.seed)
    tokenizer = load_tokenizer(context.base)
    limits: dict[str, Any] = {"max_tokens": config.max_tokens, "too_long": config.too_long, "train_on": config.train_on}
    samples = tokenise.demonstrations(train, tokenizer, **limits)
    heldout_samples = tokenise.demonstrations(heldout, tokenizer, **limits).samples if heldout else []
    tell(f"SFT data: {samples.summary()}; {len(heldout_samples)} held out")
    texts = [(Prompt(sample.id, ()), sample.ids) for sample in samples.samples]
    rounding = Rounding(texts)
    policy = build_policy(context.base, lora=config.lora, rounding=rounding, **context.hardware())
    context.tell_moments("sft.optimizer", config.optimizer)
    results = train_sft(policy, samples.samples, heldout_samples, config, stage, seed=recipe.seed)
    save_policy(policy.model, policy.tokenizer, stage.model)
    results |= {"rounding": rounding.found} if rounding.found else {}
    return {**results, "num_dropped": samples.dropped, "num_truncated": samples.num_truncated}
