"""PEFT's adapters: expanded to experts, beside PEFT's own results; and PEFT on expanded models."""

import json
import re
import shutil
import warnings
from itertools import compress
from pathlib import Path
from unittest.mock import patch

import datasets
import pytest
import torch
from bpe import bpe_tokenizer
from conftest import TABLES, byte_tokenizer, invoke, load, refused, save_dense, write_texts
from one_sft_step import NEW_EXPERTS, ROWS, lora, trainer
from one_step import build
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin
from typer.testing import CliRunner

from hf_moe_expand import cli
from hf_moe_expand.checkpoint import source
from hf_moe_expand.checkpoint.peft import export_peft
from hf_moe_expand.checkpoint.stored import StoredModel
from hf_moe_expand.checkpoint.tuned import expand_tuned
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.trainers import load_balance_loss

IDS = torch.arange(3, 27).view(2, 12)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("CI", "true")  # TRL sends no telemetry
    datasets.disable_progress_bars()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")
        yield


def make(folder, base, seed=1, config=LoraConfig, dtype=None, **options):
    """An adapter that PEFT wrote, whose updates are not zero."""
    if config is LoraConfig:
        options = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options
    model = get_peft_model(load(base), config(**options))
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    (model.to(dtype) if dtype else model).save_pretrained(folder)
    return folder


def altered(adapter, out, tensors=None, **fields):
    """A copy of an adapter with other fields and tensors; fields that are None are left out."""
    shutil.copytree(adapter, out)
    own = json.loads((out / CONFIG).read_text()) | fields
    (out / CONFIG).write_text(json.dumps({name: value for name, value in own.items() if value is not None}))
    if tensors is not None:
        save_file(tensors(load_file(out / WEIGHTS)), out / WEIGHTS, metadata={"format": "pt"})
    return out


def pefts(base, adapter):
    with torch.no_grad():
        return PeftModel.from_pretrained(load(base), adapter).eval()(IDS).logits


def told(model, language):
    with torch.no_grad():
        return load(model)(IDS, languages=language).logits


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = save_dense(tmp_path_factory.mktemp("bases") / "tiny-llama", "llama")
    bpe_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    return make(tmp_path_factory.mktemp("adapters") / "lora-el", base)


@pytest.fixture(scope="module")
def model(base, adapter, tmp_path_factory):
    """Two adapters, of which the second has other ranks, alphas and layers."""
    root = tmp_path_factory.mktemp("models")
    make(root / "lora-hu", base, 2, **KINDS["patterns"][1])
    expand_tuned(base, {"el": adapter, "hu,tr": root / "lora-hu"}, root / "both", ["en"])
    return root / "both"


