"""The core and its optional parts: which code a checkpoint has, and what a part can do."""

import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import refused, run_fresh, run_python, tiny_config
from transformers import CONFIG_MAPPING

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM, modeling
from hf_moe_expand.modeling.part import parts_text
from hf_moe_expand.modeling.parts import PARTS

CODE = Path(modeling.__file__).parent
GATE = {"layer": 1, "languages": [["en"], ["el"]]}
EXPANSIONS = [{"old_languages": ["en"], "new_languages": ["el"]}]
# What a checkpoint of each configuration uses.
USED = {
    "plain": ({}, []),
    "classifiers": ({"classifier_layers": [1]}, []),
    "conditional": ({"conditional_routing": True}, ["cmr"]),
    "lora": ({"expert_kind": "lora", "lora_rank": 2, "lora_alpha": 4.0}, ["lora"]),
    "added": ({"expert_kind": "added", "expert_width": 8}, ["added"]),
    "gated": ({"exclusive_experts": True, "language_gate": GATE}, ["gate"]),
    "adapters": (
        {"exclusive_experts": True, "expert_kind": "adapter", "adapters": [{"maps": {"mlp.up_proj": [2, 1.5]}}]},
        ["languages"],
    ),
}  # fmt: skip


def build(fields, cls=LayerMoEForCausalLM, config_class=LayerMoEConfig):
    torch.manual_seed(0)
    fields = {"num_experts_per_layer": [1, 2, 2], "expansions": EXPANSIONS} | fields
    return cls(config_class.from_dense(tiny_config("llama"), **fields)).eval()


def code_of(folder):
    return {file.name: file.read_text("utf-8") for file in sorted(folder.glob("*.py"))}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of each."""
    home = tmp_path_factory.mktemp("parts")
    for name, (fields, _) in USED.items():
        build(fields).save_pretrained(home / name)
    return home


@pytest.mark.parametrize("name", USED)
def test_a_checkpoint_has_the_code_of_its_own_parts_alone(name, saved):
    parts = USED[name][1]
    assert list(json.loads((saved / name / "config.json").read_text())["parts"]) == parts
    code = code_of(saved / name)
    assert {file for file in code if file.startswith("part_")} == {f"part_{part}.py" for part in parts}
    assert code["parts.py"] == parts_text(parts)
    assert all(text == (CODE / file).read_text("utf-8") for file, text in code.items() if file != "parts.py")


def test_the_core_names_no_part():
    words = "gates?|gated|adapters?|lora|added|conditional|encoder_decoder|packs?|vllm"
    named = re.compile(rf"(?<![a-z])({words})(?![a-z])")
    core = (
        "backbone", "configuration_dmoe", "configuration_layer_moe", "dispatch", "expanded_config", "expanded_ffn",
        "expanded_model", "modeling_dmoe", "modeling_layer_moe", "routing", "routing_control",
    )  # fmt: skip
    for name in core:
        text = (CODE / f"{name}.py").read_text("utf-8").replace("is_encoder_decoder", "").lower()
        assert not named.findall(text), name


def test_saved_over_a_checkpoint_of_other_parts_nothing_of_them_stays_but_a_users_files_do(saved, tmp_path):
    own = dict.fromkeys(("__init__.py", "part_mine.py", "train.py"), "mine")
    shutil.copytree(saved / "gated", tmp_path / "out")
    for name, content in own.items():
        (tmp_path / "out" / name).write_text(content)
    build({}).save_pretrained(tmp_path / "out")
    assert code_of(tmp_path / "out") == code_of(saved / "plain") | own


def test_a_configuration_alone_has_its_code_too(saved, tmp_path):
    config = build(USED["gated"][0]).config
    config.auto_map = {name: f"me/model--{place}" for name, place in LayerMoEForCausalLM.auto_map(config).items()}
    config.save_pretrained(tmp_path)
    code = code_of(tmp_path)
    assert {"configuration_layer_moe.py", "parts.py", "part_gate.py"} <= code.keys() <= code_of(saved / "gated").keys()
    assert code["parts.py"] == parts_text(["gate"])


SCALED = '''"""Expert 1, times a number."""

from functools import partial

from .expanded_ffn import copy_ffn
from .part import BasePart


def _scaled(factor, ffn):
    expert = copy_ffn(ffn)
    expert.register_forward_hook(partial(_times, factor))
    return expert


def _times(factor, module, inputs, output):
    return factor * output


class Part(BasePart):
    name = "scaled"

    def make_expert(self, layer, number):
        return partial(_scaled, self.settings) if number == 1 else None
'''


def test_a_new_part_is_a_small_file_that_travels(tmp_path):
    assert len(SCALED.splitlines()) < 30
    shutil.copytree(CODE, tmp_path / "house", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "house" / "part_scaled.py").write_text(SCALED)
    (tmp_path / "house" / "parts.py").write_text(parts_text([*PARTS, "scaled"]))
    asked = "model(ids, languages='el').logits"
    run_fresh(
        f"""
