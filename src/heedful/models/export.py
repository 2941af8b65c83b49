"""Model folders that other tools load as they are: a policy for plain transformers, a reward model as a classifier."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from heedful.errors import ModelError
from heedful.models.folders import atomic_folder, quiet, remove_leftovers
from heedful.models.frozen import is_quantised
from heedful.models.heads import HEADS_FILE, Heads
from heedful.models.load import load_causal, scalar_head
from heedful.models.lora import base_of, is_adapted, merged_state, num_merged
from heedful.models.parts import ScalarModel
from heedful.models.portable import ending_at_the_score, for_transformers_4
from heedful.models.tokens import agree, end_ids
from heedful.models.verify import SELF_TEST, TOLERANCE, self_test
from heedful.models.verify import verify_reward as verify_reward
from heedful.records import RewardCard

CARD_FILE = "reward_card.json"
"""The reward card in a reward model's folder."""


def save_policy(
    model: Any,
    tokenizer: Any,
    path: Path | str,
    *,
    dtype: torch.dtype | None = None,
    extra: Mapping[str, Any] | None = None,
    base: Path | str | None = None,
) -> int:
    """Write a language model's folder, adapters merged (and kept apart in ``adapter/``); returns the merged tensors.

    Args:
        dtype: of the saved weights; None keeps them, or float32 for merged ones: bfloat16 would swallow small updates.
        extra: more files, name → JSON content.
        base: the folder that a base in few bits was made from, to merge the adapters into the weights there; None
            merges them into the rounded weights, which they were trained on.

    Raises:
        ModelError: nothing to merge, another ``base``, or weights and tokenizer that do not fit each other.
    """
    plain = _plain_model(model, dtype=dtype, base=base)
    return _save(model, plain, tokenizer, Path(path), {**(extra or {})}, {})


def save_reward(
    model: Any,
    tokenizer: Any,
    path: Path | str,
    *,
    score_mean: float,
    score_std: float,
    card: RewardCard | None = None,
    heads: Heads | None = None,
    dtype: torch.dtype | None = None,
) -> int:
    """Write a reward model's folder, one for ``AutoModelForSequenceClassification``, vLLM, OpenRLHF and RewardBench.

    One label, ``problem_type`` regression (so that no pipeline applies a sigmoid), a pad id that is no end token, chat
    template in the folder; ``reward_norm.json`` holds mean, deviation and quantiles of the scores (the config mean and
    deviation), ``reward_selftest.json`` twenty texts with the scores of the weights as they are saved
    (see :func:`verify_reward`).

    Args:
        score_mean, score_std: over held-out answers, in raw score units.
        card: kept in ``reward_card.json``; its quantiles go into ``reward_norm.json``.
        heads: what the one output was made of, kept in ``heads.json``.

    Returns:
        the number of tensors that adapters were merged into.

    Raises:
        ModelError: a head with other than one output, a pad token that ends turns, or merged weights that score
            otherwise than the live model does.
    """
    scalar_head(base_of(model))
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in end_ids(tokenizer, base_of(model)):
        raise ModelError("the pad token ends turns too, so other tools would score one token early; see ensure_pad")
    quantiles = card.score_quantiles if card is not None else {}
    plain = _plain_model(model, dtype=dtype)
    extra: dict[str, Any] = {
        "reward_norm.json": {"mean": score_mean, "std": score_std, "quantiles": quantiles},
        SELF_TEST: _self_test(model, plain, tokenizer, heads),
    }
    if heads is not None:
        extra[HEADS_FILE] = heads.to_json()
    if card is not None:
        extra[CARD_FILE] = card.to_json()
    settings = {"problem_type": "regression", "num_labels": 1, "mean": score_mean, "std": score_std}
    return _save(model, plain, ending_at_the_score(tokenizer), Path(path), extra, settings)


def _self_test(model: Any, plain: Any, tokenizer: Any, heads: Heads | None) -> dict[str, Any]:
    """The self-test of the weights that are saved; merged ones must score as the live model does with its adapters.

    Where that computes in 16 bits, as nearly as the merged weights do when they are computed in 16 bits.
    """

    def scored(which: Any, dtype: torch.dtype) -> dict[str, Any]:
        part = ScalarModel(which, tokenizer, next(which.parameters()).device, dtype)
        part.heads = heads and replace(heads, weight_HD=heads.weight_HD.detach().to(part.device))
        return self_test(part)

    def gap(a: dict[str, Any], b: dict[str, Any]) -> float:
        return max(abs(x["score"] - y["score"]) for x, y in zip(a["pairs"], b["pairs"], strict=True))

    saved_dtype, live_dtype = (next(x.base_model.parameters()).dtype for x in (plain, base_of(model)))
    saved = scored(plain, saved_dtype)
    if is_adapted(model) and saved["pairs"]:
        largest = max(1.0, *(abs(pair["score"]) for pair in saved["pairs"]))
        allowed = TOLERANCE * largest + 4 * gap(saved, scored(plain, live_dtype))
        found = gap(saved, scored(model, live_dtype))
        if not found <= allowed:
            raise ModelError(
                f"the merged weights score up to {found:.3g} away from the model with its adapters, where its "
                f"arithmetic explains {allowed:.3g}; nothing was saved"
            )
    return saved


