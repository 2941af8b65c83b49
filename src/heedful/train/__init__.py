"""The loops: SFT, reward model, PPO. Each reads top to bottom; all share step, guard and checkpoint by calling them."""
