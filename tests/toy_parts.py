"""Random tiny models as parts, and prompts for them; for tests that need a policy in memory and no run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from heedful.batches import TokenBatch
from heedful.config.section import LoraConfig
from heedful.models.parts import LanguageModel
from heedful.models.roles import Roles, build_policy, build_roles, build_scalar
from heedful.records import Message, Prompt
from heedful.rollout.engine import Request

CPU = torch.device("cpu")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IDS = torch.tensor([[7, 30, 41, 8, 99, 12], [5, 6, 7, 8, 9, 10]])
BATCH = TokenBatch(
    IDS[:, :-1], IDS[:, 1:], torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 5, dtype=torch.int64),
    torch.arange(5).expand(2, 5),
)  # fmt: skip
WORDS = ["a", "I", "up", "red", "two words", "a rather long question"]


def toy_tokenizer(shift: int = 0) -> Any:
    """One token per byte, ChatML, and the classic trap: pad = eos. ``shift`` gives every byte another id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*special, *alphabet[shift:], *alphabet[:shift]]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>", additional_special_tokens=special
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def model_folder(path: Path, *, kind: str = "Llama", seed: int = 0, scalar: int = 0, shift: int = 0) -> Path:
    """A random model of two layers with dropout 0.1 in its config; weights are large, so that answers differ.

    ``scalar`` is the number of outputs of a score head, 0 for a language model.
    ``shift`` moves the ids of the tokenizer, so that two folders disagree on what an id means.
    """
    import transformers

    tokenizer = toy_tokenizer(shift)
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id, "initializer_range": 0.2,
    }  # fmt: skip
    if kind == "Llama":
        options |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                    "num_key_value_heads": 1, "max_position_embeddings": 256, "attention_dropout": 0.1}  # fmt: skip
    else:
        options |= {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256, "resid_pdrop": 0.1, "embd_pdrop": 0.1,
                    "attn_pdrop": 0.1}  # fmt: skip
    if scalar:
        options |= {"num_labels": int(scalar), "problem_type": "regression"}
    name = "ForSequenceClassification" if scalar else {"GPT2": "LMHeadModel"}.get(kind, "ForCausalLM")
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**options)
    getattr(transformers, kind + name)(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def policy(path: Path, *, dtype: torch.dtype = torch.float32, lora: LoraConfig | None = None) -> LanguageModel:
    """A policy part; adapters get a random update, so that they do something."""
    torch.manual_seed(4)  # new adapters
    part = build_policy(path, lora=lora, device=CPU, dtype=dtype)
    if lora is not None:
        disturb(part)
    return part


def disturb(part: Any, scale: float = 0.1, seed: int = 5) -> None:
    """Move every trained weight a little, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in part.trainable_parameters().values():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def roles(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    lora: LoraConfig | None = None,
    kind: str = "Llama",
    **norm: Any,
) -> Roles:
    """The four parts of PPO, from random folders."""
    policy_path, reward_path = folder / f"{kind}-policy", folder / f"{kind}-reward"
    if not policy_path.exists():
        model_folder(policy_path, kind=kind)
        model_folder(reward_path, kind=kind, seed=1, scalar=True)
    torch.manual_seed(4)  # new adapters
    return build_roles(policy_path, reward_path, policy_lora=lora, value_lora=lora, device=CPU, dtype=dtype, **norm)


def scalar(path: Path, **options: Any) -> Any:
    """A reward model part with a new head on a language model's folder."""
    return build_scalar(path, lora=None, device=CPU, dtype=torch.float32, new_head=True, **options)


def prompts(tokenizer: Any, texts: Sequence[str] = WORDS) -> list[tuple[Prompt, list[int]]]:
    """Encoded prompts of different lengths."""
    from heedful.data.chat import prompt_ids

    records = [Prompt(f"p{i}", (Message("user", text),)) for i, text in enumerate(texts)]
    return [(record, prompt_ids(tokenizer, record.messages)) for record in records]


def requests(tokenizer: Any, texts: Sequence[str] = WORDS) -> list[Request]:
    """One request per prompt."""
    return [Request(prompt.id, 0, ids) for prompt, ids in prompts(tokenizer, texts)]


def length(prompts: list[Prompt], answers: list[str]) -> list[float]:
    """A reward function."""
    return [float(len(answer)) for answer in answers]


def brevity(prompts: list[Prompt], answers: list[str]) -> list[float]:
    """A reward function with the opposite wish."""
    return [-float(len(answer)) for answer in answers]
