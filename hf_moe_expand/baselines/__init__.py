"""Baselines beside the main road: inserted blocks (LLaMA-Pro), Branch-Train-Mix, X-ELM's ensemble."""
