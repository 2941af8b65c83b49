"""Knobs that move during training: the KL coefficient and the learning rate. No torch here.

kl         FixedKL, AdaptiveKL: update(measured) → coefficient of the next step; build_controller from the options
guarded    GuardedKL: raises another controller's coefficient while score and KL climb together
schedule   factor(step, …) → what the learning rate is multiplied by
"""
