"""What a run is: recipe models (frozen, unknown keys refused), read from YAML and dotted overrides.

from heedful.config.read import load_recipe
recipe = load_recipe("recipes/quickstart.yaml", ["--ppo.steps", "10"])
"""
