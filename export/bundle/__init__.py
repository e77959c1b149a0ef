"""Build a bundle from a recipe: open its models, build and compile their graphs, write the bundle folder."""
