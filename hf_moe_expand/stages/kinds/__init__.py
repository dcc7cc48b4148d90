"""The stages, one file each, named as its key. A new stage is a new file, which says its place in a recipe."""
