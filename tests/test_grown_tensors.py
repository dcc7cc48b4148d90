"""Growth, tensor by tensor: each one of a grown checkpoint against its definition."""

import json
import shutil

import pytest
import torch
from conftest import byte_tokenizer, refused, save_dense
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_moe_expand import Plan, expand_checkpoint, grow_checkpoint
from hf_moe_expand.checkpoint.expand import add_experts, versions
from hf_moe_expand.checkpoint.new_experts import new_weight
from hf_moe_expand.checkpoint.records import ExpansionRecord
from hf_moe_expand.core.schema import changed, read

FIRST = Plan("layer-moe", [3, 1, 2], [0, 2], old=["en"], new=["el"])
SECOND = Plan("moe-lpr", [5, 1, 4], [0, 2], old=["en", "el"], new=["tr"], grows_from=[3, 1, 2])
THIRD = Plan("moe-lpr", [5, 1, 6], [2], old=["en", "el", "tr"], new=["hi"], grows_from=[5, 1, 4])
KINDS = {
    "ffn": {},
    "conditional": {"conditional_routing": True},
    "lora": {"expert_kind": "lora", "lora_rank": 2, "lora_alpha": 4},
    "added": {"expert_kind": "added", "expert_width": 8},
}
SEED = 7
LAYER = "model.layers.{}.mlp."


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made("lora", torch.float32)`: an expanded checkpoint no two of whose rows are alike."""
    root = tmp_path_factory.mktemp("grown")

    def make(kind="ffn", dtype=torch.float32):
        folder = root / f"{kind}-{dtype}"
        if not folder.exists():
            save_dense(folder / "base", dtype=dtype)
            expand_checkpoint(folder / "base", folder / "expanded", FIRST, **KINDS[kind])
            model = AutoModelForCausalLM.from_pretrained(folder / "expanded")
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            model.save_pretrained(folder / "trained")
            byte_tokenizer().save_pretrained(folder / "trained")
        return folder / "trained"

    return make


def weights(folder):
    return load_file(folder / "model.safetensors")


def defined(before, plan, origin, expansions, kind="ffn"):
    """The tensors that growth by `plan` makes of `before`, from the definition."""
    expected = {name: value for name, value in before.items() if "classifier" not in name}
    for layer, (old, new) in enumerate(zip(plan.grows_from, plan.experts_per_layer, strict=True)):
        prefix = LAYER.format(layer)
        if old > 1:
            router = before[f"{prefix}router.weight"]
            drawn = new_weight("router.weight", (new, 32), (SEED, layer, old))[old:].to(router.dtype)
            expected[f"{prefix}router.weight"] = torch.cat([router, drawn]) if new > old else router
        if layer in plan.classifier_layers:
            name, router = f"{prefix}classifier.weight", before[f"{prefix}router.weight"]
            had = before.get(name, torch.zeros(1, 32, dtype=router.dtype))
            rows = [had, *[had[-1:]] * (expansions + 1 - len(had))]
            expected[name] = torch.cat(rows)
        for expert in range(old, new):
            anew = kind in ("lora", "added") and origin.get(layer, 0) == 0
            source = f"{prefix}experts.{1 if anew else origin.get(layer, 0)}."
            for name, value in before.items():
                if name.startswith(source):
                    inner = f"experts.{expert}.{name.removeprefix(source)}"
                    drawn = new_weight(inner, tuple(value.shape), (SEED, layer)).to(value.dtype) if anew else value
                    expected[prefix + inner] = drawn
    return expected


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("origin", [{}, {0: 2, 2: 1}], ids=["expert 0", "others"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_tensor_is_its_definition(made, kind, dtype, origin, tmp_path):
    trained = made(kind, dtype)
    grow_checkpoint(trained, tmp_path / "second", SECOND, copy_from=origin, seed=SEED)
    check_equal(weights(tmp_path / "second"), defined(weights(trained), SECOND, origin, 2, kind))
    grow_checkpoint(tmp_path / "second", tmp_path / "third", THIRD, copy_from=origin, seed=SEED)
    check_equal(weights(tmp_path / "third"), defined(weights(tmp_path / "second"), THIRD, origin, 3, kind))


def test_a_layer_that_gets_its_first_classifier_late_has_a_class_for_each_expansion(made, tmp_path):
    without = changed(SECOND, classifier_layers=[])
    grow_checkpoint(made(), tmp_path / "second", without, seed=SEED)
    assert not any("classifier" in name for name in weights(tmp_path / "second"))
    grow_checkpoint(tmp_path / "second", tmp_path / "third", THIRD, seed=SEED)
    found = {name: value for name, value in weights(tmp_path / "third").items() if "classifier" in name}
    check_equal(found, {LAYER.format(2) + "classifier.weight": torch.zeros(4, 32)})


def test_the_configuration_and_the_history_say_what_was_done(made, tmp_path):
    grow_checkpoint(made(), tmp_path / "second", SECOND, seed=SEED)
    grow_checkpoint(tmp_path / "second", tmp_path / "third", THIRD, copy_from={2: 3}, seed=SEED)
    config = json.loads((tmp_path / "third" / "config.json").read_text())
    assert config["num_experts_per_layer"] == [5, 1, 6]
    assert config["earlier_experts_per_layer"] == [[3, 1, 2], [5, 1, 4]]  # the oldest first
    assert config["classifier_layers"] == [2]
    assert [entry["new_languages"] for entry in config["expansions"]] == [["el"], ["tr"], ["hi"]]
    record = read(ExpansionRecord, config["expansions"][-1])
    assert record == ExpansionRecord(
        method="moe-lpr", base_model="base", base_revision=None, old_languages=["en", "el", "tr"],
        new_languages=["hi"], experts_per_layer=[5, 1, 6], classifier_layers=[2], seed=SEED,
        copied_experts={"0": 0, "1": 0, "2": 3}, versions=versions(),
        parameters=sum(value.numel() for value in weights(tmp_path / "third").values()),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "third")
    assert [ffn.experts_after_expansion for ffn in model.expanded_ffns().values()] == [(1, 3, 5, 5), (1, 2, 4, 6)]


def test_the_base_and_the_old_languages_are_the_historys(made, tmp_path):
    """Not the plan's, which may leave languages out, and not the last expansion's."""
    config = json.loads((made() / "config.json").read_text())
    config["expansions"][0] |= {"base_model": "Qwen/Qwen2.5-0.5B", "base_revision": "0123abc"}
    folder = tmp_path / "trained"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(made() / "model.safetensors")
    grow_checkpoint(folder, tmp_path / "second", changed(SECOND, old=["en"]))
    (_, entry) = json.loads((tmp_path / "second" / "config.json").read_text())["expansions"]
    assert (entry["base_model"], entry["base_revision"]) == ("Qwen/Qwen2.5-0.5B", "0123abc")
    assert entry["old_languages"] == ["en", "el"]


def test_new_experts_may_take_the_router_rows_of_the_ones_that_they_copy(made, tmp_path):
    record = ExpansionRecord(method="moe-lpr", old_languages=["en"], new_languages=["tr"], base_model="base")
    sources = {0: [2, 1], 1: [], 2: [1]}
    add_experts(made(), tmp_path / "out", sources, record, copy_router_rows=True)
    before, found = weights(made()), weights(tmp_path / "out")
    for layer, experts in sources.items():
        prefix = LAYER.format(layer)
        for number, expert in enumerate(experts, start=FIRST.experts_per_layer[layer]):
            for name in (f"{part}_proj.weight" for part in ("gate", "up", "down")):
                assert torch.equal(
                    found[f"{prefix}experts.{number}.{name}"], before[f"{prefix}experts.{expert}.{name}"]
                )
        if experts:
            rows = before[f"{prefix}router.weight"]
            assert torch.equal(found[f"{prefix}router.weight"], torch.cat([rows, rows[experts]]))


def test_an_incomplete_checkpoint_or_an_expert_that_is_not_there_is_refused(made, tmp_path):
    record = ExpansionRecord(method="moe-lpr", old_languages=["en"], new_languages=["tr"], base_model="base")
    for sources, message in (
        ({0: [-1]}, r"layer 0 has no expert -1 to copy; give one of 0\.\.2"),
        ({-1: [0]}, "layer -1 has no router"),
        ({3: [0]}, "layer 3 has no router"),
        ({1: [0]}, "layer 1 has no router"),
    ):
        refused(add_experts, made(), tmp_path / "out", sources, record, says=message)
    lacking = shutil.copytree(made(), tmp_path / "lacking")
    tensors = weights(lacking)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, lacking / "model.safetensors", metadata={"format": "pt"})
    refused(grow_checkpoint, lacking, tmp_path / "out", SECOND, says=r"layers\.1\.mlp\.up_proj\.weight")
    assert not (tmp_path / "out").exists()
