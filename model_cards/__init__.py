"""Templates of model cards, one for each method; all use `card.md`. `hf_moe_expand.card` fills them."""
