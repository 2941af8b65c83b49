"""kl: estimators, their gradients, and the exact value."""

import torch
from closeness import POISONS, assert_close, assert_gradient, gradient, mask_of, poisoned

from heedful.objectives import kl

POLICY = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
REFERENCE = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)


def test_PPO_12_values():
    per_token = {
        "k1": [0.223144, -0.287682, 0.0],
        "k2": [0.024897, 0.041380, 0.0],
        "k3": [0.023144, 0.045651, 0.0],
        "abs": [0.223144, 0.287682, 0.0],
    }
    expected = {"k1": 0.025267, "k2": 0.024862, "k3": 0.025267, "abs": 0.5 * 0.223144 + 0.3 * 0.287682}
    for kind, values in per_token.items():
        estimate = kl.estimate(POLICY.log()[None], REFERENCE.log()[None], kind)[0]
        assert_close(estimate, values)
        assert_close((POLICY * estimate).sum(), expected[kind])
    assert_close(kl.estimate(POLICY.log()[None], REFERENCE.log()[None])[0], per_token["k1"])  # k1 is the default
    assert_close(kl.exact(POLICY.log(), REFERENCE.log()), 0.025267)


def test_PPO_12_gradients():
    """The expected gradient over sampled tokens, when the estimate stands in the loss."""

    def expected_gradient(kind):
        def sampled_loss(logits):
            logp = logits.log_softmax(-1)
            return (POLICY * kl.estimate(logp[None], REFERENCE.log()[None], kind)[0]).sum()

        return gradient(sampled_loss, POLICY.log())

    exact = torch.tensor([0.098938, -0.093885, -0.005053])
    assert_close(gradient(lambda z: kl.exact(z, REFERENCE.log()), POLICY.log()), exact)
    assert_close(expected_gradient("k2"), exact)
    assert_close(expected_gradient("k3"), torch.tensor([0.1, -0.1, 0.0]))
    assert_close(expected_gradient("k1"), torch.zeros(3))
    assert_gradient(lambda z: kl.exact(z, REFERENCE.log()), POLICY.log())


def test_PPO_12_no_overflow():
    rho = torch.tensor([[-1e4, -100.0, -88.0, -20.5, -20.0, -19.5, 0.0, 100.0]], requires_grad=True)
    values = kl.estimate(rho, torch.zeros_like(rho), "k3")
    assert bool(values.isfinite().all())
    assert bool((values.diff()[0, :6] < 0).all()), "k3 must fall as ρ rises to 0"
    (grad,) = torch.autograd.grad(values.sum(), rho)
    assert bool(grad.isfinite().all()) and bool((grad[0, :6] < 0).all()), "the gradient must push ρ back up"
    assert_close(values[0, 5] / (torch.tensor(19.5).exp() - 1 - 19.5), 1.0)
    assert_close(values[0, 3] / (torch.tensor(20.0).exp() * 1.5 - 21.5), 1.0)


def test_k3_is_never_negative():
    rho = torch.cat([torch.logspace(-12, 1, 2000), -torch.logspace(-12, 1, 2000), torch.zeros(1)])[None]
    assert bool((kl.estimate(rho, torch.zeros_like(rho), "k3") >= 0).all())
    small = torch.tensor([[1e-3]])
    assert_close(kl.estimate(small, torch.zeros(1, 1), "k3") / 5e-7, torch.ones(1, 1), largest=1e-3)


def test_ROL_01_truncated_sampling_gives_a_negative_estimate():
    """Why a top-k of the sampler must not enter: the estimate over the two kept tokens is negative, the KL is not."""
    policy, reference = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.6, 0.38, 0.01, 0.01])
    assert_close(kl.exact(policy.log(), reference.log()), 0.596302)
    kept = policy[:2] / policy[:2].sum()
    assert_close((kept * kl.estimate(policy.log()[None, :2], reference.log()[None, :2], "k1")[0]).sum(), -0.333004)


def test_exact_with_excluded_tokens():
    logits = torch.tensor([[1.0, 2.0, float("-inf")], [0.0, 1.0, 2.0]])
    reference = torch.tensor([[2.0, 1.0, float("-inf")], [0.0, 1.0, 2.0]])
    p = torch.tensor([1.0, 2.0]).softmax(0)
    assert_close(kl.exact(logits, reference), torch.tensor([float(p[1] - p[0]), 0.0]))


def test_low_precision_inputs_are_subtracted_in_float32():
    estimate = kl.estimate(torch.tensor([[-3.0]], dtype=torch.bfloat16), torch.tensor([[-3.001]]), "k1")
    assert estimate.dtype == torch.float32
    assert_close(estimate, torch.tensor([[0.001]]), largest=1e-6)


