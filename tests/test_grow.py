"""Lifelong expansion: what an earlier one made stays, byte for byte, and each tensor is its definition."""

import json
import shutil

import pytest
import torch
from conftest import byte_tokenizer, invoke, refused, save_dense, shaken, write_texts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_moe_expand import LayerMoEConfig, Plan, expand_checkpoint, grow_checkpoint
from hf_moe_expand.analysis.routers import nearest_experts
from hf_moe_expand.checkpoint.expand import add_experts, versions
from hf_moe_expand.checkpoint.new_experts import new_weight
from hf_moe_expand.checkpoint.records import ExpansionRecord
from hf_moe_expand.core.schema import changed, read
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.inference.models import load_for_inference
from hf_moe_expand.modeling.routing import expert_ranges, experts_allowed, select_experts, token_classes
from hf_moe_expand.planning.make import make_plan
from hf_moe_expand.planning.methods import plan_settings
from hf_moe_expand.planning.results import SimilarityResult

FIRST = Plan("layer-moe", [3, 1, 2], [0, 2], old=["en"], new=["el"])
SECOND = Plan("moe-lpr", [5, 1, 4], [0, 2], old=["en", "el"], new=["tr"], grows_from=[3, 1, 2])
THIRD = Plan("moe-lpr", [5, 1, 6], [2], old=["en", "el", "tr"], new=["hi"], grows_from=[5, 1, 4])
KINDS = {
    "ffn": {},
    "conditional": {"conditional_routing": True},
    "lora": {"expert_kind": "lora", "lora_rank": 2, "lora_alpha": 4},
    "added": {"expert_kind": "added", "expert_width": 8},
}
RECORD = ExpansionRecord(method="moe-lpr", old_languages=["en"], new_languages=["tr"], base_model="base")
SEED = 7
LAYER = "model.layers.{}.mlp."
WORDS = {"en": "the cat sat ", "el": "η γάτα κά", "tr": "kedi otur"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made("lora", torch.float32)`: an expanded checkpoint no two of whose rows are alike."""
    root = tmp_path_factory.mktemp("grown")

    def make(kind="ffn", dtype=torch.float32):
        folder = root / f"{kind}-{dtype}"
        if not folder.exists():
            save_dense(folder / "base", dtype=dtype)
            expand_checkpoint(folder / "base", folder / "expanded", FIRST, **KINDS[kind])
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_pretrained(folder / "expanded")
            shaken(model, 0.2).save_pretrained(folder / "trained")
            byte_tokenizer().save_pretrained(folder / "trained")
        return folder / "trained"

    return make


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    return {
        code: LanguageText(code, str(write_texts(root / f"{code}.jsonl", [f"{words} {i} {words}" for i in range(30)])))
        for code, words in WORDS.items()
    }


def test_a_token_of_group_g_sees_the_experts_of_its_time():
    classifier_logits = torch.tensor([[3.0, 1, 2], [0, 2, 1], [0, 1, 2], [1, 1, 0], [0, 0, 0]])
    allowed = experts_allowed(token_classes(classifier_logits), expert_ranges((1, 3, 5)))
    limit = [1, 3, 5, 3, 5]  # ties go to the later class
    assert [row.nonzero().flatten().tolist() for row in allowed] == [list(range(most)) for most in limit]
    router_logits = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    weights, index = select_experts(router_logits, 2, allowed)
    for token, most in enumerate(limit):
        scores = router_logits[token, :most].softmax(-1)
        top, chosen = scores.topk(min(2, most))
        real = index[token] < 5
        assert index[token][real].tolist() == chosen.tolist()
        torch.testing.assert_close(weights[token][real], top / top.sum())
        assert not weights[token][~real].any()


def test_grow_copies_what_it_is_told(made, text, tmp_path):
    """On the command line, against the function, which is told an expert for each layer."""
    first, plan = made(), tmp_path / "plan.json"
    SECOND.save(plan)
    data, nearest = ("--data", f"tr={text['tr'].source}"), ("--copy-from", "nearest")
    texts = {"tr": text["tr"].load().shuffle(seed=0)["text"]}
    found = nearest_experts(*load_for_inference(first), texts, tokens=200, block_size=16, batch_size=4)
    measure = (*nearest, *data, "--tokens", 200, "--block-size", 16, "--batch-size", 4)
    for name, origin, *arguments in (("nearest", found, *measure), ("one", {0: 1, 2: 1}, "--copy-from", 1)):
        invoke("grow", first, tmp_path / name, "--plan", plan, *arguments)
        grow_checkpoint(first, tmp_path / f"{name}-again", SECOND, copy_from=origin)
        check_equal(weights(tmp_path / name), weights(tmp_path / f"{name}-again"))
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert origin.items() <= {int(at): old for at, old in config["expansions"][1]["copied_experts"].items()}.items()

    changed(SECOND, classifier_layers=[2]).save(tmp_path / "fewer.json")
    said = invoke("grow", first, tmp_path / "fewer", "--plan", tmp_path / "fewer.json")
    assert "classifiers of layers 0: removed; the plan names none" in said

    grow = ("grow", first, tmp_path / "out", "--plan", plan)
    for said, *arguments in (
        ("nearest measures text in the plan's new languages: give tr alone", *nearest),
        ("give tr alone", *nearest, *data, "--data", f"el={text['el'].source}"),
        ("--data belongs to --copy-from nearest", *data),
        ("--copy-from: invalid literal for int", "--copy-from", "next"),
        (r"has no tensor .*experts\.2\.", "--copy-from", 2),
        ("Language 'tr' has .* tokens, but 90,000 were asked for", *nearest, *data, "--tokens", 90000),
    ):
        refused(invoke, *grow, *arguments, says=said)
    changed(SECOND, grows_from=[3, 1, 3]).save(plan)
    refused(invoke, *grow, *nearest, *data, says="the plan was made for .3, 1, 3.")
    assert not (tmp_path / "out").exists()


def test_evaluate_groups_languages_by_expansion(made, text, tmp_path):
    data = [argument for code, source in text.items() for argument in ("--data", f"{code}={source.source}")]
    out, grown = tmp_path / "evaluation.json", grow_checkpoint(made(), tmp_path / "grown", SECOND)
    options = (*data, "--block-size", 32, "--out", out, "--overwrite")
    assert "tr (unnamed)" in invoke("evaluate", made(), *options)
    assert "tr (expansion 2)" in invoke("evaluate", made(), grown, *options)
    found = json.loads(out.read_text())
    assert (found["old"], found["new"], found["expansions"]) == (["en"], ["el", "tr"], [["el"], ["tr"]])
    assert found["mean_bits_per_byte"]["grown"]["expansion 2"] == found["models"]["grown"]["tr"]["bits_per_byte"]
    # As told goes before history.
    told = invoke("evaluate", made(), grown, *options, "--old", "en,el", "--new", "tr")
    assert "el (old)" in told
    assert "tr (new)" in told


def test_plans_for_growth_count_new_experts():
    same = [0.1, 0.2, 0.4]
    analysis = SimilarityResult(["en", "el"], ["tr"], 0, {}, None, same, same)
    settings = plan_settings(total_experts=5, classifier_layers=1)
    plan = make_plan(settings, 3, ["en", "el"], ["tr"], analysis, grows_from=[3, 2, 2])
    assert (plan.experts_per_layer, plan.grows_from) == ([3 + 3, 2 + 1, 2 + 1], [3, 2, 2])
    plan = make_plan(plan_settings(method="moe-lpr", experts=1), 3, ["en"], ["tr"], grows_from=[3, 2, 2])
    assert plan.experts_per_layer == [4, 3, 3]
    plan = make_plan(plan_settings(method="random", total_experts=6), 3, ["en"], ["tr"], grows_from=[3, 2, 2])
    assert sum(plan.experts_per_layer) == 7 + 6
    for settings, said in (({"total_experts": 2}, "3 layers with at least 1"), ({"method": "mola"}, "cannot grow one")):
        refused(make_plan, plan_settings(**settings), 3, ["en"], ["tr"], analysis, says=said, grows_from=[3, 2, 2])


def test_the_published_second_expansion_adds_48(published):
    figures = published["layermoe_qwen15_1b8"]
    first, total = figures["g1"], figures["g1_then_g2_total"]
    assert (sum(first), sum(total)) == (72, 72 + 48)
    assert min(b - a for a, b in zip(first, total, strict=True)) == 1
    plan = Plan("layer-moe", total, figures["g1_then_g2_classifier_layers"], grows_from=first)
    assert plan.total_experts == 72 + 48


def test_wrong_growth_is_refused(base, made, tmp_path):
    out, first = tmp_path / "out", made()
    expand_checkpoint(base, tmp_path / "dmoe", Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]]))
    lacking, tensors = shutil.copytree(first, tmp_path / "lacking"), weights(first)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, lacking / "model.safetensors", metadata={"format": "pt"})
    for said, plan, model in (
        ("el: already a language of the model", changed(SECOND, old=["en"], new=["el", "tr"]), first),
        (r"has .* experts, but the plan was made for \[2, 1, 2\]", changed(SECOND, grows_from=[2, 1, 2]), first),
        (r"made for \[1\]", changed(SECOND, grows_from=[]), first),
        ("a DMoE does not grow by plans: .*train adapt", SECOND, tmp_path / "dmoe"),
        ("not an expanded one", SECOND, base),
        (r"layers\.1\.mlp\.up_proj\.weight", SECOND, lacking),
    ):
        refused(grow_checkpoint, model, out, plan, says=said)
    refused(expand_checkpoint, base, out, SECOND, says="made to grow an expanded checkpoint")
    refused(add_experts, first, out, {0: [-1]}, RECORD, says=r"has no tensor .*experts\.-1\.")
    assert not out.exists()
    refused(Plan, "layer-moe", [2, 2, 2], says="grows_from: experts_per_layer must not give a", grows_from=[3, 2, 2])
    config = json.loads((first / "config.json").read_text()) | {"earlier_experts_per_layer": [[4, 1, 2]]}
    refused(LayerMoEConfig.from_dict, config, says="a layer must not lose experts", raises=ValueError)


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
def test_every_tensor_is_its_definition(made, kind, origin, tmp_path):
    dtype = torch.bfloat16 if kind == "ffn" else torch.float32
    trained = made(kind, dtype)
    grow_checkpoint(trained, tmp_path / "second", SECOND, copy_from=origin, seed=SEED)
    check_equal(weights(tmp_path / "second"), defined(weights(trained), SECOND, origin, 2, kind))
    grow_checkpoint(tmp_path / "second", tmp_path / "third", THIRD, copy_from=origin, seed=SEED)
    check_equal(weights(tmp_path / "third"), defined(weights(tmp_path / "second"), THIRD, origin, 3, kind))


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


def test_new_experts_may_take_the_router_rows_of_the_ones_that_they_copy(made, tmp_path):
    add_experts(made(), tmp_path / "out", {0: [2, 1], 1: [], 2: [1]}, RECORD, copy_router_rows=True)
    before, found = weights(made()), weights(tmp_path / "out")
    for layer, experts in ((0, [2, 1]), (2, [1])):
        name = f"{LAYER.format(layer)}router.weight"
        assert torch.equal(found[name], torch.cat([before[name], before[name][experts]]))


def test_a_layer_that_gets_its_first_classifier_late_has_a_class_for_each_expansion(made, tmp_path):
    without = changed(SECOND, classifier_layers=[])
    grow_checkpoint(made(), tmp_path / "second", without, seed=SEED)
    assert not any("classifier" in name for name in weights(tmp_path / "second"))
    grow_checkpoint(tmp_path / "second", tmp_path / "third", THIRD, seed=SEED)
    found = {name: value for name, value in weights(tmp_path / "third").items() if "classifier" in name}
    check_equal(found, {LAYER.format(2) + "classifier.weight": torch.zeros(4, 32)})


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
