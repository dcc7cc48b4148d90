"""What a pack's files say is checked: values of its routers, and the record that a joined model keeps of it."""

import json
import re
import shutil

import pytest
import torch
from conftest import save_dense
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_join import EL, HU, load, make_pack

from hf_moe_expand import join_expansions, leave_out_pack
from hf_moe_expand.core.errors import InputError

ROUTER = "model.layers.0.mlp.router.weight"


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    home = tmp_path_factory.mktemp("packs")
    base = save_dense(home / "base")
    return [make_pack(home / "qwen-el", base, EL, 1), make_pack(home / "qwen-hu", base, HU, 2)]


@pytest.fixture(scope="module")
def joined(packs, tmp_path_factory):
    join_expansions(packs, tmp_path_factory.mktemp("joined") / "two")
    return tmp_path_factory.getbasetemp() / "joined0" / "two"


def copied(folder, tmp_path):
    shutil.copytree(folder, tmp_path / folder.name)
    return tmp_path / folder.name


def with_record(folder, number=1, change=None, **fields):
    """Changes the record of a joined model's pack: fields of its configuration, then facts and tensors."""
    file = folder / f"pack_{number}.safetensors"
    with safe_open(file, "pt") as opened:
        facts = json.loads(opened.metadata()["pack"])
    tensors = load_file(file)
    facts["config"] = json.dumps({**json.loads(facts["config"]), **fields})
    if change is not None:
        change(facts, tensors)
    save_file(tensors, file, metadata={"pack": json.dumps(facts)})
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e38, 65505.0])
@pytest.mark.parametrize("kind", ["router", "classifier"])
def test_values_that_no_training_makes_do_not_join(packs, tmp_path, value, kind):
    pack = copied(packs[0], tmp_path)
    tensors = load_file(pack / "model.safetensors")
    tensors[f"model.layers.2.mlp.{kind}.weight"][1, 3] = value
    save_file(tensors, pack / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=rf"layers\.2\.mlp\.{kind}\.weight' holds .*damaged"):
        join_expansions([pack, packs[1]], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_largest_that_may_be_joins(packs, tmp_path):
    pack = copied(packs[0], tmp_path)
    tensors = load_file(pack / "model.safetensors")
    tensors[ROUTER][1, 3] = 65504.0
    save_file(tensors, pack / "model.safetensors", metadata={"format": "pt"})
    join_expansions([pack, packs[1]], tmp_path / "out")
    tensors[ROUTER] = tensors[ROUTER].half()
    tensors[ROUTER][0, 3] = -65504.0  # half of the difference is all that float16 holds
    save_file(tensors, pack / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"router\.weight: the joined values are not finite in F16"):
        join_expansions([pack, packs[1]], tmp_path / "no")


def swapped(facts, tensors):
    tensors["0.router.weight"] = tensors["0.router.weight"][:, :16].contiguous()


def cut(facts, tensors):
    del tensors["2.router.weight"]


def more(facts, tensors):
    tensors["1.router.weight"] = tensors["0.router.weight"].clone()


def counted(facts, tensors):
    tensors["0.router.weight"] = tensors["0.router.weight"].to(torch.int32)


def not_a_number(facts, tensors):
    tensors["2.classifier.weight"][0, 0] = float("nan")


def scaled(facts, tensors):
    facts["scale"] = float("nan")


def without_factor(facts, tensors):
    facts["scale"] = 0.0


def named(facts, tensors):
    facts["name"] = "two\nlines"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swapped, "'model.layers.0.mlp.router.weight' of shape [2, 32], but there is one of shape [2, 16]"),
        (cut, "'model.layers.2.mlp.router.weight' of shape [3, 32], but there is none"),
        (more, "holds 'router.weight' of layer 1, which its record does not name"),
        (counted, "is of type torch.int32"),
        (not_a_number, "holds NaN or infinite values"),
        (scaled, "the factor of its router is nan"),
        (without_factor, "the factor of its router is 0.0"),
        (named, "is no name of a pack"),
    ],
)
def test_a_record_whose_tensors_do_not_fit_it_is_refused(joined, tmp_path, change, said):
    model = with_record(copied(joined, tmp_path), change=change)
    for out in ("qwen-hu", "qwen-el"):
        with pytest.raises(InputError, match=rf"pack_1\.safetensors.*{re.escape(said)}"):
            leave_out_pack(model, tmp_path / "out", out)
    with pytest.raises(InputError, match=re.escape(said)):
        join_expansions([model, model], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": 64}, {"intermediate_size": 64}, {"num_attention_heads": 8}, {"rms_norm_eps": 1e-3},
        {"num_experts_per_layer": [3, 1, 3]}, {"num_experts_per_layer": [2, 1, 3, 1], "num_hidden_layers": 4},
        {"router_top_k": 1}, {"classifier_layers": [0, 2]}, {"expert_kind": "lora", "lora_rank": 4, "lora_alpha": 8.0},
        {"expansions": []}, {"earlier_experts_per_layer": [[2, 1, 2]]},
    ],
)  # fmt: skip
def test_a_record_of_another_model_is_refused(joined, tmp_path, fields):
    model = with_record(copied(joined, tmp_path), **fields)
    with pytest.raises(InputError, match=r"pack_1\.safetensors") as caught:
        leave_out_pack(model, tmp_path / "out", "qwen-hu")
    assert "tmp" not in str(caught.value).replace(str(tmp_path), "")


def test_a_pack_that_is_left_alone_names_no_code_of_others(joined, packs, tmp_path):
    foreign = {"AutoConfig": "evil/repo--code.Config", "AutoModelForCausalLM": "evil/repo--code.Model"}
    model = with_record(copied(joined, tmp_path), auto_map=foreign)
    leave_out_pack(model, tmp_path / "one", "hu")
    found, own = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "one", packs[0]))
    assert found == own
    load(tmp_path / "one")
