"""Knobs that move during training: the KL coefficient and the learning rate. No torch here.

kl         FixedKL, AdaptiveKL: update(kl_nats, num_samples) → coefficient of the next step
schedule   factor(step, …) → what the learning rate is multiplied by
"""
