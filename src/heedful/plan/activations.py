"""What a forward keeps for its backward, in bytes, as PyTorch keeps it under heedful's models.

Every formula is of one layer. N padded tokens in B rows of T, D width, A attention width (heads · head width), F width
of the feed-forward block, r rank of adapters; s bytes of a number in the compute precision (2 or 4).

    trained fully    weights and residual stream are float32; under autocast each product casts its input and its
                     weight to s bytes, and both casts are kept
    under adapters   the base is held in s bytes and its products keep nothing; each adapter keeps a cast of its input
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from heedful.plan.machine import Kernel
from heedful.plan.shape import Linear, ModelShape

FUSED_NORMS = ("llama", "mistral", "qwen2", "qwen3", "granite", "phi3")
FUSED_GATES = ("llama", "mistral", "qwen2", "qwen3", "granite", "cohere")
"""Families whose norms and gated layers are ``models/fused.py``'s, which needs torch."""

IN_GROUPS = ("llama", "mistral", "qwen2", "qwen3", "granite", "phi3", "cohere", "gemma", "phi")
"""Families whose attention is ``models/attention.py``'s where it takes pieces."""

BLOCK, GROUP_PAIRS = 128, 2**17
"""Queries that it takes at once, and pairs of a query and a key, which a test compares."""


@dataclass(frozen=True)
class Batch:
    """A micro-batch: B rows of T padded tokens, of which some are counted by the loss."""

    rows: int
    row_tokens: int
    counted_tokens: int
    num_per_step: int = 1
    """Micro-batches of one optimizer step"""
    packed: bool = False
    """Rows hold several samples, so that attention needs a mask of its own"""

    @property
    def tokens(self) -> int:
        """N."""
        return self.rows * self.row_tokens


@dataclass(frozen=True)
class Training:
    """How a model is trained: all weights, or adapters on a frozen base."""

    rank: int | None = None
    """Of adapters; None = all weights"""
    targets: str = "all-linear"
    recompute: bool = False
    """Activation checkpointing"""

    def adapted(self, shape: ModelShape) -> list[Linear]:
        """The products of one layer that keep their input."""
        if self.rank is None or self.targets == "all-linear":
            return list(shape.linears)
        names = {name.strip() for name in self.targets.split(",")}
        return [x for x in shape.linears if x.name in names]

    def num_trained(self, shape: ModelShape, *, head: int) -> int:
        """Parameters with gradients; ``head`` those of a head that is trained with the adapters."""
        if self.rank is None:
            return shape.num_trunk + head
        return shape.num_lora(self.rank, self.targets) + head


def layer(shape: ModelShape, batch: Batch, training: Training, *, s: int, kernel: Kernel) -> int:
    """Bytes that one layer keeps."""
    return (
        norms(shape, batch, training, s=s)
        + inputs(shape, batch, training, s=s)
        + feed_forward(shape, batch, training, s=s)
        + attention(shape, batch, training, s=s, kernel=kernel)
        + weights(shape, training, s=s)
    )


def norms(shape: ModelShape, batch: Batch, training: Training, *, s: int) -> int:
    """RMS norm: its input as it comes and a float32 per token where it is heedful's (``models/fused.py``); elsewhere
    N·D·4 for its input in float32 and, where its weight is trained, as much for the normalised input.
    Layer norm: its input as it comes, and two numbers per token. Norms that read one tensor keep it once."""
    N, D, num = batch.tokens, shape.width, shape.norms_per_layer
    residual, trained = 4 if training.rank is None else s, training.rank is None
    if shape.family in FUSED_NORMS:
        of_heads = N * ((shape.attention_width + shape.kv_width) * s + (shape.heads + shape.kv_heads) * 4)
        return num * N * (D * residual + 4) + (of_heads if shape.qk_norm else 0)
    if shape.norm_bias:
        distinct = 1 if shape.family == "gpt_neox" else num
        return N * (distinct * D + 2 * num) * residual
    kept = num * N * (D * (8 if trained else 4) + 4)
    if shape.family == "cohere" and s < 4:  # a layer norm by hand
        kept += N * D * 4
    if shape.qk_norm:
        both = N * (shape.attention_width + shape.kv_width)
        normalised = both * (4 if shape.family == "gemma3" else s) if trained else 0
        kept += both * 4 + normalised + N * (shape.heads + shape.kv_heads) * 4
    return kept


def inputs(shape: ModelShape, batch: Batch, training: Training, *, s: int) -> int:
    """N·inputs·s for every product that is trained, and N·r·s for every adapter. Products that read one tensor keep it
    once in float32, where nothing is cast, and where heedful's norms give what they read in s bytes."""
    linears = training.adapted(shape)
    is_cast = s < 4 and (training.rank is not None or shape.family not in FUSED_NORMS)
    widths = sum(x.inputs for x in linears if is_cast or not x.shares_input)
    return batch.tokens * s * (widths + (training.rank or 0) * len(linears))


def feed_forward(shape: ModelShape, batch: Batch, training: Training, *, s: int) -> int:
    """N·F·s times the steps of the activation: gate and way up (2) where heedful computes it, its activation too (3)
    elsewhere; gelu written out as powers and tanh (4); gelu as one function (1); relu (0: its result is the next input,
    unless that is cast)."""
    relu = int(training.rank is not None and s < 4)
    steps = {"gpt2": 4, "phi": 4, "gpt_neox": 1, "opt": relu, **dict.fromkeys(FUSED_GATES, 2)}.get(shape.family, 3)
    return batch.tokens * shape.ffn_width * s * steps