def test_unknown_kind_is_refused():
    try:
        kl.estimate(torch.zeros(1, 1), torch.zeros(1, 1), "k4")  # type: ignore[arg-type]
    except ValueError as error:
        assert "k4" in str(error)
    else:
        raise AssertionError("k4 was accepted")


OLD = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)


def term(logprobs, kind="k2", weight=1.0, old=OLD):
    """The loss of three answers of one token, one per token of the vocabulary."""
    return kl.loss_term(
        logprobs[:, None], REFERENCE.log()[:, None], old.log()[:, None], mask_of([1, 1, 1], 1), kind=kind,
        weights_B=torch.full((3,), weight), denominator=1,
    )  # fmt: skip


def expected_loss(logits, kind):
    """Mean over tokens sampled from OLD, by enumeration: each of the three answers has its probability as weight."""
    return kl.loss_term(
        logits.log_softmax(-1)[:, None], REFERENCE.log()[:, None], OLD.log()[:, None], mask_of([1, 1, 1], 1),
        kind=kind, weights_B=OLD, denominator=1,
    ).loss  # fmt: skip


def test_loss_terms_have_their_gradient_after_the_policy_has_moved():
    """The samples are from OLD, the gradients hold at POLICY."""
    exact = gradient(lambda z: kl.exact(z, REFERENCE.log()), POLICY.log())
    reverse = gradient(lambda z: kl.exact(REFERENCE.log(), z), POLICY.log())
    distance = gradient(lambda z: (z.softmax(-1) - REFERENCE).abs().sum(), POLICY.log())
    # the third token is equally probable in both: a kink of the distance, whose derivative both sides call 0
    for kind, right in (("k2", exact), ("k3", reverse), ("abs", distance)):
        assert_close(gradient(lambda z, k=kind: expected_loss(z, k), POLICY.log()), right)


def test_loss_term_by_hand():
    ratio = POLICY / OLD
    right = (ratio * (POLICY / REFERENCE).log() ** 2 / 2).sum()
    out = term(POLICY.log().requires_grad_(), weight=0.3)
    assert_close(out.loss, 0.3 * right)
    assert_close(out.metrics["kl_loss_nats"], right)
    assert not out.metrics["kl_loss_nats"].requires_grad
    for kind in ("k2", "k3", "abs"):
        k = kl.estimate(POLICY.log()[None], REFERENCE.log()[None], kind)[0]
        assert_close(term(POLICY.log(), kind).loss, (ratio * k).sum())
        assert_close(term(POLICY.log(), kind, old=POLICY).loss, k.sum())


def test_the_ratio_is_a_weight_only():
    ratio = POLICY / OLD
    for kind in ("k2", "k3", "abs"):

        def frozen_ratio(x, k=kind):
            return (ratio * kl.estimate(x[None], REFERENCE.log()[None], k)[0]).sum()

        assert_close(gradient(lambda x, k=kind: term(x, k).loss, POLICY.log()), gradient(frozen_ratio, POLICY.log()))


def test_loss_terms_weigh_answers_and_add_up():
    torch.manual_seed(1)
    mask, weights = mask_of([3, 1, 0], 3), torch.tensor([0.1, 0.4, 7.0])
    logprobs, reference, old = -torch.rand(3, 3), -torch.rand(3, 3), -torch.rand(3, 3)
    k_BT = (logprobs - old).exp() * (logprobs - reference) ** 2 / 2
    for denominator in (4, torch.tensor([[6], [2], [0]])):
        per_row = torch.as_tensor(denominator).expand(3, 1)[:2]
        right = (weights[:2, None] * k_BT[:2] * mask[:2] / per_row).sum()
        right_mean = (k_BT[:2] * mask[:2] / per_row).sum()
        exact = kl.exact_loss_term(k_BT, mask, weights_B=weights, denominator=denominator)
        sampled = kl.loss_term(logprobs, reference, old, mask, kind="k2", weights_B=weights, denominator=denominator)
        for out in (exact, sampled):
            assert_close(out.loss, right)
            assert_close(out.metrics["kl_loss_nats"], right_mean)
            assert out.loss.dtype == torch.float32


