"""kl: estimators, their gradients, and the exact value."""

import torch
from closeness import assert_close, assert_gradient, gradient

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
