"""The pages and the JSON interface of a project."""
