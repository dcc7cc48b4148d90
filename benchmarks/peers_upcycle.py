"""Upcycling by hand in plain transformers: load the dense model, copy its FFNs into Mixtral's experts, save.

    python benchmarks/peers_upcycle.py BASE OUT EXPERTS

For `peers.py`, which measures it. The base is a Llama. Needs torch and transformers alone.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM


def main(base: str, out: str, experts: int) -> None:
    dense = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    own = ("architectures", "model_type")
    fields = {name: value for name, value in dense.config.to_dict().items() if name not in own}
    config = MixtralConfig(**fields, num_local_experts=experts, num_experts_per_tok=2)
    torch.set_default_dtype(dense.dtype)
    model = MixtralForCausalLM(config)
    weights = dense.state_dict()
    with torch.no_grad():
        for name, target in model.state_dict().items():
            layer, is_ffn, part = name.partition(".mlp.")
            if not is_ffn:
                target.copy_(weights[name])
            elif part == "experts.gate_up_proj":
                parts = [weights[f"{layer}.mlp.{which}_proj.weight"] for which in ("gate", "up")]
                target.copy_(torch.cat(parts).expand_as(target))
            elif part == "experts.down_proj":
                target.copy_(weights[f"{layer}.mlp.down_proj.weight"].expand_as(target))
    model.save_pretrained(out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
