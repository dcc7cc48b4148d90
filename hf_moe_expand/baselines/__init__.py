"""Baselines: inserted blocks (LLaMA-Pro), Branch-Train-Mix, and X-ELM's ensemble."""
