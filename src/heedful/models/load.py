"""From a name to a model: hub id, local folder, GGUF file or alias; then tokenizer, language model or scalar model."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from heedful.errors import ModelError
from heedful.models import cache
from heedful.models.folders import check_model_folder, is_model_folder, quiet, read_config
from heedful.models.fused import add_rows_of_tied_embedding
from heedful.models.tokens import ensure_pad as ensure_pad
from heedful.runs.progress import tell

HEAD_NAMES = ("score", "classifier", "classification_head")
FORMS = "a hub id such as owner/model, a local folder, a .gguf file or the alias " + ", ".join(cache.ALIASES)
_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")


def resolve(name: str, *, say: cache.Say = tell) -> Path:
    """The local folder of a model, fetched or converted first where needed.

    Args:
        name: a hub id, a local folder, a .gguf file (or a folder with one), or an alias (``smollm2-135m``).
        say: takes the progress lines.

    Raises:
        ModelError: unknown name, folder without a model, damaged download, no network.
    """
    name = os.fspath(name).strip()
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path}: a file that is not .gguf; give {FORMS}")
        return cache.gguf_folder(path, say=say)
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if files and not (path / "config.json").exists():
            if len(files) > 1:
                raise ModelError(f"{path}: several .gguf files; name one, such as {files[0]}")
            return cache.gguf_folder(files[0], say=say)
        return check_model_folder(path)
    if name.lower() in cache.ALIASES:
        return cache.alias_folder(name.lower(), say=say)
    near = _near(name, path)
    looks_local = path.is_absolute() or name.startswith((".", "~")) or name.endswith(".gguf")
    if looks_local or not _HUB_ID.match(name) or ("/" not in name and near):
        raise ModelError(f"model {name!r} is unknown{near}; give {FORMS}")
    return _hub_folder(name, near)


def _near(name: str, path: Path) -> str:
    """" (did you mean …?)" from aliases, the caches and the neighbours of a path that does not exist."""
    known = {n: n for n in [*cache.ALIASES, *(m.name for m in cache.cached_models())]}
    if path.parent.is_dir():
        known |= {str(p): str(p) for p in path.parent.iterdir() if p.is_dir() or p.suffix == ".gguf"}
    matches = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(matches)}?)" if matches else ""


def _hub_folder(name: str, near: str) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=cache.HUB_PATTERNS, etag_timeout=10))
    except errors.GatedRepoError:
        raise ModelError(f"model {name!r} is gated: accept its licence on the hub, then run hf auth login") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise ModelError(f"model {name!r} is not on the hub{near}; give {FORMS}") from None
    except errors.LocalEntryNotFoundError:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub does not answer"
        raise ModelError(
            f"model {name!r} is neither a local folder nor in the hub cache, and {reason}{near}; give {FORMS}"
        ) from None
    except Exception as error:  # httpx errors and full disks; all of them mean: not here
        raise ModelError(f"model {name!r} could not be downloaded ({' '.join(str(error).split())[:200]})") from error
    if not is_model_folder(folder):
        raise ModelError(f"model {name!r}: the hub repository has no config.json with safetensors weights")
    return folder


def load_tokenizer(path: Path | str) -> Any:
    """The tokenizer of a model folder, with a pad token that differs from every end token (see :func:`ensure_pad`).

    Raises:
        ModelError: no tokenizer in the folder.
    """
    from transformers import AutoTokenizer

    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: no tokenizer can be loaded ({' '.join(str(error).split())[:200]})") from error
    ensure_pad(tokenizer, more_ends=_model_end_ids(Path(path)))
    return tokenizer


def _model_end_ids(path: Path) -> list[int]:
    """End ids in the model's files: the pad must differ from those too, with the model at hand or not."""
    ends: list[int] = []
    for file in (path / "generation_config.json", path / "config.json"):
        if file.is_file():
            config = json.loads(file.read_text(encoding="utf-8"))
            ids = {**config, **(config.get("text_config") or {})}.get("eos_token_id")
            ends += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return ends


def load_causal(path: Path | str, *, dtype: torch.dtype, device: torch.device, attention: str = "auto") -> Any:
    """A language model in eval mode, on the device, with pad and end tokens set and dropout inactive.

    Dropout must not act in reinforcement learning (old and new log-probs would differ), not even in ``train()`` mode,
    which gradient checkpointing needs; the config that is saved keeps its value.

    Args:
        dtype: of the weights: float32 when they are trained (compute goes by autocast).
        attention: transformers' attention kernel. "auto" = eager on CPU, where it is faster for sequences up to some
            256 tokens, and for models with capped attention logits; sdpa elsewhere.

    Raises:
        ModelError: no such folder, no weights for some layer, or an architecture transformers does not know.
    """
    from transformers import AutoModelForCausalLM

    model, missing = _load(AutoModelForCausalLM, path, dtype, device, attention)
    if missing:
        raise ModelError(f"{path}: the weights lack {missing[0]} ({len(missing)} tensors), so the model is not whole")
    ensure_pad(load_tokenizer(path), model)
    add_rows_of_tied_embedding(model)
    return _ready(model, device)


