"""`model.push_to_hub` and `trainer.push_to_hub`, against a server that speaks the hub's protocol."""

import pytest
from data_tables import TABLES
from hub_server import TOKEN
from huggingface_hub import ModelCard

PRELUDE = f"""
import os, sys
os.environ["HF_TOKEN"] = {TOKEN!r}
sys.path.insert(0, tests)
import hf_moe_expand.hub.publish
hf_moe_expand.hub.publish.check_loads_alone = lambda folder: None
from conftest import byte_tokenizer, tiny_dense
from datasets import Dataset
from data_tables import TABLES
from hf_moe_expand import Plan, PostPretrainConfig, PostPretrainTrainer, MoESFTTrainer, expand_model
model = expand_model(tiny_dense("qwen2"), Plan("layer-moe", [3, 1, 2], [0], old=["en"], new=["el"]))
texts = Dataset.from_dict({{"text": ["η γάτα κάθισε στο χαλί"] * 20}})
def trainer(**given):
    options = dict(block_size=16, per_device_train_batch_size=2, max_steps=2, disable_tqdm=True)
    config = PostPretrainConfig(out, **options | given)
    return PostPretrainTrainer(model, config, train_dataset=texts, processing_class=byte_tokenizer())
"""
WHOLE = {"model.safetensors", "config.json", "modeling_layer_moe.py", "generation_config.json", "README.md"}


@pytest.fixture
def run(client, tmp_path, request):
    """Runs code after the prelude; `out` is a folder."""
    tests = str(request.path.parent)

    def run(code, refused=False):
        answer = client.run(PRELUDE + code, out=str(tmp_path / "out"), tests=tests)
        assert ("error" in answer) == refused, answer
        return answer

    return run


def card_of(server, name):
    return ModelCard(server.files(name)["README.md"].decode())


def test_a_model_is_pushed_with_its_code_and_card(server, run):
    run("model.push_to_hub('me/model', tags=['greek'])\nbyte_tokenizer().push_to_hub('me/model')")
    assert {*WHOLE, "tokenizer.json"} <= set(server.files("me/model"))
    card = card_of(server, "me/model")
    assert {"hf-moe-expand", "mixture-of-experts", "greek"} <= set(card.data.tags)
    assert 'from_pretrained("me/model"' in card.text
    run("model.save_pretrained(out, push_to_hub=True, repo_id='me/saved')")
    assert {"hf-moe-expand"} <= set(card_of(server, "me/saved").data.tags)


def test_a_model_without_a_history_keeps_the_librarys_card(server, run):
    run("model.config.expansions = None\nmodel.push_to_hub('me/plain')")
    assert {*WHOLE} - set(server.files("me/plain")) == set()


def test_a_trainer_pushes_the_model_and_nothing_of_this_machine(server, run, tmp_path):
    answer = run("""
from pathlib import Path
made = trainer(hub_model_id="me/trained")
made.train()
made.save_state()
Path(out, "runs").mkdir(); Path(out, "runs", "events").write_text("x"); Path(out, "notes.md").write_text("mine")
Path(out, "training_args.bin").write_bytes(b"x")
result = made.push_to_hub("After training", license="mit", tags=["x"]).commit
assert not list(Path(out).rglob("training_args.bin"))
""")
    files = server.files("me/trained")
    assert {*WHOLE, "tokenizer.json"} <= set(files)
    assert not {"training_args.bin", "runs/events", "trainer_state.json", "notes.md"} & set(files)
    assert not any(str(tmp_path).encode() in content for content in files.values())
    assert "notes.md, runs" in answer["said"].partition("not published: ")[2]
    assert "the card is made of config.json, without tags" in answer["said"]
    card = card_of(server, "me/trained")
    assert card.data.license == "mit"
    assert "post-pretrain" in card.text
    assert server.repo("me/trained").log[-1] == "After training"
    assert answer["value"] == server.repo("me/trained").branches["main"]


def test_pushes_while_it_trains(server, run):
    run("""
from pathlib import Path
made = trainer(push_to_hub=True, hub_model_id="me/steps", save_steps=1, hub_always_push=True, hub_private_repo=True)
made.train()
made.push_to_hub(blocking=False).result()
assert not list(Path(out).glob("_push*")), list(Path(out).glob("_push*"))
""")
    assert server.repo("me/steps").private
    assert "Training in progress, step 1" in server.repo("me/steps").log
    files = set(server.files("me/steps"))
    assert {*WHOLE, "tokenizer.json"} <= files
    assert not {name for name in files if "optimizer" in name or "training_args" in name}


@pytest.mark.parametrize(
    ("name", "more", "file"),
    [
        ("me/sft", "router_losses=[BalanceLoss(0.01)]", "modeling_layer_moe.py"),
        ("me/lora", "peft_config=LoraConfig(target_modules=['q_proj'])", "adapter_model.safetensors"),
    ],
)
def test_trls_trainer_pushes_its_model_or_its_adapter_without_the_arguments(server, run, name, more, file):
    run(f"""
from peft import LoraConfig
from trl import SFTConfig
from hf_moe_expand import BalanceLoss
rows = Dataset.from_dict({{"text": ["η γάτα κάθισε στο χαλί"] * 8}})
config = SFTConfig(out, max_length=16, max_steps=1, use_cpu=True, bf16=False, report_to="none", hub_model_id={name!r})
made = MoESFTTrainer(model, config, train_dataset=rows, processing_class=byte_tokenizer(), {more})
made.train()
made.push_to_hub(dataset_name="me/chat")
""")
    assert file in server.files(name)
    assert "training_args.bin" not in server.files(name)
    if file in WHOLE:
        assert {*WHOLE, "tokenizer.json"} <= set(server.files(name))
        assert "hf-moe-expand" in card_of(server, name).data.tags


@pytest.mark.parametrize(("code", "message"), TABLES["pushes"])
def test_what_goes_wrong_is_one_line(run, code, message):
    import re

    answer = run(code, refused=True)
    assert answer["error"] == "InputError"
    assert "\n" not in answer["message"]
    assert re.search(message, answer["message"]), answer["message"]
