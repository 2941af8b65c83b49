"""The shape of a model: what its config.json says, and every parameter that follows from it.

Counts are exact (a test holds them against transformers' own models). Families: llama, qwen2, qwen3, mistral, granite,
gemma, gemma2, gemma3, phi3, cohere; gpt2, gpt_neox, phi and opt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.errors import ModelError
from heedful.runs.files import read_json

LLAMA_LIKE = (
    "llama", "qwen2", "qwen3", "mistral", "granite", "gemma", "gemma2", "gemma3_text", "gemma3", "phi3", "cohere",
)  # fmt: skip
FAMILIES = (*LLAMA_LIKE, "gpt2", "gpt_neox", "phi", "opt")


@dataclass(frozen=True)
class Linear:
    """One matrix product of a layer (or beside the layers)."""

    name: str
    """Of the module, as LoRA's targets name it"""
    inputs: int
    outputs: int
    bias: bool = False
    shares_input: bool = False
    """Reads the same tensor as the product before it"""

    @property
    def num_weights(self) -> int:
        """Weights without bias."""
        return self.inputs * self.outputs

    @property
    def num_parameters(self) -> int:
        """Weights and bias."""
        return self.num_weights + (self.outputs if self.bias else 0)


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a decoder."""

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    vocabulary: int
    tied: bool
    max_positions: int
    gated: bool = True
    """The feed-forward block has a gate beside its way up (SwiGLU, GeGLU)"""
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    norms_per_layer: int = 2
    norm_bias: bool = False
    """Layer norm with a bias; otherwise RMS norm (or layer norm) without one"""
    final_norm: bool = True
    qk_norm: bool = False
    position_rows: int = 0
    """Of a learned position embedding; 0 = rotary"""
    embedding_width: int = 0
    """Where the embedding is narrower than the layers and projected (opt-350m); 0 = as wide"""
    head_bias: bool = False
    name: str = ""

    @property
    def attention_width(self) -> int:
        """Numbers per token of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers per token of all key (or value) heads."""
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrix products of one layer, by the names of their modules."""
        D, F, A, kv = self.width, self.ffn_width, self.attention_width, self.kv_width
        b, o, f = self.qkv_bias, self.output_bias, self.ffn_bias
        if self.family == "gpt2":
            return (Linear("c_attn", D, 3 * D, b), Linear("c_proj", A, D, o), Linear("c_fc", D, F, f),
                    Linear("c_proj", F, D, f))  # fmt: skip
        if self.family == "gpt_neox":
            return (Linear("query_key_value", D, 3 * D, b), Linear("dense", A, D, o), Linear("dense_h_to_4h", D, F, f),
                    Linear("dense_4h_to_h", F, D, f))  # fmt: skip
        if self.family == "phi3":
            return (Linear("qkv_proj", D, A + 2 * kv), Linear("o_proj", A, D), Linear("gate_up_proj", D, 2 * F),
                    Linear("down_proj", F, D))  # fmt: skip
        out = {"phi": "dense", "opt": "out_proj"}.get(self.family, "o_proj")
        up, down = {"phi": ("fc1", "fc2"), "opt": ("fc1", "fc2")}.get(self.family, ("up_proj", "down_proj"))
        gate = (Linear("gate_proj", D, F, f),) if self.gated else ()
        return (
            Linear("q_proj", D, A, b), Linear("k_proj", D, kv, b, True), Linear("v_proj", D, kv, b, True),
            Linear(out, A, D, o), *gate, Linear(up, D, F, f, self.gated or self.family == "phi"), Linear(down, F, D, f),
        )  # fmt: skip

    @property
    def projections(self) -> tuple[Linear, ...]:
        """Between a narrow embedding and the layers."""
        if not self.embedding_width:
            return ()
        return (Linear("project_in", self.embedding_width, self.width),
                Linear("project_out", self.width, self.embedding_width))  # fmt: skip

    def all_linears(self) -> Iterator[Linear]:
        """Every matrix product of the trunk; the output layer is not among them."""
        yield from self.projections
        for _ in range(self.layers):
            yield from self.linears

    @property
    def num_linear_weights(self) -> int:
        """Weights of all matrix products of the trunk, without biases."""
        return sum(linear.num_weights for linear in self.all_linears())

    @property
    def num_embedding(self) -> int:
        """Weights of the token embedding, which is the output matrix too where they are tied."""
        return self.vocabulary * (self.embedding_width or self.width)

    @property
    def num_norm(self) -> int:
        """Parameters of all norms."""
        one = self.width * (2 if self.norm_bias else 1)
        heads = 2 * self.head_dim if self.qk_norm else 0
        return self.layers * (self.norms_per_layer * one + heads) + (one if self.final_norm else 0)

    @property
    def num_trunk(self) -> int:
        """Parameters without any head."""
        linear = sum(x.num_parameters for x in self.all_linears())
        return self.num_embedding + self.position_rows * self.width + linear + self.num_norm

    @property
    def num_head(self) -> int:
        """Parameters that the output layer has of its own."""
        return (0 if self.tied else self.num_embedding) + (self.vocabulary if self.head_bias else 0)

    @property
    def num_causal(self) -> int:
        """Parameters of the language model."""
        return self.num_trunk + self.num_head

    @property
    def num_scalar(self) -> int:
        """Parameters of the reward or value model: the trunk and a head of one row."""
        return self.num_trunk + self.width_of_head

    @property
    def width_of_head(self) -> int:
        """Width of the states that a head reads."""
        return self.embedding_width or self.width

    def num_lora(self, rank: int, targets: str) -> int:
        """Parameters of adapters on the named modules: rank · (inputs + outputs) each.

        Raises:
            ModelError: no module has one of the names.
        """
        return sum(rank * (x.inputs + x.outputs) for x in self.adapted(targets))

    def adapted(self, targets: str) -> list[Linear]:
        """The matrix products that adapters go on."""
        if targets == "all-linear":
            return list(self.all_linears())
        names = {name.strip() for name in targets.split(",")}
        found = [x for x in self.all_linears() if x.name in names]
        if missing := sorted(names - {x.name for x in found}):
            there = ", ".join(dict.fromkeys(x.name for x in self.all_linears()))
            raise ModelError(f"lora.targets names {missing[0]!r}, which {self.family} does not have; it has {there}")
        return found