def test_loss_terms_ignore_masked_places_and_give_gradient_to_the_policy_alone():
    torch.manual_seed(2)
    mask, weights = mask_of([3, 1, 0], 3), torch.rand(3)
    streams = [-torch.rand(3, 3) for _ in range(3)]

    def loss(x, reference, old, weights=weights):
        return kl.loss_term(x, reference, old, mask, kind="k3", weights_B=weights, denominator=4).loss

    right = gradient(lambda x: loss(x, *streams[1:]), streams[0])
    exact_right = gradient(lambda x: kl.exact_loss_term(x, mask, weights_B=weights, denominator=4).loss, streams[0])
    assert_close(exact_right, weights[:, None] * mask / 4)
    for poison in POISONS:
        bad = [poisoned(x, mask, poison) for x in streams]
        bad_weights = torch.cat([weights[:2], torch.tensor([poison])])
        assert_close(loss(*bad, bad_weights), loss(*streams), largest=0.0)
        assert_close(gradient(lambda x, b=bad, w=bad_weights: loss(x, *b[1:], w), bad[0]), right, largest=0.0)
        out = kl.exact_loss_term(bad[0], mask, weights_B=bad_weights, denominator=4)
        assert_close(out.loss, (weights[:, None] * streams[0] * mask).sum() / 4)
        assert bool(out.metrics["kl_loss_nats"].isfinite())
    leaves = [x.clone().requires_grad_() for x in (*streams, weights)]
    loss(*leaves).backward()
    assert leaves[0].grad is not None and all(x.grad is None for x in leaves[1:])
    k_BT, weights_B = streams[0].clone().requires_grad_(), weights.clone().requires_grad_()
    kl.exact_loss_term(k_BT, mask, weights_B=weights_B, denominator=4).loss.backward()
    assert k_BT.grad is not None and weights_B.grad is None


def test_loss_term_by_finite_differences():
    torch.manual_seed(3)
    mask = mask_of([3, 2], 3)
    x, reference, old = (torch.randn(2, 3).double() for _ in range(3))
    ratio = (x - old).exp()
    weights = torch.tensor([0.5, 2.0]).double()
    for kind in ("k2", "k3", "abs"):

        def frozen_ratio(z, k=kind):
            return (weights[:, None] * ratio * kl.estimate(z, reference, k) * mask).sum() / 5

        def loss(z, k=kind):
            return kl.loss_term(z, reference, old, mask, kind=k, weights_B=weights, denominator=5).loss

        assert_gradient(frozen_ratio, x)
        assert_close(gradient(loss, x), gradient(frozen_ratio, x), largest=1e-12)


def test_an_exploded_ratio_stays_finite():
    x = torch.zeros(1, 1)
    for kind in ("k2", "k3", "abs"):

        def loss(z, k=kind):
            return kl.loss_term(
                z, torch.full((1, 1), -1.0), torch.full((1, 1), -200.0), mask_of([1], 1), kind=k,
                weights_B=torch.ones(1), denominator=1,
            ).loss  # fmt: skip

        assert bool(loss(x).isfinite()) and bool(gradient(loss, x).isfinite().all())


def test_k1_is_no_loss():
    for kind in ("k1", "exact"):
        try:
            term(POLICY.log(), kind)
        except ValueError as error:
            assert kind in str(error)
        else:
            raise AssertionError(f"{kind} was accepted")


def test_outliers_above_the_median_weigh_more():
    kl_B = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 20.0, -14.0])  # median 3, deviations 0 1 1 2 2 17 17: MAD 2
    z = 17 / (1.4826 * 2)
    right = torch.ones(7)
    right[5] = 1 + 0.5 * (z - 3)
    assert_close(kl.outlier_weights(kl_B, threshold=3.0, slope=0.5, max_weight=4.0), right)
    right[5] = 2.0
    assert_close(kl.outlier_weights(kl_B, threshold=3.0, slope=0.5, max_weight=2.0), right)
    assert_close(kl.outlier_weights(kl_B, threshold=6.0, slope=0.5, max_weight=2.0), torch.ones(7))
    even = torch.tensor([1.0, 2.0, 4.0, 13.0])  # median 3, deviations 1 1 2 10: MAD 1.5
    right = torch.tensor([1, 1, 1, 1 + 0.1 * (10 / (1.4826 * 1.5) - 2)])
    assert_close(kl.outlier_weights(even, threshold=2.0, slope=0.1, max_weight=9.0), right)


def test_without_a_spread_all_answers_weigh_the_same():
    options = {"threshold": 1.0, "slope": 0.5, "max_weight": 4.0}
    for values in ([], [5.0], [0.0, 0.1, 9.0], [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 50.0]):
        weights_B = kl.outlier_weights(torch.tensor(values), **options)
        assert_close(weights_B, torch.ones(len(values)), largest=0.0)
    leaf_B = torch.tensor([1.0, 2.0, 3.0, 90.0], dtype=torch.bfloat16, requires_grad=True)
    weights_B = kl.outlier_weights(leaf_B, **options)
    assert weights_B.dtype == torch.float32 and not weights_B.requires_grad
    assert weights_B.tolist() == [1.0, 1.0, 1.0, 4.0]