import sys, torch
sys.path.insert(0, ".")
from transformers import LlamaConfig
from house import LayerMoEConfig, LayerMoEForCausalLM
torch.manual_seed(0)
dense = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
fields = dict(num_experts_per_layer=[2, 2], exclusive_experts=True, expansions={EXPANSIONS})
plain = LayerMoEForCausalLM(LayerMoEConfig.from_dense(dense, **fields)).eval()
model = LayerMoEForCausalLM(LayerMoEConfig.from_dense(dense, **fields, parts={{"scaled": 3.0}})).eval()
model.load_state_dict(plain.state_dict())
x, ids = torch.randn(1, 4, 32), torch.arange(1, 13)[None]
assert torch.equal(model.expanded_ffns()[0].experts[1](x), 3.0 * plain.expanded_ffns()[0].experts[1](x))
assert torch.equal({asked.replace("'el'", "'en'")}, plain(ids, languages="en").logits)
model.save_pretrained("out")
torch.save({asked}.detach(), "logits.pt")
        """,
        cwd=tmp_path,
    )
    assert (tmp_path / "out" / "part_scaled.py").read_text() == SCALED
    shutil.rmtree(tmp_path / "house")
    run_fresh(
        f"""
import torch
from transformers import AutoModelForCausalLM
ids = torch.arange(1, 13)[None]
model = AutoModelForCausalLM.from_pretrained("out", trust_remote_code=True).eval()
assert torch.equal({asked}, torch.load("logits.pt"))
        """,
        cwd=tmp_path,
    )


@pytest.mark.parametrize("name", USED)
def test_fields_of_earlier_versions_read_as_the_part_has_them(name):
    fields = USED[name][0]
    config = build(fields).config
    assert {field: getattr(config, field) for field in fields} == fields
    again = LayerMoEConfig.from_dict(config.to_dict())
    assert (again.parts, {field: getattr(again, field) for field in fields}) == (config.parts, fields)


def test_experts_of_each_expansion_may_differ():
    each = [{"rank": 2, "alpha": 4.0}, None, {"rank": 3, "alpha": 3.0}]
    counts = {"num_experts_per_layer": [1, 4, 3], "earlier_experts_per_layer": [[1, 2, 1], [1, 3, 2]]}
    old = {"packs": [1, 1, 1], "updates_of_packs": [[2, 4.0], None, [3, 3.0]]}
    new = {"parts": {"lora": {"each": each}, "joined": [1, 1, 1]}}
    for fields in (old, new):
        config = LayerMoEConfig.from_dense(tiny_config("llama"), **counts, **fields, exclusive_experts=True)
        assert config.parts == new["parts"]
        experts = LayerMoEForCausalLM(config).expanded_ffns()
        kinds = {layer: [type(e.up_proj).__name__ for e in ffn.experts] for layer, ffn in experts.items()}
        assert kinds == {1: ["Linear", "LoraLinear", "Linear", "LoraLinear"], 2: ["Linear", "Linear", "LoraLinear"]}
        assert experts[2].experts[2].up_proj.lora_A.weight.shape[0] == 3


def test_settings_of_another_form_are_refused():
    config = build({}).config
    assert config.language_gate is None
    said = r"language_gate: is a part's field: set it in config\.parts"
    refused(setattr, config, "language_gate", GATE, raises=AttributeError, says=said)
    for parts, said in (
        ({"wings": {}}, "parts: wings: this code does not have it"),
        ({"joined": ["el"]}, "packs is .'el'.: must be the number of expansions"),
    ):
        refused(build, {"parts": parts}, says=said, raises=ValueError)


def test_a_field_that_contradicts_a_part_is_refused():
    config, said = build(USED["lora"][0]).config.to_dict(), r"but parts\.lora says .*: give one of them"
    assert LayerMoEConfig.from_dict(config | {"lora_alpha": 4.0, "expert_kind": "lora"}).parts == config["parts"]
    for fields in ({"lora_alpha": 8.0}, {"expert_kind": "ffn"}):
        refused(LayerMoEConfig.from_dict, config | fields, says=said, raises=ValueError)


def test_a_mixture_is_a_part_where_the_backbone_has_one():
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"intermediate_size": 48, "vocab_size": 64, "moe_intermediate_size": 16}
    hybrid = {"num_local_experts": 0, "mamba_n_heads": 4, "shared_intermediate_size": 48}
    for backbone, fields, is_mixture in (
        ("granitemoehybrid", {**hybrid, "layer_types": ["attention"] * 3}, False),
        ("nemotron_h", {"layers_block_type": ["mlp"] * 3}, False),
        ("nemotron_h", {"layers_block_type": ["moe"] * 3}, True),
        ("qwen2_moe", {"num_experts": 4}, True),
    ):
        dense = CONFIG_MAPPING[backbone](**sizes, **fields)
        with torch.device("meta"):
            model = LayerMoEForCausalLM(LayerMoEConfig.from_dense(dense, num_experts_per_layer=[1, 1, 1]))
        assert ("mixture" in model.config.parts) == is_mixture, backbone


def test_a_pickled_mixtures_loss_is_off_in_another_process():
    dense = CONFIG_MAPPING["qwen2_moe"](num_hidden_layers=2, num_experts=4)
    config = LayerMoEConfig.from_dense(dense, num_experts_per_layer=[1, 1])
    assert vars(config)["router_aux_loss_coef"] > 0
    code = "import pickle, hf_moe_expand; config = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
    code += "config.output_router_logits = True; print(config.output_router_logits, config.router_aux_loss_coef)"
    assert run_python(code, pickle.dumps(config).hex()) == "False 0.0\n"


def test_tensor_parallel_plans_split_the_experts_that_a_part_lets_them_split():
    parts = ("gate_proj", "up_proj", "down_proj")
    for name, split in {"plain": "*", "gated": "*", "conditional": "*", "added": "0", "lora": ""}.items():
        plan = build(USED[name][0] | {"num_experts_per_layer": [2, 2, 2]})._tp_plan
        rules = {rule for rule in plan if ".mlp." in rule}
        assert rules == {f"model.layers.*.mlp.experts.{experts}.{part}" for experts in split for part in parts}
        assert "model.layers.*.self_attn.q_proj" in plan
    assert build(USED["adapters"][0])._tp_plan == {}


def test_a_part_that_was_set_later_is_saved_in_its_place(tmp_path):
    config = build(USED["adapters"][0]).config
    config.parts["gate"] = GATE
    model = LayerMoEForCausalLM(config)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "parts.py").read_text() == parts_text(["gate", "languages"])
    # A gate's parameters stand after adapters, as optimizers of earlier versions have them.
    layer = [name for name, _ in model.named_parameters() if name.startswith("model.layers.1.")]
    assert [name.rpartition(".")[0] for name in layer[-2:]] == ["model.layers.1.language_gate"] * 2
