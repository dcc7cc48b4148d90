"""Templates of model cards, one for each method; all use `card.md`. `hf_moe_expand.hub.card` fills them."""
