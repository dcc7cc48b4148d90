"""Source-shielded updates: the importance of columns by its definition, and columns that do not move."""

import pytest
import torch
from conftest import save_dense, write_texts
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from hf_moe_expand import DenseConfig, train_stage
from hf_moe_expand.checkpoint.reader import CheckpointReader
from hf_moe_expand.data.packing import pack_texts
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.errors import InputError
from hf_moe_expand.stages.kinds import dense
from hf_moe_expand.trainers.shielding import (
    column_importance,
    important_columns,
    shielded,
    shielded_layers,
    shielded_parameters,
)

SHIELD = {"languages": ["en"], "share": 0.4, "tokens": 96}
TRAINING = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "disable_tqdm": True, "max_steps": 3}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("shielding")
    save_dense(root / "base")
    write_texts(root / "en.jsonl", [f"{number} and {number} are {2 * number}, as we know." for number in range(40)])
    write_texts(root / "hu.jsonl", [f"{number} meg {number} az {2 * number}, mint tudjuk." for number in range(40)])
    return root


@pytest.fixture
def data(root):
    return {code: LanguageText(code, str(root / f"{code}.jsonl")) for code in ("en", "hu")}


@pytest.fixture
def model(root):
    return AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)


def config(**changes):
    return DenseConfig(**{"block_size": 32, "method": "shielded", "shield": SHIELD, **TRAINING, **changes})


def tensors(folder):
    read = CheckpointReader(folder)
    return {name: read.tensor(name) for name in read.tensors}


def columns_of(root, data, model, share):
    """The frozen columns, from the blocks of English that the stage reads."""
    tokenizer = AutoTokenizer.from_pretrained(root / "base")
    texts = {code: text.load() for code, text in data.items()}
    packed = pack_texts(texts, tokenizer, 32, 0, groups=[["hu"], ["en"]])
    blocks = torch.tensor(list(packed.dataset["input_ids"][packed.blocks[0] : packed.blocks[0] + 3]))
    return important_columns(column_importance(model, [blocks]), share)


def test_importance_is_the_norm_of_a_column_times_the_norm_of_its_input(model):
    batches = [torch.arange(12).view(2, 6), torch.arange(20, 29).view(1, 9)]
    found = column_importance(model, batches)
    assert set(found) == {name for name, _ in model.named_modules() if name.endswith("_proj")}  # not the head
    block = model.model.layers[0]
    inputs = {"self_attn.q_proj": [], "mlp.down_proj": []}
    with torch.no_grad():
        for ids in batches:
            hidden = model.model.embed_tokens(ids)
            inputs["self_attn.q_proj"] += list(block.input_layernorm(hidden).flatten(0, 1))
            position = torch.arange(ids.shape[1])[None]
            turned = model.model.rotary_emb(hidden, position)
            mixed = block.self_attn(block.input_layernorm(hidden), position_embeddings=turned, attention_mask=None)[0]
            before = block.post_attention_layernorm(hidden + mixed)
            mlp = block.mlp
            inputs["mlp.down_proj"] += list((mlp.act_fn(mlp.gate_proj(before)) * mlp.up_proj(before)).flatten(0, 1))
    for name, rows in inputs.items():
        weight = block.get_submodule(name).weight
        for column in range(weight.shape[1]):
            norm = sum(weight[row, column].item() ** 2 for row in range(weight.shape[0])) ** 0.5
            size = sum(row[column].item() ** 2 for row in rows) ** 0.5
            assert found[f"model.layers.0.{name}"][column].item() == pytest.approx(norm * size, rel=1e-4)


def test_the_most_important_columns_rounded_down():
    found = important_columns({"a": torch.tensor([3.0, 9.0, 1.0, 5.0, 4.0])}, 0.5)
    assert found["a"].tolist() == [1, 3]


def test_frozen_columns_stay_and_all_else_takes_the_gradients_step(root, data, model, tmp_path):
    step = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    record = train_stage(root / "base", tmp_path / "out", data, config(**step, per_device_train_batch_size=1000))
    assert record.stage == "dense shielded"
    assert record.documents == {"hu": 40}  # English says which columns, and is not trained on
    columns = columns_of(root, data, model, 0.4)
    blocks = pack_texts({"hu": data["hu"].load()}, AutoTokenizer.from_pretrained(root / "base"), 32, 0).dataset
    ids = torch.tensor(list(blocks["input_ids"]))
    logits = model.train()(ids).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    after = tensors(tmp_path / "out")
    for name, parameter in model.named_parameters():
        expected = (parameter - 0.1 * parameter.grad).detach()
        frozen = columns.get(name.removesuffix(".weight"))
        if frozen is not None:
            assert torch.equal(after[name][:, frozen], parameter[:, frozen])
            expected[:, frozen] = parameter.detach()[:, frozen]
            assert len(frozen) == int(0.4 * parameter.shape[1]) > 0
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-5)
        assert not torch.equal(after[name], parameter), name
    counted = sum(len(frozen) * model.get_submodule(name).out_features for name, frozen in columns.items())
    assert shielded_parameters(model, 0.4) == counted


def test_frozen_columns_do_not_decay_and_a_stopped_run_goes_on(root, data, model, tmp_path, monkeypatch):
    chosen = config(weight_decay=0.3, save_steps=2, max_steps=4)
    train_stage(root / "base", tmp_path / "whole", data, chosen)
    before, after = (tensors(folder) for folder in (root / "base", tmp_path / "whole"))
    for name, frozen in columns_of(root, data, model, 0.4).items():
        same = (before[f"{name}.weight"] == after[f"{name}.weight"]).all(0)
        assert same.nonzero().flatten().tolist() == frozen.tolist()

    class StopAt(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if state.global_step == 3:
                raise KeyboardInterrupt

    class Stopped(dense.ShieldedTrainer):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.add_callback(StopAt())

    with monkeypatch.context() as patch:
        patch.setattr(dense, "ShieldedTrainer", Stopped)
        with pytest.raises(KeyboardInterrupt):
            train_stage(root / "base", tmp_path / "out", data, chosen)
    train_stage(root / "base", tmp_path / "out", data, chosen)
    assert all(torch.equal(value, after[name]) for name, value in tensors(tmp_path / "out").items())


def test_a_column_that_moves_without_a_gradient_is_found(model):
    name, layer = next(iter(shielded_layers(model).items()))
    columns = {name: torch.tensor([1, 3])}
    with shielded(model, columns):
        layer.weight.data[:, [0, 2]] += 1.0
    said = f"1 of 1 layers moved columns .* such as {name}: the optimizer mixes"
    with pytest.raises(RuntimeError, match=said), shielded(model, columns):
        layer.weight.data[0, 3] += 1.0


def test_refusals_name_what_is_wrong(root, data, tmp_path):
    def refused(message, chosen, texts=data, model=root / "base"):
        with pytest.raises(InputError, match=message):
            train_stage(model, tmp_path / "out", texts, chosen)
        assert not (tmp_path / "out").exists()

    refused("shield: the method is full, but shield has settings; set `method: shielded`", config(method="full"))
    refused("shield.languages names none: name languages that the base knows", config(shield={}))
    refused("shield.languages has no text in es", config(shield={"languages": ["en", "es"]}))
    refused("names every language of the data: give text to train on", config(), {"en": data["en"]})
    with pytest.raises(InputError, match="share"):
        config(shield={**SHIELD, "share": 1.5})
    save_dense(tmp_path / "gpt2", "gpt2")
    refused("columns of torch.nn.Linear, of which this model has none", config(), model=tmp_path / "gpt2")
