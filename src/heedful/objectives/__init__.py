"""The mathematics of training from human feedback: pure functions of tensors, nothing else.

    masked       mean, variance and whitening over the tokens that count
    logprobs     log-probabilities, entropy and exact KL from hidden states, in chunks
    kl           per-token KL estimators, the exact KL, KL losses, weights of outliers
    shaping      what an answer is worth, and one reward per token from it and the KL penalty
    advantages   generalised advantage estimation
    policy       the clipped PPO objective and the entropy bonus
    value        the clipped value loss and explained variance
    preference   Bradley–Terry loss on pairs and on whole rankings
    likelihood   negative log-likelihood per token

Every loss returns :class:`~heedful.batches.LossOut`. ``loss_mask`` is boolean, True = this token counts; what stands
at a place that does not count, be it NaN, changes neither a value nor a gradient. A ``denominator`` is the number of
counted items of the *whole* optimizer step, over all micro-batches and ranks, so that losses and metrics of the parts
add up; as [B, 1] it weighs sequences (:func:`heedful.objectives.masked.mean`).
"""
