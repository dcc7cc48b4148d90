"""PEFT adapters on expanded models, and module replacement as quantising libraries do it."""

import re
from pathlib import Path

import datasets
import pytest
import torch
from conftest import byte_tokenizer, refused
from one_sft_step import NEW_EXPERTS, ROWS, lora, trainer
from one_step import build
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_moe_expand.trainers import load_balance_loss

pytestmark = [
    pytest.mark.filterwarnings("error::DeprecationWarning"),
    pytest.mark.filterwarnings("error::FutureWarning"),
    # TRL and PEFT themselves use old names of transformers.
    pytest.mark.filterwarnings(r"ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]
DOCUMENT = Path(__file__).parents[1] / "docs" / "trainers.md"
IDS = torch.arange(3, 27).view(2, 12)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("CI", "true")  # TRL sends no telemetry
    datasets.disable_progress_bars()


def linear_layers(model):
    head = model.get_output_embeddings()
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}


def adapted(wrapped):
    names = {name for name, _ in wrapped.named_parameters() if ".lora_A." in name}
    return {name.removeprefix("base_model.model.").split(".lora_A.")[0] for name in names}


def test_the_documents_patterns_name_what_they_say():
    text = DOCUMENT.read_text("utf-8")
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


@pytest.mark.parametrize(
    ("kind", "virtual"), [(PromptTuningConfig, 5), (PrefixTuningConfig, 0)], ids=["prompt", "prefix"]
)
def test_virtual_tokens_are_no_part_of_the_router_losses(tmp_path, kind, virtual):
    adapter = kind(task_type="CAUSAL_LM", num_virtual_tokens=5)
    one = trainer(tmp_path, balance=1.0, prior=1.0, classifier=1.0, adapter=adapter)
    wrapped, tokenizer = one.model.train(), byte_tokenizer()
    before = {name: parameter.detach().clone() for name, parameter in wrapped.named_parameters()}
    balance, prior = [], []
    found = {0: [], 2: []}
    for row in ROWS:
        ids = torch.tensor([tokenizer(row["prompt"] + row["completion"])["input_ids"] + [256]])
        with torch.no_grad(), wrapped.capture_routing() as routing:
            wrapped(ids)
        for index, layer in routing.layers.items():
            logits = layer.router_logits[virtual:]
            assert len(logits) == ids.shape[1]
            found[index].append((logits, row["language"] == "en"))
    for layers in found.values():
        balance.append(load_balance_loss(torch.cat([logits for logits, _ in layers]), 2))
        old = torch.cat([logits for logits, is_old in layers if is_old])
        prior.append(-old.log_softmax(-1)[:, 0].mean())
    one.train()
    logs = one.state.log_history[0]
    assert logs["balance_loss"] == pytest.approx(sum(balance).item() / 2, abs=1e-5)
    assert logs["language_prior_loss"] == pytest.approx(sum(prior).item() / 2, abs=1e-5)
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
            parent, attribute = name.rsplit(".", 1)
            old = model.get_submodule(name)
            sizes = {"in_features": old.in_features, "out_features": old.out_features, "bias": old.bias is not None}
            setattr(
                model.get_submodule(parent), attribute, RoundedLinear(**sizes, device="meta", dtype=old.weight.dtype)
            )


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
