"""Will it fit: memory and time of a recipe by arithmetic, without torch and without the weights."""