def load_scalar(
    path: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = "auto",
    head: Literal["required", "any", "new"] = "required",
    seed: int = 0,
) -> Any:
    """A scalar model (reward or value): transformers' sequence classifier with one output, in eval mode.

    Args:
        head: "required" loads a trained reward folder; "any" one with any number of outputs; "new" puts a new head on a
            language model's trunk, normal with deviation 1/√(D+1) (Stiennon et al. 2020), so that first scores are of
            order one.
        seed: of the new head.

    Raises:
        ModelError: the folder has no head where one is required, or head="required" and one with several outputs.
    """
    from transformers import AutoModelForSequenceClassification

    outputs = num_outputs(Path(path)) if head != "new" else 1
    if outputs != 1 and head == "required":
        raise ModelError(f"{path}: the score head has {outputs} outputs; a reward model has exactly one")
    options: dict[str, Any] = {"num_labels": outputs}
    if outputs == 1:
        options["problem_type"] = "regression"
    if head == "new":  # a head of another shape that is in the file must not stop the loading of the trunk
        options["ignore_mismatched_sizes"] = True
    model, missing = _load(AutoModelForSequenceClassification, path, dtype, device, attention, **options)
    layer = scalar_head(model, any_outputs=head == "any")
    lost = [name for name in missing if head != "new" or not name.startswith(HEAD_NAMES)]
    if lost:
        raise ModelError(
            f"{path}: the weights lack {lost[0]}, so scores would come from random numbers; train the model again"
        )
    if head == "new":
        draw_head(layer, seed)
    elif dtype != torch.float32:
        read_head(model, path)
    ensure_pad(load_tokenizer(path), model)
    return _ready(model, device)


def saved_tensors(folder: Path) -> dict[str, Callable[[], torch.Tensor]]:
    """The tensors in a folder's safetensors files by name, each read when it is asked for.

    Raises:
        ModelError: a damaged file.
    """
    found: dict[str, Callable[[], torch.Tensor]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            handle = safe_open(str(file), framework="pt")
        except SafetensorError as error:
            raise ModelError(f"{file}: cannot be loaded ({error})") from None
        found |= {name: partial(handle.get_tensor, name) for name in handle.keys()}  # noqa: SIM118
    return found


@torch.no_grad()
def read_head(model: Any, path: Path | str) -> None:
    """Give a scalar model the head of a folder, in float32 whatever the trunk's dtype: rounding it moves every score.

    Raises:
        ModelError: no such head in the folder's files, or one of another shape.
    """
    head, saved = scalar_head(model, any_outputs=True).float(), saved_tensors(Path(path))
    prefix = next(name for name, module in model.named_children() if module is head)
    for name, parameter in head.named_parameters():
        read = saved.get(f"{prefix}.{name}")
        weights = None if read is None else read()
        if weights is None or weights.shape != parameter.shape:
            raise ModelError(f"{path}: the weights lack {prefix}.{name}, so scores would come from random numbers")
        parameter.copy_(weights)


@torch.no_grad()
def draw_head(layer: torch.nn.Linear, seed: int) -> None:
    """A new score head in place: normal with deviation 1/√(D+1), bias 0."""
    generator = torch.Generator().manual_seed(seed)
    layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) / math.sqrt(layer.in_features + 1))
    if layer.bias is not None:
        layer.bias.zero_()


def num_outputs(path: Path) -> int:
    """Outputs of the score head in a reward model's folder.

    Raises:
        ModelError: no such folder, or a model without score head.
    """
    config = read_config(path)
    names = config.get("architectures") or ["unknown"]
    if not names[0].endswith("ForSequenceClassification"):
        raise ModelError(f"{path}: {names[0]} has no score head; train a reward model first (heedful reward)")
    return len(config.get("id2label") or {0: "", 1: ""})  # transformers' default is two


def scalar_head(model: Any, *, any_outputs: bool = False) -> Any:
    """The layer that gives the score: linear, or PEFT's wrapper of the original head and the trained copy.

    Raises:
        ModelError: the architecture has none, or one with several outputs where not ``any_outputs``.
    """
    for name in HEAD_NAMES:
        layer = dict(model.named_children()).get(name)
        linear = layer if layer is None else dict(layer.named_children()).get("original_module", layer)
        if isinstance(linear, torch.nn.Linear) and (any_outputs or linear.out_features == 1):
            return layer
    raise ModelError(f"{type(model).__name__} has no linear score head with one output, so it is not supported")


def _load(
    factory: Any, path: Path | str, dtype: torch.dtype, device: torch.device, attention: str, **options: Any
) -> tuple[Any, list[str]]:
    """The model and the names of tensors that the file did not have (tied ones left out)."""
    config = read_config(Path(path))
    if attention == "auto":
        capped = config.get("attn_logit_softcapping") is not None
        attention = "eager" if device.type == "cpu" or capped else "sdpa"
    try:
        with quiet(), torch.random.fork_rng(devices=[]):  # loading must not move the run's random stream
            model, info = factory.from_pretrained(
                str(path),
                dtype=dtype,
                attn_implementation=attention,
                output_loading_info=True,
                local_files_only=True,
                **options,
            )
    except (OSError, ValueError, ImportError, RuntimeError, KeyError, SafetensorError) as error:
        if "Unrecognized configuration class" in str(error):
            kind = "sequence classifier (reward model)" if "Sequence" in factory.__name__ else "causal language model"
            raise ModelError(f"{path}: transformers has no {kind} for type {config.get('model_type')}") from None
        raise ModelError(f"{path}: cannot be loaded ({' '.join(str(error).split())[:300]})") from error
    mismatched = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
    return model, sorted({*info["missing_keys"], *mismatched})


def _ready(model: Any, device: torch.device) -> Any:
    silence_dropout(model)
    model.eval().to(device)
    if device.type == "cpu":
        # Loaded weights are views of the mapped file, at whatever alignment its header leaves; sums then differ in the
        # last bit between two files of the same weights.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return model


def silence_dropout(model: torch.nn.Module) -> None:
    """Set every dropout rate of the live modules to 0; the config keeps its values."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
