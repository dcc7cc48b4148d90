"""Templates of model cards, one a method; `card.md` is what they share. `hf_moe_expand.card` fills them."""
