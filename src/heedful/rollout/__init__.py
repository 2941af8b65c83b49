"""The policy speaks (engine), the reward is read (score), and both become what PPO trains on (experience)."""