KINDS = {
    "rslora, as one trains": (
        "llama",
        {
            "use_rslora": True, "r": 3, "lora_dropout": 0.3, "init_lora_weights": "gaussian", "task_type": None,
            "exclude_modules": ["down_proj", "layers.1.self_attn.q_proj"],
        },
    ),
    "patterns": (
        "llama",
        {
            "target_modules": ["q_proj", "down_proj", "v_proj"],
            "rank_pattern": {"down_proj": 2, r"model.layers.1.self_attn.q_proj": 7},
            "alpha_pattern": {"v_proj": 5, r".*layers\.2.*q_proj": 3},
        },
    ),
    "rslora with patterns, biases in the base": (
        "qwen2", {"use_rslora": True, "rank_pattern": {"o_proj": 2}, "alpha_pattern": {"o_proj": 9}},
    ),
    "some layers": ("qwen2", {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2]}),
    "a pattern of names": ("llama", {"target_modules": r".*layers\.[12]\.(self_attn\.k_proj|mlp\.gate_proj)"}),
    "Conv1D": ("gpt2", {"fan_in_fan_out": True}),
    "Conv1D that nobody named": ("gpt2", {"target_modules": ["c_attn"]}),
    "one map for three": ("gpt_neox", {}),
    "maps in the layer": ("opt", {}),
    "Gemma, half precision": ("gemma3_text", {"dtype": torch.bfloat16}),
    "linear attention": ("qwen3_5_text", {}),
    "a mixture's attention": ("olmoe", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_told_model_has_pefts_logits_and_gives_the_adapter_back(tmp_path, kind):
    backbone, options = KINDS[kind]
    base, lora, model, back = (tmp_path / name for name in ("base", "lora", "model", "back"))
    save_dense(base, backbone)
    make(lora, base, **options)
    expand_tuned(base, {"el": lora}, model, ["en"])
    wanted, home = pefts(base, lora), load(base)(IDS).logits
    assert (wanted - home).abs().max() > 1e-3
    torch.testing.assert_close(told(model, "el"), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(told(model, "en"), home)
    before, after = StoredModel(base), StoredModel(model)
    assert all(before[key].same_bytes(after[key]) for key in before.tensors)
    export_peft(model, back)
    assert (back / WEIGHTS).read_bytes() == (lora / WEIGHTS).read_bytes()
    own, found = (json.loads((folder / CONFIG).read_text()) for folder in (lora, back))
    assert found == own | {"base_model_name_or_path": "base"}
    # Without its configuration in the history the adapter is described anew.
    fields = json.loads((model / "config.json").read_text())
    fields["expansions"][0]["stages"] = []
    (model / "config.json").write_text(json.dumps(fields))
    for name in ("anew", "twice"):
        export_peft(model, tmp_path / name)
    assert load_file(tmp_path / "anew" / WEIGHTS).keys() == load_file(lora / WEIGHTS).keys()
    torch.testing.assert_close(pefts(base, tmp_path / "anew"), wanted, rtol=1e-5, atol=1e-5)
    again, twice = ((tmp_path / name / CONFIG).read_text() for name in ("anew", "twice"))
    assert again == twice
    assert isinstance(json.loads(again)["lora_alpha"], int)


def test_several_adapters_are_an_expansion_each(base, adapter, model, tmp_path):
    second = model.parent / "lora-hu"
    assert torch.equal(told(model, "el"), pefts(base, adapter))
    torch.testing.assert_close(told(model, "hu"), pefts(base, second), rtol=1e-5, atol=1e-5)
    assert torch.equal(told(model, "tr"), told(model, "hu"))
    records = json.loads((model / "config.json").read_text())["expansions"]
    assert [record["new_languages"] for record in records] == [["el"], ["hu", "tr"]]
    assert records[0]["stages"][0]["settings"]["model"] == "lora-el"
    assert str(tmp_path.parent) not in json.dumps(records)

    said = invoke("export", model, tmp_path / "all", "--peft")
    assert "vllm serve tiny-llama --enable-lora --max-loras 3 --max-lora-rank 8 --lora-modules" in said
    assert f"el={tmp_path / 'all' / 'el'} hu-tr={tmp_path / 'all' / 'hu-tr'}" in " ".join(said.split())
    for name, original in (("el", adapter), ("hu-tr", second)):
        assert (tmp_path / "all" / name / WEIGHTS).read_bytes() == (original / WEIGHTS).read_bytes()
    said = invoke("export", model, tmp_path / "one", "--peft", "--language", "el")
    assert f"--max-lora-rank 8 --lora-modules el={tmp_path / 'one'}" in " ".join(said.split())


# With the module's name, and as of a model of images.
@pytest.mark.parametrize("names", [(".weight", ".default.weight"), ("model.model.", "model.model.language_model.")])
def test_other_names_of_the_same_maps(base, adapter, tmp_path, names):
    change = lambda own: {name.replace(*names): value for name, value in own.items()}  # noqa: E731
    other = altered(adapter, tmp_path / "other", change)
    expand_tuned(base, {"el": other}, tmp_path / "model")
    assert torch.equal(told(tmp_path / "model", "el"), pefts(base, adapter))


def test_a_base_of_another_name_or_commit_is_said(base, adapter, tmp_path):
    other = altered(adapter, tmp_path / "other", base_model_name_or_path="me/TINY-llama")
    assert expand_tuned(base, {"el": other}, tmp_path / "same").warnings == []
    other = altered(adapter, tmp_path / "third", base_model_name_or_path="/home/me/qwen")
    (line,) = expand_tuned(base, {"el": other}, tmp_path / "model").warnings
    assert line == "warning: third was trained on qwen, by its name another base than tiny-llama"
    export_peft(tmp_path / "same", tmp_path / "back")
    assert json.loads((tmp_path / "back" / CONFIG).read_text())["base_model_name_or_path"] == "me/TINY-llama"
    model = load(tmp_path / "same")
    model.model.norm.weight.data += 1  # as a merged adapter moves the base
    model.save_pretrained(tmp_path / "moved")
    (line,) = expand_tuned(tmp_path / "moved", {"hu": adapter}, tmp_path / "more").warnings
    assert line.startswith("warning: model.norm.weight moved since the expansion")


LLAMA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
# Adapters that are refused: the changes of their base, how they are made, and the words.
OTHERS = {
    "wider": ({"hidden_size": 64}, {}, r"shape \[64, 4\], but .* needs \[32, 4\]"),
    "deeper": ({"num_hidden_layers": 4}, {}, "model.layers.3.*, which adapter_config.json does not"),
    "of another architecture": ({"backbone": "gpt2"}, {}, "PEFT finds no maps for it in LlamaForCausalLM"),
    "dora": ({}, {**LLAMA, "use_dora": True}, "has use_dora True, which is no plain low-rank update"),
    "whole modules": ({}, {**LLAMA, "modules_to_save": ["embed_tokens"]}, r"modules_to_save \['embed_tokens'\], which"),
    "the embedding": ({}, {"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens, which is no linear map"),
    "pissa": ({}, {**LLAMA, "init_lora_weights": "pissa"}, "has init_lora_weights 'pissa', which is no plain"),
    "ia3": (
        {}, {"config": IA3Config, "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
        "has .*, which is no plain low-rank update",
    ),
}  # fmt: skip
FIELDS = TABLES["fields of adapters"]
TENSORS = {
    "a tensor more": (lambda own: own | {"base_model.model.model.embed_tokens.weight": torch.ones(1)}, "embed_tokens"),
    "a tensor less": (lambda own: dict(list(own.items())[1:]), "which adapter_config.json names"),
    "NaN": (lambda own: {name: value * float("nan") for name, value in own.items()}, "NaN or infinite values"),
    "whole numbers": (lambda own: {name: value.to(torch.int8) for name, value in own.items()}, "stored as I8"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*OTHERS, *FIELDS, *TENSORS])
def test_adapters_that_do_not_fit_are_refused(base, adapter, tmp_path, case):
    if case in OTHERS:
        changes, options, words = OTHERS[case]
        other = save_dense(tmp_path / "other", **{"backbone": "llama", **changes}) if changes else base
        lora = make(tmp_path / "lora", other, **options)
    else:
        change, words = FIELDS.get(case) or TENSORS[case]
        lora = altered(adapter, tmp_path / "lora", **(change if case in FIELDS else {"tensors": change}))
    refused(expand_tuned, base, {"el": lora}, tmp_path / "out", says=words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("words", "said"), TABLES["commands on adapters"])
def test_the_command_line_refuses(base, adapter, model, tmp_path, words, said):
    for word, place in {"ADAPTER": adapter, "BASE": base, "MODEL": model, "OUT": tmp_path / "out"}.items():
        words = words.replace(word, str(place))
    result = CliRunner().invoke(cli.app, words.split())
    assert isinstance(result.exception, InputError | SystemExit), result.exception
    assert said in " ".join(f"{result.output}{result.exception}".split())
    assert result.exit_code
    assert not (tmp_path / "out").exists()


def test_a_trained_base_has_no_adapters(model, tmp_path):
    shutil.copytree(model, tmp_path / "grafted")
    fields = json.loads((model / "config.json").read_text())
    fields["expansions"][1]["stages"].append({"stage": "graft"})
    del fields["expansions"][0]["base_hashes"]
    (tmp_path / "grafted" / "config.json").write_text(json.dumps(fields))
    refused(export_peft, tmp_path / "grafted", tmp_path / "out", says="`graft` trained more, so that its adapters")


def test_an_adapter_on_the_hub(base, adapter, tmp_path):
    with patch.object(source, "snapshot_download", return_value=adapter) as download:
        expand_tuned(base, {"el": "me/lora-el"}, tmp_path / "model")
    asked = download.call_args
    assert (*asked.args, asked.kwargs["allow_patterns"]) == ("me/lora-el", [CONFIG, WEIGHTS])
    (record,) = json.loads((tmp_path / "model" / "config.json").read_text())["expansions"]
    assert record["stages"][0]["settings"]["model"] == "me/lora-el"


def test_a_table_of_who_knows_the_language(base, adapter, tmp_path):
    texts = {"en": "The cat sat on the mat. ", "el": "abcdefg hij ", "de": "Die Katze liegt auf der Matte. "}
    data = [word for code, text in texts.items() for word in
            ("--data", f"{code}={write_texts(tmp_path / f'{code}.jsonl', [text * 2] * 3)}")]  # fmt: skip
    said = invoke("expand", base, tmp_path / "model", "--tuned", f"el={adapter}", "--old", "en", *data)
    rows = {line.split("│")[1].strip(): line.split("│")[2:5] for line in said.splitlines() if line.startswith("│")}
    en, el, de = zip(*([float(cell) for cell in row] for row in rows.values()), strict=True)
    assert list(rows) == ["base", "el alone", "told"]
    assert en[0] == en[2] != en[1]
    assert el[0] != el[1] == el[2]
    assert de[0] == de[2] != de[1]
    assert "no gate" in said


def test_adapters_attach_to_maps_whose_weights_are_packed(model):
    loaded = load(model)
    for module in loaded.modules():
        if isinstance(module, torch.nn.Linear):  # as bitsandbytes leaves them
            module.weight = torch.nn.Parameter(module.weight.detach().reshape(-1, 1), requires_grad=False)
    before = [len(module._forward_pre_hooks) for module in loaded.modules()]
    loaded._attach_parts()
    assert [len(module._forward_pre_hooks) for module in loaded.modules()] == before


def linear_layers(model):
    head = model.get_output_embeddings()
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}


def adapted(wrapped):
    names = {name for name, _ in wrapped.named_parameters() if ".lora_A." in name}
    return {name.removeprefix("base_model.model.").split(".lora_A.")[0] for name in names}


def test_the_documents_patterns_name_what_they_say():
    text = (Path(__file__).parents[1] / "docs" / "trainers.md").read_text("utf-8")
    linear = linear_layers(build())
    experts = {name for name in linear if ".experts." in name}
    new = {name for name in experts if ".experts.0." not in name}
    assert f'exclude_modules=r"{NEW_EXPERTS["exclude_modules"]}"' in text
    patterns = re.findall(r'(target|exclude)_modules=r"(.*?)"', text)
    assert len(patterns) == 4
    for kind, pattern in patterns:
        chosen = {"target_modules": "all-linear", f"{kind}_modules": pattern}
        assert adapted(get_peft_model(build(), lora(**chosen))) == (new if "[1-9]" in pattern else experts)
    refused(get_peft_model, build(), lora(), says="Please specify `target_modules`", raises=ValueError)


@pytest.mark.parametrize(("kind", "virtual"), [(PromptTuningConfig, 5), (PrefixTuningConfig, 0)])
def test_virtual_tokens_are_no_part_of_the_router_losses(tmp_path, kind, virtual):
    adapter = kind(task_type="CAUSAL_LM", num_virtual_tokens=5)
    one = trainer(tmp_path, balance=1.0, prior=1.0, classifier=1.0, adapter=adapter)
    wrapped, tokenizer = one.model.train(), byte_tokenizer()
    before = {name: parameter.detach().clone() for name, parameter in wrapped.named_parameters()}
    rows = {0: [], 2: []}  # of each layer with a router
    for row in ROWS:
        ids = torch.tensor([tokenizer(row["prompt"] + row["completion"])["input_ids"] + [256]])
        with torch.no_grad(), wrapped.capture_routing() as routing:
            wrapped(ids)
        for index, layer in routing.layers.items():
            rows[index].append(layer.router_logits[virtual:])
            assert len(rows[index][-1]) == ids.shape[1]
    balance = sum(load_balance_loss(torch.cat(logits), 2) for logits in rows.values())
    of_english = [row["language"] == "en" for row in ROWS]
    old = [torch.cat([*compress(logits, of_english)]) for logits in rows.values()]
    prior = sum(-logits.log_softmax(-1)[:, 0].mean() for logits in old)
    one.train()
    logs = one.state.log_history[0]
    assert logs["balance_loss"] == pytest.approx(balance.item() / 2, abs=1e-5)
    assert logs["language_prior_loss"] == pytest.approx(prior.item() / 2, abs=1e-5)
    moved = {name for name, parameter in wrapped.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {"prompt_encoder.default.embedding.weight"}
    assert one.model.eval().generate(input_ids=IDS[:1], max_new_tokens=2).shape == (1, 14)


class RoundedLinear(nn.Linear):
    """Weights in 8 bits, a scale for each row: the arithmetic of 8-bit libraries."""

    def forward(self, x):
        scale = self.weight.abs().amax(1, keepdim=True) / 127
        return nn.functional.linear(x, (self.weight / scale).round() * scale, self.bias)


@register_quantization_config("rounded")
class RoundedConfig(QuantizationConfigMixin):
    def __init__(self, **options):
        self.quant_method = "rounded"


@register_quantizer("rounded")
class RoundedQuantizer(HfQuantizer):
    """Puts RoundedLinear where nn.Linear was, before the weights are loaded, as quantising libraries do."""

    requires_calibration = False
    is_serializable = is_trainable = True

    def _process_model_before_weight_loading(self, model, **options):
        for name in linear_layers(model):
            old = model.get_submodule(name)
            sizes = (old.in_features, old.out_features, old.bias is not None)
            model.set_submodule(name, RoundedLinear(*sizes, device="meta", dtype=old.weight.dtype))


def test_a_library_may_replace_the_linear_layers_while_it_loads(tmp_path):
    model = build().eval()
    model.save_pretrained(tmp_path)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=RoundedConfig()).eval()
    replaced = {name for name, module in rounded.named_modules() if isinstance(module, RoundedLinear)}
    assert replaced == linear_layers(model)
    exact, found = model(IDS).logits, rounded(IDS).logits
    difference = (found - exact).abs().max().item()
    assert 0 < difference < 0.03 * exact.abs().max().item()
    wrapped = get_peft_model(rounded, lora(**NEW_EXPERTS, modules_to_save=["router"]))
    assert adapted(wrapped) == {name for name in replaced if re.search(r"\.experts\.[1-9]", name)}
    with wrapped.capture_routing() as routing:
        wrapped.train()(IDS, labels=IDS).loss.backward()
    assert len(routing) == 2
    assert all(parameter.grad is not None for parameter in wrapped.parameters() if parameter.requires_grad)


def test_pickled_weights_are_not_read(base, adapter, tmp_path):
    lora = altered(adapter, tmp_path / "lora")
    (lora / WEIGHTS).rename(lora / "adapter_model.bin")
    refused(expand_tuned, base, {"el": lora}, tmp_path / "out", says="adapter_model.safetensors: .*No such file")