def read_shape(folder: Path) -> ModelShape:
    """The shape of a model folder, from its config.json alone.

    Raises:
        ModelError: no config.json, or a family that is not known here.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder}: no config.json there; give a model folder or a named shape ({', '.join(NAMED)})")
    config = read_json(file)
    return shape_of(config, name=str(config.get("_name_or_path") or folder.name))


def shape_of(config: Mapping[str, Any], *, name: str = "") -> ModelShape:
    """The shape that a config.json describes; keys that it leaves out have the family's default.

    Raises:
        ModelError: a family that is not known here, or a key that is missing.
    """
    config = {**config, **(config.get("text_config") or {})}
    family = config.get("model_type", "")
    if family not in FAMILIES:
        raise ModelError(
            f"heedful plan does not know models of type {family!r}; it knows {', '.join(FAMILIES)}, and "
            f"{', '.join(NAMED)} by name"
        )
    try:
        return _FROM.get(family, _llama_like)(config, name)
    except KeyError as error:
        raise ModelError(f"the config of {name or family} lacks {error.args[0]!r}, so its shape is unknown") from None


def _llama_like(c: Mapping[str, Any], name: str) -> ModelShape:
    family = c["model_type"].removesuffix("_text")
    is_gemma, heads, width = family.startswith("gemma"), c["num_attention_heads"], c["hidden_size"]
    head_dim = c.get("head_dim") or {"gemma": 256, "qwen3": 128}.get(family[:5]) or width // heads
    bias = bool(c.get("attention_bias", False))
    return ModelShape(
        family, c["num_hidden_layers"], width, heads, c.get("num_key_value_heads") or heads, head_dim,
        c["intermediate_size"], c["vocab_size"], bool(c.get("tie_word_embeddings", is_gemma or family == "cohere")),
        c.get("max_position_embeddings", 2048),
        qkv_bias=bias or family == "qwen2", output_bias=bias and family != "qwen2", ffn_bias=bool(c.get("mlp_bias")),
        norms_per_layer={"gemma2": 4, "gemma3": 4, "cohere": 1}.get(family, 2),
        qk_norm=family in ("qwen3", "gemma3"), name=name,
    )  # fmt: skip


def _gpt2(c: Mapping[str, Any], name: str) -> ModelShape:
    width, heads = c["n_embd"], c["n_head"]
    return ModelShape(
        "gpt2", c["n_layer"], width, heads, heads, width // heads, c.get("n_inner") or 4 * width, c["vocab_size"],
        bool(c.get("tie_word_embeddings", True)), c["n_positions"], gated=False, qkv_bias=True, output_bias=True,
        ffn_bias=True, norm_bias=True, position_rows=c["n_positions"], name=name,
    )  # fmt: skip


def _neox(c: Mapping[str, Any], name: str) -> ModelShape:
    width, heads, bias = c["hidden_size"], c["num_attention_heads"], bool(c.get("attention_bias", True))
    return ModelShape(
        "gpt_neox", c["num_hidden_layers"], width, heads, heads, width // heads, c["intermediate_size"],
        c["vocab_size"], bool(c.get("tie_word_embeddings", False)), c["max_position_embeddings"], gated=False,
        qkv_bias=bias, output_bias=bias, ffn_bias=True, norm_bias=True, name=name,
    )  # fmt: skip


def _phi(c: Mapping[str, Any], name: str) -> ModelShape:
    width, heads = c["hidden_size"], c["num_attention_heads"]
    if c.get("qk_layernorm"):
        raise ModelError(f"{name or 'phi'}: heedful plan does not know phi models with qk_layernorm")
    return ModelShape(
        "phi", c["num_hidden_layers"], width, heads, c.get("num_key_value_heads") or heads, width // heads,
        c["intermediate_size"], c["vocab_size"], bool(c.get("tie_word_embeddings", False)),
        c["max_position_embeddings"], gated=False, qkv_bias=True, output_bias=True, ffn_bias=True, norms_per_layer=1,
        norm_bias=True, head_bias=True, name=name,
    )  # fmt: skip


def _opt(c: Mapping[str, Any], name: str) -> ModelShape:
    width, heads, before = c["hidden_size"], c["num_attention_heads"], c.get("do_layer_norm_before", True)
    narrow = c.get("word_embed_proj_dim") or width
    return ModelShape(
        "opt", c["num_hidden_layers"], width, heads, heads, width // heads, c["ffn_dim"], c["vocab_size"],
        bool(c.get("tie_word_embeddings", True)), c["max_position_embeddings"], gated=False, qkv_bias=True,
        output_bias=True, ffn_bias=True, norm_bias=True, final_norm=before and not c.get("_remove_final_layer_norm"),
        position_rows=c["max_position_embeddings"] + 2, embedding_width=narrow if narrow != width else 0, name=name,
    )  # fmt: skip


_FROM = {"gpt2": _gpt2, "gpt_neox": _neox, "phi": _phi, "opt": _opt}


def _named(name: str, family: str, layers: int, width: int, heads: int, kv: int, ffn: int, vocabulary: int,
           positions: int, *, tied: bool = False) -> ModelShape:  # fmt: skip
    return shape_of(
        {"model_type": family, "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
         "num_key_value_heads": kv, "intermediate_size": ffn, "vocab_size": vocabulary, "tie_word_embeddings": tied,
         "max_position_embeddings": positions},
        name=name,
    )  # fmt: skip


def _named_opt(name: str, layers: int, width: int, heads: int, *, narrow: int = 0, before: bool = True) -> ModelShape:
    return shape_of(
        {"model_type": "opt", "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
         "ffn_dim": 4 * width, "vocab_size": 50272, "max_position_embeddings": 2048,
         "word_embed_proj_dim": narrow or width, "do_layer_norm_before": before},
        name=name,
    )  # fmt: skip


def _named_neox(name: str, layers: int, width: int, heads: int, vocabulary: int) -> ModelShape:
    return shape_of(
        {"model_type": "gpt_neox", "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
         "intermediate_size": 4 * width, "vocab_size": vocabulary, "max_position_embeddings": 2048},
        name=name,
    )  # fmt: skip


_PUBLISHED = (  # each from the config.json that its authors published on the hub
    _named("smollm2-135m", "llama", 30, 576, 9, 3, 1536, 49152, 8192, tied=True),
    _named("smollm2-360m", "llama", 32, 960, 15, 5, 2560, 49152, 8192, tied=True),
    _named("smollm2-1.7b", "llama", 24, 2048, 32, 32, 8192, 49152, 8192, tied=True),
    _named("qwen2.5-0.5b", "qwen2", 24, 896, 14, 2, 4864, 151936, 32768, tied=True),
    _named("qwen2.5-1.5b", "qwen2", 28, 1536, 12, 2, 8960, 151936, 32768, tied=True),
    _named("qwen2.5-7b", "qwen2", 28, 3584, 28, 4, 18944, 152064, 32768),
    _named("mistral-7b", "mistral", 32, 4096, 32, 8, 14336, 32000, 32768),
    _named("llama-2-7b", "llama", 32, 4096, 32, 32, 11008, 32000, 4096),
    _named("llama-2-13b", "llama", 40, 5120, 40, 40, 13824, 32000, 4096),
    _named("llama-2-70b", "llama", 80, 8192, 64, 8, 28672, 32000, 4096),
    _named("llama-3.1-8b", "llama", 32, 4096, 32, 8, 14336, 128256, 131072),
    _named("llama-3.1-70b", "llama", 80, 8192, 64, 8, 28672, 128256, 131072),
    _named_opt("opt-125m", 12, 768, 12),
    _named_opt("opt-350m", 24, 1024, 16, narrow=512, before=False),
    _named_opt("opt-1.3b", 24, 2048, 32),
    _named_opt("opt-6.7b", 32, 4096, 32),
    _named_opt("opt-13b", 40, 5120, 40),
    _named_neox("pythia-160m", 12, 768, 12, 50304),
    _named_neox("pythia-1.4b", 24, 2048, 16, 50304),
    _named_neox("pythia-6.9b", 32, 4096, 32, 50432),
)
_BY_SIZE = {"1.3b": "opt-1.3b", "1.5b": "qwen2.5-1.5b", "7b": "llama-2-7b", "13b": "llama-2-13b", "70b": "llama-2-70b"}
NAMED = {shape.name: shape for shape in _PUBLISHED}
"""Published models by name; nothing is downloaded for them."""
NAMED |= {size: NAMED[name] for size, name in _BY_SIZE.items()}
