"""The guide to serving, run."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import BACKBONE_NAMES, tiny_config
from guides import DOCS, blocks, expanded, plain, run, workplace_in
from transformers import AutoModel, AutoTokenizer
from transformers.cli.serving.model_manager import ModelManager
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.hub import publish as hub
from hf_moe_expand.modeling import LayerMoEConfig


@pytest.fixture
def workplace(tmp_path, monkeypatch, help_text):
    return workplace_in(tmp_path, monkeypatch, help_text)


@pytest.mark.guides
def test_the_serving_guide(workplace, monkeypatch):
    plan = Plan("moe-lpr", [2] * 8, old=["en"], new=["el"], exclusive=True)
    expand_checkpoint("Qwen/Qwen2.5-0.5B", "qwen-el-2", plan)
    Path("me").mkdir()
    Path("me/qwen-el").symlink_to(Path("qwen-el-2").resolve())
    pushed = []
    monkeypatch.setattr(hub, "push_to_hub", lambda *where, **how: pushed.append((where, how)))
    said = run("serving.md")
    assert [where for where, _ in pushed] == [("qwen-el-2", "me/qwen-el")]
    assert pushed[0][1]["expansion_only"]
    assert pushed[0][1]["dry_run"]
    assert Path("qwen-greek/config.json").is_file()
    assert said["export qwen-el-2"].strip().endswith(": Qwen2ForCausalLM")
    served = []
    vllm = SimpleNamespace(LLM=lambda model, **options: served.append((model, options)))
    monkeypatch.setitem(sys.modules, "vllm", vllm)  # which is not installed: the block alone is looked at
    monkeypatch.setattr(transformers, "LayerMoEForCausalLM", None, raising=False)
    manager, loaded = ModelManager(device="cpu", trust_remote_code=True), []  # of `transformers serve`
    load = manager.load_model_and_processor
    monkeypatch.setattr("transformers.cli.transformers.main", lambda: loaded.append(load("qwen-el-2@main")[0]))
    namespace = {}
    for block in blocks("serving.md", "python"):
        exec(block, namespace)
    for model in (namespace["model"], *loaded):
        assert type(model).__name__ == "LayerMoEForCausalLM"
    assert len(loaded) == 1
    manager.shutdown()
    assert [name for name, _ in served] == ["qwen-el-2"]
    assert AutoTokenizer.from_pretrained("qwen-el-2", trust_remote_code=True).padding_side == "right"


def test_what_serving_back_ends_ask_for_holds_where_the_guide_says_so(workplace, monkeypatch):
    expanded("model", [2] * 8, [1])
    auto_map = json.loads(Path("model/config.json").read_text("utf-8"))["auto_map"]
    assert {"AutoConfig", "AutoModel"} <= set(auto_map)
    assert get_class_from_dynamic_module(auto_map["AutoModel"], "model").is_backend_compatible()
    sdpa, asked = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def attention(module, query, key, value, *_, attention_instances=None, scaling=None, **__):
        asked.append(attention_instances)
        return sdpa(module, query, key, value, None, scaling=scaling)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "vllm", attention)
    ids, ready, planned = torch.arange(12)[None], set(), set()
    for backbone in BACKBONE_NAMES:
        config = LayerMoEConfig.from_dense(tiny_config(backbone), num_experts_per_layer=[3, 1, 2])
        assert config.get_text_config() is config
        fields = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
        assert not any(hasattr(config, name) for name in fields)
        config._attn_implementation = "vllm"
        instances: dict = {}
        asked.clear()
        try:
            model = AutoModel.from_config(config).eval()
            model(ids, position_ids=ids, use_cache=False, attention_instances=instances, return_dict=False)
        except (AttributeError, KeyError):  # attention that is none of the interface's
            continue
        if model.is_backend_compatible() and [given is instances for given in asked] == [True] * 3:
            ready.add(plain(backbone))
            if any("experts" in rule for rule in model.tp_plan):
                planned.add(plain(backbone))
    row = re.search(r"the backbone's own: (.*?)\. Not (.*?) \|", (DOCS / "serving.md").read_text("utf-8"))
    named, others = ({plain(name) for name in group.split(", ")} for group in row.groups())
    assert ready == named
    assert named | others == {plain(name) for name in BACKBONE_NAMES}
    assert named - planned == {"gpt2", "opt"}