def load_reward_card(path: Path | str) -> RewardCard | None:
    """The card that :func:`save_reward` left in a reward model's folder; None where there is none.

    Raises:
        ModelError: the file is there but is no card.
    """
    file = Path(path) / CARD_FILE
    if not file.exists():
        return None
    try:
        return RewardCard.from_json(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ModelError(f"{file} is not a reward card ({error}); train the reward model again or remove it") from None


def _save(
    model: Any, plain: Any, tokenizer: Any, path: Path, extra: Mapping[str, Any], settings: Mapping[str, Any]
) -> int:
    for name, value in settings.items():
        setattr(plain.config, name, value)
    agree(tokenizer, plain)
    remove_leftovers(path)  # of a save that was killed; a run folder has one writer
    with atomic_folder(path, replace=True) as folder, quiet():
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for_transformers_4(folder)
        for name, content in extra.items():
            indent = None if name == HEADS_FILE else 2  # not a line for every weight
            text = json.dumps(content, indent=indent, ensure_ascii=False)
            (folder / name).write_text(text + "\n", encoding="utf-8")
        if is_adapted(model):
            # With the tokenizer beside it, PEFT's own loader grows the base to the trained vocabulary.
            model.save_pretrained(
                folder / "adapter", selected_adapters=[model.active_adapter],  # not those of other parts on this base
                save_embedding_layers=_vocabulary_grew(model),
            )  # fmt: skip
            tokenizer.save_pretrained(folder / "adapter")
            for_transformers_4(folder / "adapter")
    return num_merged(model)


def _plain_model(model: Any, *, dtype: torch.dtype | None = None, base: Path | str | None = None) -> Any:
    """A model of the plain class around the merged weights, in main memory; there untouched ones are the live model's.

    Each weight leaves a GPU as soon as it is merged, which needs no room for a second model there.

    Args:
        dtype: of its weights; None keeps them, or float32 for merged ones.
        base: as in :func:`save_policy`.

    Raises:
        ModelError: the merged weights are not exactly those of the plain class.
    """
    live = base_of(model)
    if is_adapted(model) and dtype is None:
        dtype = torch.float32
    merged = merged_state(model, dtype=dtype, originals=_originals(live, base))
    state = {name: tensor.cpu() for name, tensor in merged}
    config = copy.deepcopy(live.config)
    if _trained_apart(live, state):
        config.tie_word_embeddings = False  # else the reloaded model would have the embedding for its head
    with torch.device("meta"):
        plain = type(live)(config)
    try:
        plain.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ModelError(f"{type(live).__name__} cannot be saved: {' '.join(str(error).split())[:300]}") from error
    plain.tie_weights()
    for name, module in plain.named_modules():  # rotary frequencies and the like, which no state dict holds
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = live.get_submodule(name)._buffers[key].cpu()
    if getattr(live, "generation_config", None) is not None:
        plain.generation_config = copy.deepcopy(live.generation_config)
    return plain.eval()


def _originals(live: Any, base: Path | str | None) -> dict[str, torch.Tensor] | None:
    """The float weights that a base in few bits was made from, as they were held then; None without ``base``."""
    if base is None or not is_quantised(live):
        return None
    held = live.get_input_embeddings().weight.dtype
    originals: dict[str, torch.Tensor] = load_causal(base, dtype=held, device=torch.device("cpu")).state_dict()
    return originals


def _trained_apart(base: Any, state: dict[str, torch.Tensor]) -> bool:
    """The config says that embedding and head are tied, but their weights differ."""
    layers = base.get_input_embeddings(), base.get_output_embeddings()
    if not base.config.tie_word_embeddings or layers[1] is None:
        return False
    names = {id(module): name for name, module in base.named_modules()}
    first, second = (state.get(f"{names[id(layer)]}.weight") for layer in layers)
    return first is not None and second is not None and not torch.equal(first, second)


def _vocabulary_grew(model: Any) -> bool:
    """The live embedding has more rows than the base that the adapter names."""
    source = Path(str(base_of(model).config._name_or_path)) / "config.json"
    try:
        rows = json.loads(source.read_text(encoding="utf-8"))["vocab_size"]
    except (OSError, ValueError, KeyError):
        return False
    return bool(base_of(model).get_input_embeddings().weight.shape[0] > rows)
