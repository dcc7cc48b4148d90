"""The packaged recipes: each is found good without a network, explained key by key, and has the papers' numbers."""

import re
import socket
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from conftest import invoke, tiny_config
from encoder_decoders import tiny

from hf_moe_expand.analysis.settings import GateSettings
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.schema import changed
from hf_moe_expand.runs.pipeline import validate_recipe
from hf_moe_expand.runs.recipe import Recipe
from hf_moe_expand.runs.recipes import WholeRecipe, find_recipe, packaged_files, packaged_recipes

NAMES = list(packaged_files())
# Of the real bases: backbone, layers, positions.
BASES = {
    "Qwen/Qwen1.5-1.8B": ("qwen2", 24, 32768),
    "Qwen/Qwen2.5-0.5B": ("qwen2", 24, 32768),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 28, 131072),
    "Qwen/Qwen2.5-7B": ("qwen2", 28, 131072),
    "bigscience/bloom-1b7": ("bloom", 24, None),
    "bigscience/bloom-560m": ("bloom", 24, None),
    "HuggingFaceTB/SmolLM2-135M": ("llama", 30, 8192),
    "google/gemma-2b": ("gemma", 18, 8192),
    "meta-llama/Llama-3.1-8B": ("llama", 32, 131072),
    "meta-llama/Llama-3.2-3B": ("llama", 28, 131072),
    "$NLLB": ("m2m_100", "12 encoder layers, 12 decoder", 1024),
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(self, address):
        raise AssertionError(f"a connection to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for variable in ("MADLAD", "INSTRUCT", "NLLB"):
        monkeypatch.delenv(variable, raising=False)


def load(name):
    return Recipe.load(find_recipe(name), unset_ok=True)


@pytest.mark.parametrize("name", NAMES)
def test_each_passes_offline_and_its_plans_fit_its_base(name, tmp_path):
    recipe = load(name)
    assert recipe.output == f"runs/{name}"
    assert validate_recipe(recipe, offline=True)
    backbone, layers, positions = BASES[recipe.base]
    depth = {"n_layer" if backbone == "bloom" else "num_hidden_layers": layers}
    if positions is not None:
        depth["max_position_embeddings"] = positions
    if backbone == "m2m_100":
        tiny("m2m_100", encoder_layers=12, decoder_layers=12, max_position_embeddings=positions).config.save_pretrained(
            tmp_path / "base"
        )
    else:
        tiny_config(backbone, **depth).save_pretrained(tmp_path / "base")
    narrow = changed(recipe.expand, lora_rank=8) if recipe.expand.expert_kind == "lora" else recipe.expand
    found = validate_recipe(changed(recipe, base=str(tmp_path / "base"), expand=narrow), offline=True)
    assert f"base: {tmp_path / 'base'}, {backbone}, {layers} layers" in found
    assert sum(line.startswith("expansion ") and " experts, " in line for line in found) == len(recipe.all_expansions)


@pytest.mark.parametrize("name", NAMES)
def test_each_says_what_it_is_and_explains_every_key(name):
    files = [Path(file).read_text("utf-8").splitlines() for file, _ in WholeRecipe.load(packaged_files()[name]).layers]
    lines = files[-1]
    assert re.fullmatch(r"# (MoE-LPR|LayerMoE|DMoE|DeltaMoE|EOM|FOM|CMR): .+ \(.+ et al\.( \d{4})?\)", lines[0])
    assert lines[1] == "#"
    assert "# Differences from the paper:" in lines
    assert max(map(len, lines)) <= 120
    explained = {"inherits"}  # a key that the file of a parent explains needs no comment
    for before, line in pairwise(line for file in files for line in file):
        key = re.match(r" *(?:- )?(\w+):", line)
        # A language and its source need no comment.
        if key is None or re.search(r": (hub:|\$MADLAD/)", line):
            continue
        if "  # " in line or before.lstrip().startswith("# "):
            explained.add(key[1])
        assert key[1] in explained, line


def test_their_files_hold_what_differs():
    files = [*packaged_files().values(), *packaged_files("methods").values()]
    assert sum(len(file.read_text("utf-8").splitlines()) for file in files) <= 900


# METHODS.md and the papers: dotted keys of the first expansion, and what they must be.
MOE_LPR_STAGES = {
    "post_pretrain.block_size": 1024, "post_pretrain.balance_coef": 0.01, "post_pretrain.learning_rate": 5e-5,
    "post_pretrain.lr_scheduler_type": "cosine", "post_pretrain.bf16": True,
    "review.block_size": 512, "review.old_documents": 50_000, "review.new_per_old": 2,
    "review.language_prior_coef": 0.1,
    "review.balance_coef": 0, "review.learning_rate": 5e-5, "plan.top_k": 2,
}  # fmt: skip
LAYER_MOE = {
    **MOE_LPR_STAGES, "plan.method": "layer-moe", "plan.total_experts": 3 * 24, "plan.minimum": 2,
    "plan.classifier_layers": 7, "plan.classifier_choice": "similarity", "review.classifier_coef": 0.1,
    "post_pretrain.tokens_per_language": 2e9, "analysis.tokens": 100_000, "sequences": (512, 768),
}  # fmt: skip
DMOE = {
    "plan.method": "dmoe", "plan.groups": 9, "plan.ratio": 0.4, "plan.top_k": 2, "deviation.steps": 10,
    "deviation.learning_rate": 8e-6, "deviation.batch_size": 2048, "deviation.block_size": 512,
    "deviation.last_layers": 3, "group.group_coef": 1.28, "group.block_size": 2048, "joint.block_size": 2048,
    "joint.balance_coef": 0.02, "group.learning_rate": 2e-5, "joint.learning_rate": 2e-5,
    "sequences": (512, 512), "languages": 18,
}  # fmt: skip
DELTA = {
    "plan.method": "moe-lpr", "plan.experts": 4, "plan.top_k": 2, "post_pretrain.block_size": 2048,
    "post_pretrain.balance_coef": 0.01, "post_pretrain.tokens_per_language": 3e9, "review.new_per_old": 2,
    "review.old_documents": 50_000, "graft.scale": 1.0, "sequences": (512, 512), "new": "bn hu sr",
}  # fmt: skip
G1, G2 = "el hu tr", "bn hi ne"
# MoE-LPR's baselines and its one-stage ablation: 0.138 billion tokens of replay beside 24.
ONE_STAGE = {
    "plan.method": "moe-lpr", "post_pretrain.block_size": 1024, "post_pretrain.tokens_per_language": 8e9,
    "post_pretrain.learning_rate": 5e-5, "review": None, "new": G1,
}  # fmt: skip
REPLAYED = {"post_pretrain.replay": True, "post_pretrain.replay_share": 0.0057}
MOE = {
    **ONE_STAGE, "plan.experts": 6, "plan.top_k": 2, "post_pretrain.balance_coef": 0.01,
    "post_pretrain.everything": True,
}  # fmt: skip
LORA_MOE = {
    **ONE_STAGE, "plan.experts": 9, "plan.top_k": 9, "expand.expert_kind": "lora", "expand.lora_rank": 180,
    "post_pretrain.balance_coef": 0,
}  # fmt: skip
ELBAYAD = {
    "plan.method": "moe-lpr", "plan.experts": 6, "plan.top_k": 2, "post_pretrain.balance_coef": 0.01,
    "post_pretrain.balance_counts": "top-1", "post_pretrain.block_size": 1024, "post_pretrain.adam_beta1": 0.9,
    "post_pretrain.adam_beta2": 0.98, "post_pretrain.adam_epsilon": 1e-6,
    "post_pretrain.lr_scheduler_type": "inverse_sqrt", "post_pretrain.warmup_steps": 800,
    "post_pretrain.max_steps": 10_000, "sequences": (1024, 512), "new": "el hu ga gd",
    # Gaelic has 16,316 pairs, two documents each.
    "review.old_documents": 15_000, "review.new_per_old": 2,
}  # fmt: skip
SENTENCE_PAIRS = {
    **ELBAYAD, "post_pretrain.block_size": 256, "plan.only_layers": "encoder.1-11/2,decoder.1-11/2",
    "post_pretrain.label_smoothing_factor": 0.1, "review.label_smoothing_factor": 0.1,
}  # fmt: skip
NUMBERS = {
    "moe-lpr-qwen1.5-1.8b": {
        **MOE_LPR_STAGES, "plan.method": "moe-lpr", "plan.experts": 6, "plan.classifier_layers": 0,
        "post_pretrain.tokens_per_language": 8e9, "sequences": (512, 512), "new": G1,
    },
    "moe-lpr-qwen1.5-1.8b-one-stage": {
        **ONE_STAGE, **REPLAYED, "plan.experts": 6, "plan.top_k": 2, "post_pretrain.language_prior_coef": 0.1,
        "post_pretrain.everything": False,
    },
    "moe-qwen1.5-1.8b": {**MOE, **REPLAYED},
    "moe-qwen1.5-1.8b-no-replay": {**MOE, "post_pretrain.replay": False},
    "loramoe-qwen1.5-1.8b": {**LORA_MOE, **REPLAYED, "post_pretrain.localized_balance_coef": 0.1},
    "loramoe-qwen1.5-1.8b-no-replay": {
        **LORA_MOE, "post_pretrain.replay": False, "post_pretrain.localized_balance_coef": 0,
    },
    "layermoe-qwen1.5-1.8b-g1": {**LAYER_MOE, "new": G1},
    "layermoe-qwen1.5-1.8b-g2": {**LAYER_MOE, "new": G2},
    "layermoe-qwen1.5-1.8b-g1-and-g2": {**LAYER_MOE, "new": f"{G1} {G2}"},
    "layermoe-qwen1.5-1.8b-g1-then-g2": {**LAYER_MOE, "new": G1, "second": (G2, 48, 1, 5)},
    "layermoe-qwen1.5-1.8b-g2-then-g1": {**LAYER_MOE, "new": G2, "second": (G1, 48, 1, 5)},
    "layermoe-llama-3.2-3b-g1": {**LAYER_MOE, "new": G1, "plan.total_experts": 84},
    "dmoe-bloom-560m": DMOE,
    "dmoe-bloom-1.7b": DMOE,
    "dmoe-gemma-2b": DMOE,
    "dmoe-qwen2.5-0.5b": DMOE,
    "dmoe-qwen2.5-1.5b": DMOE,
    "dmoe-bloom-560m-128-languages": {**DMOE, "plan.groups": [8] * 16, "deviation.batch_size": 16, "languages": 128},
    "deltamoe-qwen2.5-7b": {**DELTA, "graft.instruct": "Qwen/Qwen2.5-7B-Instruct"},
    "deltamoe-llama-3.1-8b": {**DELTA, "graft.instruct": "meta-llama/Llama-3.1-8B-Instruct"},
    "deltamoe-qwen2.5-7b-own-sft": {**DELTA, "graft.instruct": "$INSTRUCT"},
    "eom-qwen1.5-1.8b": {**ELBAYAD, "post_pretrain.masking.expert_output": 0.1},
    "fom-qwen1.5-1.8b": {**ELBAYAD, "post_pretrain.masking.final_output": 0.3},
    "cmr-qwen1.5-1.8b": {
        **ELBAYAD, "expand.conditional_routing": True, "post_pretrain.masking.conditional_routing": 0.2,
        "post_pretrain.budget_coef": 0.1, "post_pretrain.gate_budget": 0.8,
    },
    "eom-nllb-600m": {**SENTENCE_PAIRS, "post_pretrain.masking.expert_output": 0.1},
    "fom-nllb-600m": {**SENTENCE_PAIRS, "post_pretrain.masking.final_output": 0.3},
    "cmr-nllb-600m": {
        **SENTENCE_PAIRS, "expand.conditional_routing": True, "post_pretrain.masking.conditional_routing": 0.2,
        "post_pretrain.budget_coef": 0.1, "post_pretrain.gate_budget": 0.8,
    },
    "cmr-top-1-nllb-600m": {
        **SENTENCE_PAIRS, "plan.top_k": 1, "expand.conditional_routing": True,
        "post_pretrain.masking.conditional_routing": 0.1, "post_pretrain.budget_coef": 0.1,
        "post_pretrain.gate_budget": 0.6,
    },
    "recommended": {
        "plan.method": "moe-lpr", "plan.experts": 2, "plan.exclusive": True,
        "post_pretrain.learning_rate": 2e-3, "post_pretrain.max_steps": 150,
        "post_pretrain.block_size": 512, "gates": GateSettings(), "new": "hu",
    },
    "laptop-smollm2-135m": {
        "post_pretrain.learning_rate": 2e-3, "review.learning_rate": 3e-3,
        "plan.method": "moe-lpr", "plan.experts": 3, "plan.only_layers": "9-20", "post_pretrain.balance_coef": 0.01,
        "review.language_prior_coef": 0.1, "review.new_per_old": 2, "new": "hu",
    },
}  # fmt: skip


def sequences(training, gpus=8):
    return training["per_device_train_batch_size"] * training["gradient_accumulation_steps"] * gpus


def found_at(recipe, key):
    """What a recipe has where the table above names it."""
    first = recipe.all_expansions[0]
    if key == "new":
        return " ".join(first.new)
    if key == "languages":
        return len(first.new)
    if key == "second":
        second = recipe.all_expansions[1]
        return " ".join(second.new), second.plan.total_experts, second.plan.minimum, second.plan.classifier_layers
    if key == "sequences":
        stages = (first.group, first.joint) if first.family == "dmoe" else (first.post_pretrain, first.review)
        gpus = 1 if "SmolLM2" in recipe.base else 8
        return tuple(sequences(stage.given, gpus) for stage in stages)
    if key == "review":
        return first.review
    value = first
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return [len(group) for group in value] if key == "plan.groups" and isinstance(value, list) else value


@pytest.mark.parametrize("name", NAMES)
def test_the_papers_numbers(name):
    recipe = load(name)
    assert {key: found_at(recipe, key) for key in NUMBERS[name]} == NUMBERS[name]
    assert any(key.startswith("graft") for key in NUMBERS[name]) != (recipe.all_expansions[-1].graft is None)
    if name.startswith(("layermoe", "moe-lpr")):
        assert list(recipe.old) == ["en", "es", "zh"]


def test_the_128_languages_are_in_the_papers_groups(published):
    recipe = load("dmoe-bloom-560m-128-languages")
    assert recipe.plan.groups[9] == ["bn", "gu", "kn", "ml", "mr", "pa", "ta", "te"]
    assert sorted(code for group in recipe.plan.groups for code in group) == sorted(recipe.new)
    assert sorted(load("dmoe-bloom-560m").new) == sorted(published["dmoe_bloom_560m_grouping"]["languages"])


def test_names_and_files(tmp_path, monkeypatch):
    assert {recipe.name for recipe in packaged_recipes()} == set(NAMES) == set(NUMBERS)
    name = "moe-lpr-qwen1.5-1.8b"
    listed = next(line for line in invoke("recipes", "ls").splitlines() if line.startswith(name))
    assert listed.split("  ")[0] == name
    assert all(word in listed for word in ("MoE-LPR", "Qwen/Qwen1.5-1.8B", "Greek"))
    shown = invoke("recipes", "show", name)
    assert yaml.safe_load(shown)["plan"]["experts"] == 6
    assert "inherits" not in shown
    alone = "laptop-smollm2-135m"
    assert invoke("recipes", "show", alone) == packaged_files()[alone].read_text("utf-8")
    assert invoke("recipes", "ls").splitlines()[-1] == "to inherit: deltamoe, dmoe, layermoe, moe-lpr"
    assert f"{name}: ok" in invoke("validate", "--offline", name)
    # A file of the same name wins.
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(yaml.safe_dump({**yaml.safe_load(shown), "base": "org/other"}))
    assert "org/other is not on this machine" in invoke("validate", "--offline", name)
    for verb in (["validate"], ["run"], ["recipes", "show"]):
        with pytest.raises(InputError, match=r"yaml: no such file, .*; did you mean `moe-lpr-qwen1.5-1.8b`"):
            invoke(*verb, "moe-lpr-qwen.yaml")
    with pytest.raises(InputError, match=r"zzz: no such file, .* `hf-moe-expand recipes ls` shows them"):
        find_recipe("zzz")
