"""logprobs: chunked log-probabilities, entropy and exact KL against the plain computation."""

import torch
from closeness import POISONS, assert_close, assert_gradient, mask_of, poisoned
from torch.utils._python_dispatch import TorchDispatchMode

from heedful.objectives import kl, logprobs

HEAD = {"temperature": 0.7, "logit_scale": 1.7, "softcap": 2.5}


def make(rows=3, width=5, dim=4, vocab=7, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    targets = torch.randint(0, vocab, (rows, width), generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    return randn(rows, width, dim), randn(vocab, dim), randn(vocab), targets, mask


def plain_logits(hidden, weight, bias=None, temperature=1.0, logit_scale=1.0, softcap=None):
    logits = hidden @ weight.T
    logits = (logits if bias is None else logits + bias) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def plain(hidden, weight, targets, mask, bias=None, **head):
    logp = plain_logits(hidden, weight, bias, **head).log_softmax(-1)
    picked = logp.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    return torch.where(mask, picked, 0.0), torch.where(mask, -(logp.exp() * logp).sum(-1), 0.0)


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns, and all shapes."""

    def __init__(self):
        super().__init__()
        self.largest, self.shapes = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
                self.shapes.add(tuple(x.shape))
        return out


def test_equals_the_plain_computation_for_every_chunk_size():
    hidden, weight, bias, targets, mask = make(rows=4, width=9, dim=8, vocab=31)
    mix = 0.2 * torch.randn(4, 9, generator=torch.Generator().manual_seed(5))
    for head in ({}, {"temperature": 0.5}, {"logit_scale": 3.0}, {"softcap": 1.5}, HEAD):
        for used_bias in (None, bias):
            expected = leaves(hidden, weight, bias)
            right = plain(expected[0], expected[1], targets, mask, None if used_bias is None else expected[2], **head)
            (right[0] * mix + right[1] * mix.flip(0)).sum().backward()
            for chunk_tokens, chunk_vocabulary in ((1, 1), (3, 7), (512, 31), (512, 2048)):
                actual = leaves(hidden, weight, bias)
                out = logprobs.token_logprobs(
                    actual[0],
                    actual[1],
                    targets,
                    mask,
                    bias_V=None if used_bias is None else actual[2],
                    chunk_tokens=chunk_tokens,
                    chunk_vocabulary=chunk_vocabulary,
                    with_entropy=True,
                    **head,
                )
                (out[0] * mix + out[1] * mix.flip(0)).sum().backward()
                for a, b in zip(out, right):
                    assert a.dtype == torch.float32
                    assert_close(a, b, largest=1e-5, mean=1e-6)
                for a, b in zip(actual, expected):
                    if b.grad is not None:
                        assert_close(a.grad, b.grad, largest=1e-5, mean=3e-6)


def test_gradients_by_finite_differences():
    hidden, weight, bias, targets, mask = make(dtype=torch.float64)
    mix = torch.randn(3, 5, dtype=torch.float64)

    def total(h, w, b):
        lp, entropy = logprobs.token_logprobs(
            h, w, targets, mask, bias_V=b, chunk_tokens=4, chunk_vocabulary=3, with_entropy=True, **HEAD
        )
        return (lp * mix + entropy * mix.cos()).sum()

    def of_one(h, w, k):
        out = logprobs.token_logprobs(h, w, targets, mask, chunk_vocabulary=3, with_entropy=True)
        return (out[k] * mix).sum()

    assert_gradient(lambda x: total(x, weight, bias), hidden)
    assert_gradient(lambda x: total(hidden, x, bias), weight)
    assert_gradient(lambda x: total(hidden, weight, x), bias)
    for k in (0, 1):  # a loss of the log-probs alone, and of the entropies alone
        assert_gradient(lambda x, k=k: of_one(x, weight, k), hidden)
        assert_gradient(lambda x, k=k: of_one(hidden, x, k), weight)


def test_PPO_19_precision():
    """Logits linspace(−4, 4, 1000), token 900; the output is float32 and log-probs are never positive."""
    logits = torch.linspace(-4, 4, 1000)
    one, target, mask = torch.ones(1, 1, 1), torch.tensor([[900]]), mask_of([1], 1)
    value, none = logprobs.token_logprobs(one, logits[:, None], target, mask)
    assert none is None and value.dtype == torch.float32
    assert_close(value[0, 0], -5.623775)
    low, _ = logprobs.token_logprobs(one.bfloat16(), logits[:, None], target, mask)
    assert low.dtype == torch.float32
    assert_close(low[0, 0], -5.627591)  # bfloat16 logits, float32 softmax; a bfloat16 softmax gives −5.625
    hidden, weight, _, targets, mask = make(rows=1, width=200, dim=16, vocab=1000)
    exact, _ = plain(hidden.double(), weight.double(), targets, mask)
    chunked, _ = logprobs.token_logprobs(hidden, weight, targets, mask, chunk_tokens=64)
    assert_close(chunked.sum() / exact.sum(), 1.0, largest=1e-6)
    sharp, _ = logprobs.token_logprobs(hidden * 50, weight, targets, mask)
    assert bool((sharp <= 0).all())


def test_ROL_02_temperature_on_both_sides():
    logits = torch.tensor([2.0, 1.0, 0.0])[:, None]
    hidden, mask = torch.ones(1, 2, 1), mask_of([2], 2)
    targets = torch.tensor([[0, 2]])
    assert_close(logprobs.token_logprobs(hidden, logits, targets, mask, temperature=0.5)[0][0], [-0.142932, -4.142932])
    assert_close(logprobs.token_logprobs(hidden, logits, targets, mask)[0][0], [-0.407606, -2.407606])
    same = logprobs.exact_kl(hidden, logits, hidden, logits, mask, temperature=0.5)
    assert_close(same, torch.zeros(1, 2), largest=0.0)


def test_CLI_05_no_tensor_of_length_times_vocabulary():
    rows, width, dim, vocab = 2, 160, 8, 500
    tile = {"chunk_tokens": 32, "chunk_vocabulary": 200}
    hidden, weight, bias, targets, _ = make(rows, width, dim, vocab)
    mask = mask_of([150, 100], width)
    num = int(mask.sum())
    reference = (hidden + 0.1).detach()
    for with_entropy in (False, True):
        h, w, b = leaves(hidden, weight, bias)
        saved: list[torch.Tensor] = []
        with (
            LargestTensor() as seen,
            torch.autograd.graph.saved_tensors_hooks(lambda x, s=saved: s.append(x) or x, lambda x: x),
        ):
            lp, entropy = logprobs.token_logprobs(
                h, w, targets, mask, bias_V=b, softcap=3.0, with_entropy=with_entropy, **tile
            )
            divergence = logprobs.exact_kl(h, w, reference, weight, mask, bias_V=b, **tile)
            (lp + divergence + (0 if entropy is None else entropy)).sum().backward()
        assert seen.largest == 32 * 200 < num * vocab
        assert max(x.numel() for x in saved) <= max(rows * width * dim, vocab * dim)
        assert h.grad is not None and w.grad is not None and b.grad is not None


def test_memory_is_only_spent_on_counted_tokens():
    hidden, weight, _, targets, _ = make(rows=4, width=50, dim=4, vocab=100)
    (h,) = leaves(hidden)
    with LargestTensor() as seen:
        logprobs.token_logprobs(h, weight, targets, mask_of([20, 0, 0, 10], 50))[0].sum().backward()
    assert seen.largest == 32 * 100 > hidden.numel()  # filled up to 32 rows, far from 4 · 50


def test_frozen_weight_costs_no_weight_gradient():
    hidden, weight, _, targets, mask = make(rows=2, width=6, dim=4, vocab=50)
    for needs in (False, True):
        (h,) = leaves(hidden)
        w = weight.clone().requires_grad_(needs)
        loss = logprobs.token_logprobs(h, w, targets, mask, chunk_vocabulary=20)[0].sum()
        with LargestTensor() as seen:
            loss.backward()
        assert ((50, 4) in seen.shapes) == needs
        assert (w.grad is not None) == needs and h.grad is not None
    w = weight.clone().requires_grad_()
    logprobs.token_logprobs(hidden, w, targets, mask)[0].sum().backward()  # only the head is trained
    assert w.grad is not None


def test_poison_at_masked_places_changes_nothing():
    hidden, weight, _, targets, mask = make()
    (clean,) = leaves(hidden)
    right = logprobs.token_logprobs(clean, weight, targets, mask, with_entropy=True)
    right_kl = logprobs.exact_kl(clean, weight, clean.detach() * 0.5, weight, mask)
    (right[0] + right[1] + right_kl).sum().backward()
    for poison in POISONS:
        spread = mask[..., None].expand_as(hidden)
        (bad,) = leaves(poisoned(hidden, spread, poison))
        bad_targets = torch.where(mask, targets, -100)
        out = logprobs.token_logprobs(bad, weight, bad_targets, mask, with_entropy=True)
        out_kl = logprobs.exact_kl(bad, weight, bad.detach() * 0.5, weight, mask)
        (out[0] + out[1] + out_kl).sum().backward()
        for a, b in zip((*out, out_kl), (*right, right_kl)):
            assert_close(a, b, largest=0.0)
            assert bool((a[~mask] == 0).all())
        assert_close(bad.grad, clean.grad, largest=0.0)


def test_SFT_05_nothing_counted():
    hidden, weight, bias, targets, mask = make()
    h, w, b = leaves(hidden, weight, bias)
    none = torch.zeros_like(mask)
    lp, entropy = logprobs.token_logprobs(h, w, targets, none, bias_V=b, with_entropy=True)
    (lp + entropy + logprobs.exact_kl(h, w, hidden, weight, none)).sum().backward()
    for x in (lp, entropy, h.grad, w.grad, b.grad):
        assert_close(x, torch.zeros_like(x), largest=0.0)


def test_autocast_chooses_the_dtype():
    hidden, weight, _, targets, mask = make(rows=3, width=8, dim=16, vocab=40)
    (rounded,) = leaves(hidden.bfloat16())
    expected, _ = logprobs.token_logprobs(rounded, weight, targets, mask)
    expected.sum().backward()
    for backward_inside in (True, False):
        h, w = leaves(hidden, weight)
        with torch.autocast("cpu", torch.bfloat16):
            lp, entropy = logprobs.token_logprobs(h, w, targets, mask, with_entropy=True)
            divergence = logprobs.exact_kl(h, w, hidden, weight, mask)
            if backward_inside:
                lp.sum().backward()
        if not backward_inside:
            lp.sum().backward()
        assert lp.dtype == entropy.dtype == divergence.dtype == h.grad.dtype == w.grad.dtype == torch.float32
        assert_close(lp, expected, largest=0.0)
        assert_close(h.grad, rounded.grad.float(), largest=0.0)
        assert_close(divergence, torch.zeros_like(divergence), largest=0.0)


def test_bfloat16_hidden_states_with_a_float32_weight():
    hidden, weight, bias, targets, mask = make(rows=3, width=20, dim=16, vocab=40, seed=3)
    full = leaves(hidden.bfloat16().float(), weight.bfloat16().float(), bias)
    right, right_entropy = plain(full[0], full[1], targets, mask, full[2])
    (right + right_entropy).sum().backward()
    low = leaves(hidden.bfloat16(), weight, bias)
    lp, entropy = logprobs.token_logprobs(
        low[0], low[1], targets, mask, bias_V=low[2], chunk_tokens=7, with_entropy=True
    )
    (lp + entropy).sum().backward()
    assert lp.dtype == torch.float32
    assert [x.grad.dtype for x in low] == [torch.bfloat16, torch.float32, torch.float32]
    assert_close(lp, right, largest=0.05, mean=0.01)
    for a, b in zip(low, full):
        assert_close(a.grad, b.grad, largest=0.1, mean=0.01)


def test_weight_gradient_is_summed_over_chunks_in_float32():
    """1024 chunks of one row that each add 0.125 · 0.998: a bfloat16 sum stops growing at 32."""
    rows = 1024
    hidden = torch.full((1, rows, 1), 0.125, dtype=torch.bfloat16)
    (weight,) = leaves(torch.zeros(512, 1, dtype=torch.bfloat16))
    targets, mask = torch.zeros(1, rows, dtype=torch.long), mask_of([rows], rows)
    logprobs.token_logprobs(hidden, weight, targets, mask, chunk_tokens=1)[0].sum().backward()
    assert weight.grad.dtype == torch.bfloat16
    assert_close(weight.grad[0, 0] / (rows * 0.125 * 511 / 512), 1.0, largest=0.01)


def test_excluded_tokens():
    """A padded vocabulary, whose rows are switched off with a bias of −∞, must not bring NaN."""
    hidden, weight, bias, targets, mask = make()
    bias = bias.clone()
    bias[5:] = float("-inf")
    targets = targets.clamp(max=4)
    short, short_entropy = plain(hidden, weight[:5], targets, mask, bias[:5])
    for chunk_vocabulary in (2, 2048):
        h, w = leaves(hidden, weight)
        lp, entropy = logprobs.token_logprobs(
            h, w, targets, mask, bias_V=bias, chunk_vocabulary=chunk_vocabulary, with_entropy=True
        )
        divergence = logprobs.exact_kl(
            h, w, hidden * 0.5, weight, mask, bias_V=bias, reference_bias_V=bias, chunk_vocabulary=chunk_vocabulary
        )
        (lp + entropy + divergence).sum().backward()
        assert_close(lp, short)
        assert_close(entropy, short_entropy)
        assert bool(h.grad.isfinite().all()) and bool(w.grad.isfinite().all()) and bool((w.grad[5:] == 0).all())


def test_exact_kl_equals_kl_of_the_full_logits():
    hidden, weight, bias, _, mask = make(rows=3, width=7, dim=8, vocab=31)
    reference, other_weight, other_bias, _, _ = make(rows=3, width=7, dim=6, vocab=31, seed=9)
    for chunk_tokens, chunk_vocabulary in ((1, 1), (4, 7), (512, 31), (512, 2048)):
        actual, expected = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
        frozen = leaves(reference, other_weight)
        out = logprobs.exact_kl(
            actual[0],
            actual[1],
            *frozen,
            mask,
            bias_V=actual[2],
            reference_bias_V=other_bias,
            chunk_tokens=chunk_tokens,
            chunk_vocabulary=chunk_vocabulary,
            **HEAD,
        )
        right = kl.exact(plain_logits(*expected, **HEAD), plain_logits(reference, other_weight, other_bias, **HEAD))
        right = torch.where(mask, right, 0.0)
        assert_close(out, right, largest=1e-5, mean=1e-6)
        assert float(right.detach().max()) > 0.1
        (out**2).sum().backward()
        (right**2).sum().backward()
        for a, b in zip(actual, expected):
            assert_close(a.grad, b.grad, largest=1e-5, mean=3e-6)
        assert frozen[0].grad is None and frozen[1].grad is None


def test_exact_kl_gradient_by_finite_differences():
    hidden, weight, bias, _, mask = make(dtype=torch.float64)

    def total(h, w):
        return logprobs.exact_kl(
            h, w, hidden * 0.3 + 0.2, weight * 0.9, mask, bias_V=bias, chunk_tokens=2, chunk_vocabulary=3, **HEAD
        ).sum()

    assert_gradient(lambda x: total(x, weight), hidden)
    assert_gradient(lambda x: total(hidden, x), weight)


def test_bad_arguments_are_refused():
    hidden, weight, _, targets, mask = make()
    for name, value in (("temperature", 0.0), ("chunk_tokens", 0), ("chunk_vocabulary", 0)):
        try:
            logprobs.token_logprobs(hidden, weight, targets, mask, **{name: value})
        except ValueError as error:
            assert name in str(error)
        else:
            raise AssertionError(f"{name} = {value} was accepted")
