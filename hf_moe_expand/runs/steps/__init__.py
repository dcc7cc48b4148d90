"""The steps of a recipe, a function each: it returns what the step is made from, how it is tried, and its work."""
