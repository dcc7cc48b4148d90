"""Models with added experts for tests, on a dense base and on bases that are mixtures of experts."""

import torch
from conftest import ADDED, move, moved, save_dense, tiny_config

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM, Plan, expand_checkpoint

WIDTH = ADDED["expert_width"]
COUNTS = [3, 1, 4]
PLAN = Plan("moe-lpr", COUNTS, [2], top_k=2, old=["en"], new=["el"])
IDS = torch.arange(3, 35).view(2, 16)
# Fields of a small mixture of each kind: experts one by one in the files, fused ones, shared ones after a dense layer.
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_routed_experts": 4}
MIXTURES = {
    "olmoe": EXPERTS,
    "gpt_oss": EXPERTS,
    "mixtral": EXPERTS,
    "deepseek_v3": {
        **EXPERTS, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}  # fmt: skip


def fields(base):
    return MIXTURES.get(base, {})


def build(base="olmoe", top_k=2, num_experts_per_layer=COUNTS, **more):
    torch.manual_seed(0)
    config = LayerMoEConfig.from_dense(
        tiny_config(base, **fields(base) | more), num_experts_per_layer=num_experts_per_layer, classifier_layers=[2],
        router_top_k=top_k, **ADDED,
    )  # fmt: skip
    model = moved(LayerMoEForCausalLM(config).eval(), seed=4, scale=0.2)
    for ffn in model.expanded_ffns().values():
        if ffn.classifier is not None:
            torch.nn.init.zeros_(ffn.classifier.weight)
    return model


def saved_in(root):
    """`saved("olmoe")`: a folder with a base, its expansion, and that after something like training; made once."""

    def made(base="olmoe"):
        folder = root / base
        if not folder.exists():
            save_dense(folder / "base", base, **fields(base))
            expand_checkpoint(folder / "base", folder / "new", PLAN, **ADDED)
            move(folder / "new", folder / "moved", seed=4)
        return folder

    return made
