"""The stages, one file each. A new stage is a new file, with its place in a recipe."""