def attention(shape: ModelShape, batch: Batch, training: Training, *, s: int, kernel: Kernel) -> int:
    """Queries, keys and values of all query heads, 3·N·A·s. eager: the probabilities, heads·N·T, in float32 and in s
    bytes. pieces: as eager, or those of no heads but their own and no probabilities. sdpa: one float32 per head and
    token, its result, and the mask of the batch in s bytes."""
    N, A, cast = batch.tokens, shape.attention_width, s < 4
    if kernel == "pieces" and shape.family in IN_GROUPS:
        product = A + shape.kv_width if shape.family == "phi3" else 0  # all of it, for the values that are a part
        return N * (A + 2 * shape.kv_width + product) * s
    if kernel != "sdpa":
        pairs = shape.heads * N * batch.row_tokens
        softcap = pairs * s if shape.family == "gemma2" else 0
        in_float32 = 0 if shape.family == "gpt2" and training.rank is not None and cast else 4
        return 3 * N * A * s + pairs * (in_float32 + (s if cast else 0)) + softcap
    # queries and keys after a partial rotation, and the product that they and the values came from as one
    copies = 2 if shape.family == "gpt_neox" else 0
    # where the next product does not read the result as it is
    copies += shape.family in ("gpt_neox", "phi", "phi3") or (cast and training.rank is not None)
    return (3 + copies) * N * A * s + shape.heads * N * 4 + N * batch.row_tokens * s


def weights(shape: ModelShape, training: Training, *, s: int) -> int:
    """Casts of trained weights to the compute precision; none in float32."""
    if s == 4:
        return 0
    if training.rank is None:
        return s * sum(x.num_weights for x in shape.linears)
    return s * training.rank * sum(x.inputs + x.outputs for x in training.adapted(shape))


def trunk(shape: ModelShape, batch: Batch, training: Training, *, s: int, kernel: Kernel) -> int:
    """Bytes that the whole trunk keeps: all layers, the last norm, the rotary angles.

    With activation checkpointing: the input of every layer, and everything of the one layer that is computed again.
    """
    N, D = batch.tokens, shape.width
    one = layer(shape, batch, training, s=s, kernel=kernel)
    residual = 4 if training.rank is None else s
    layers = shape.layers * N * D * residual + one if training.recompute else shape.layers * one
    twice = training.rank is None and not shape.norm_bias and shape.family not in FUSED_NORMS
    last = N * D * (4 * (1 + twice) if shape.family not in FUSED_NORMS else residual) if shape.final_norm else 0
    return layers + last + 2 * N * shape.head_dim * residual


def working(shape: ModelShape, batch: Batch, *, s: int, kernel: Kernel) -> int:
    """What one layer needs for a moment beyond what it keeps, forward or backward: the gradients of the feed-forward
    block in s bytes and of the residual stream in float32, or those of the attention probabilities."""
    N = batch.tokens
    gates = 3 if shape.gated else 2
    block = N * (gates * shape.ffn_width * s + 3 * shape.width * 4)
    bytes_of_pair, sums = 4 + 4 + s, 0
    if kernel == "pieces" and shape.family in IN_GROUPS:  # as measured; gradients of keys and values in float32
        bytes_of_pair, sums = 16, 2 * N * shape.kv_width * 4
    scores = _pairs_at_once(shape, batch, kernel) * bytes_of_pair + sums
    return max(block, scores + 2 * N * shape.attention_width * s)


def inference(shape: ModelShape, batch: Batch, *, s: int, residual: int, kernel: Kernel) -> int:
    """The most that a forward without gradients holds: one layer, and the hidden states around it."""
    N = batch.tokens
    block = N * shape.ffn_width * s * (3 if shape.gated else 2)
    scores = _pairs_at_once(shape, batch, kernel) * (4 + 2 * s)
    mask = N * batch.row_tokens * s if kernel != "sdpa" or batch.packed else 0
    return N * shape.width * (2 * residual + 4) + mask + max(block, scores + 3 * N * shape.attention_width * s)


def _pairs_at_once(shape: ModelShape, batch: Batch, kernel: Kernel) -> int:
    """Attention probabilities that are there together in one layer."""
    if kernel == "sdpa":
        return 0
    pairs = batch.tokens * batch.row_tokens
    if kernel == "pieces" and shape.family in IN_GROUPS:
        pairs = min(pairs, max(GROUP_PAIRS, BLOCK * batch.row_tokens))
    return shape.heads * pairs


TILES = {"cpu": (512, 2048), "cuda": (2048, 16384)}
"""``objectives.logprobs.TILES``, which a test compares; that file needs torch."""


def output_layer(shape: ModelShape, counted_tokens: int, kind: str, *, s: int, trained: bool, backward: bool) -> int:
    """Log-probabilities of the counted tokens in tiles of C rows and v of the vocabulary (``objectives/logprobs.py``).

    Logits C·v in float32 with two more of their size beside them and the weight that makes them, v·D in s bytes. The
    backward makes the gradient of the rows in float32 and, where the weight is trained, its gradient V·D · 4.
    """
    C, v = min(TILES[kind][0], counted_tokens), min(TILES[kind][1], shape.vocabulary)
    rows = counted_tokens * shape.width_of_head
    tile = C * v * (4 + 4 + s) + v * shape.width_of_head * (s if s < 4 else 0)
    if not backward:
        return rows * s + tile
    return rows * (2 * s + 4) + tile + (4 * shape.num_embedding if trained else 0)


def key_values(shape: ModelShape, rows: int, tokens: int, *, s: int) -> int:
    """The cache of a decoding: 2 · layers · key-value width · s per token, and once more for the layer whose keys are
    being put together anew."""
    return math.ceil(2 * shape.kv_width * s * rows * tokens * (shape.layers + 2))
