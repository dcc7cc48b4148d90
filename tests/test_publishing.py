"""`push_to_hub` and the scripts of docs, against a server that speaks the hub's protocol; and what goes into a push."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from conftest import TABLES, refused, save_dense, write_texts
from guides import blocks
from hub_server import TOKEN
from huggingface_hub import ModelCard
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.checkpoint.merge import average_checkpoints
from hf_moe_expand.core.errors import InputError, library_errors_at
from hf_moe_expand.core.private import refuse_private
from hf_moe_expand.hub import card
from hf_moe_expand.hub.publish import push_to_hub
from hf_moe_expand.hub.published import check_code, check_loads_alone, published_files

PRELUDE = f"""
import os, sys
os.environ["HF_TOKEN"] = {TOKEN!r}
sys.path.insert(0, tests)
import hf_moe_expand.hub.publish
hf_moe_expand.hub.publish.check_loads_alone = lambda folder: None
from conftest import TABLES, byte_tokenizer, tiny_dense
from datasets import Dataset
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
    card = ModelCard(files["README.md"].decode())
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
    files = server.files("me/steps").keys()
    assert files >= {*WHOLE, "tokenizer.json"}
    assert not {name for name in files if "optimizer" in name or "training_args" in name}


@pytest.mark.parametrize(
    ("name", "more", "files"),
    [
        ("me/sft", "router_losses=[BalanceLoss(0.01)]", {*WHOLE, "tokenizer.json"}),
        ("me/lora", "peft_config=LoraConfig(target_modules=['q_proj'])", {"adapter_model.safetensors"}),
    ],
)
def test_trls_trainer_pushes_its_model_or_its_adapter_without_the_arguments(server, run, name, more, files):
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
    pushed = server.files(name)
    assert files <= pushed.keys()
    assert "training_args.bin" not in pushed
    assert ("hf-moe-expand" in (ModelCard(pushed["README.md"].decode()).data.tags or [])) == (name == "me/sft")


@pytest.mark.parametrize(("code", "message"), TABLES["pushes"])
def test_what_goes_wrong_is_one_line(run, code, message):
    answer = run(code, refused=True)
    assert answer["error"] == "InputError"
    assert "\n" not in answer["message"]
    assert re.search(message, answer["message"]), answer["message"]


WORDS = {
    "en": "the cat sat on",
    "el": "η γάτα κάθισε",
    "hu": "a macska leült",
    "tr": "kedi oturdu",
    "hi": "बिल्ली बैठ गई",
}
OF_SCRIPTS = """
from hf_moe_expand.analysis import gate_fit, gating
from hf_moe_expand.analysis.settings import GateSettings
from hf_moe_expand.data.anchors import shipped_anchors
from transformers.integrations import integration_utils
gating.shipped_anchors = lambda **given: dict(list(shipped_anchors(**given).items())[::10])
gate_fit.ITERATIONS = 4
QUICK = {"tokens": 300, "anchor_tokens": 200, "unseen_share": 0.99}
class Recorded(integration_utils.TrainerCallback):  # TensorBoard and its like need not be installed
    logs = []
    def on_log(self, args, state, control, logs=None, **others):
        self.logs.append(logs)
integration_utils.INTEGRATION_TO_CALLBACK["tensorboard"] = Recorded
"""
# A model with random weights knows no language.
QUICK_GATES = "fit_gates(model, settings=GateSettings(**QUICK), "
NAMED = {named[1]: text for text in blocks("trainers.md", "python") if (named := re.match(r"# (\S+\.py)\n", text))}
SCRIPTS = {name: text for name, text in NAMED.items() if name != "chat.py"}  # tests/test_docs.py runs it
AFTER = {
    "post_pretrain.py": "assert trainer.record.stage == 'post-pretrain'",
    "review.py": "assert trainer.record.tokens_seen_by_language.keys() == {'en', 'el'}",
    "gates.py": "assert model.config.language_gate['layer'] in (5, 6, 7)",
    "gate_first.py": "assert model.config.language_gate['layer'] == report.layer",
    "dmoe.py": "assert [s['stage'] for s in model.config.expansions[0]['stages']] == ['group', 'joint']",
    "adapt.py": "assert trainer.model.config.language_groups == [['el'], ['hu', 'tr'], ['hi']]",
    "several.py": "assert trainer.state.global_step",
    "metrics.py": "logged = set().union(*trainer.state.log_history)\n"
    "assert {'eval_en_loss', 'eval_el_loss', 'eval_el_accuracy'} <= logged\nassert trainer.state.best_metric",
    "logged.py": "assert any('expert_0_score_new' in logs for logs in Recorded.logs)",
    "resume.py": "again = str(trainer.state.global_step)\nassert get_last_checkpoint('qwen-el-long').endswith(again)",
    "publish.py": "",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guide")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    save_dense(folder / "Qwen" / "Qwen2.5-0.5B", num_hidden_layers=24, max_position_embeddings=2048, **sizes)
    for code, words in WORDS.items():
        rows = [f"{number} {f'{words} ' * 4}" for number in range(60)]
        write_texts(folder / f"{code}.jsonl", rows)
        write_texts(folder / f"{code}.test.jsonl", rows[:40])
        tagged = [json.dumps({"text": row, "language": code}) + "\n" for row in rows]
        (folder / f"{code}.tagged.jsonl").write_text("".join(tagged))
    return folder


@pytest.fixture
def run_script(run, folder):
    """Runs a guide's script in its folder, and code after it."""

    def run_script(script, after=""):
        script = script.replace("fit_gates(model, ", QUICK_GATES)
        script = script.replace('new=["el"])\ngate, ', 'new=["el"], settings=GateSettings(**QUICK))\ngate, ')
        return run(f"os.chdir({str(folder)!r})\n{OF_SCRIPTS}{script}\n{after}")

    return run_script


@pytest.mark.guides
def test_the_scripts_run_one_after_the_other(server, folder, run_script):
    assert SCRIPTS.keys() == AFTER.keys()
    for name, script in SCRIPTS.items():
        run_script(script, AFTER[name])
    published = server.files("me/qwen-el")
    assert {*WHOLE, "tokenizer.json"} <= published.keys()
    assert "training_args.bin" not in published
    for made in ("qwen-el-1", "qwen-el-2", "qwen-el-gated", "dmoe-2", "dmoe-hi", "dmoe-hi-more"):
        assert (folder / made / "modeling_layer_moe.py").is_file() or (folder / made / "modeling_dmoe.py").is_file()
        assert not list((folder / made).rglob("training_args.bin"))
    # On two ranks, and once more from the checkpoints that are there.
    (folder / "several.py").write_text(SCRIPTS["several.py"])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "several.py"]
    done = subprocess.run(launch, cwd=folder, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "resumes at step" in run_script(SCRIPTS["resume.py"])["said"]


def test_readme_shows_the_trainers_first(server, run_script):
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    script, loading = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert readme.index(script) < readme.index("```yaml")
    assert len(script.splitlines()) <= 30
    names = ["expand_model(", "PostPretrainTrainer(", "PostPretrainConfig(", "processing_class=", "train()"]
    for name in [*names, "fit_gates(", "average_experts(", "save_pretrained(", "push_to_hub("]:
        assert name in re.sub(r"\(\n +", "(", script)
    gated = "assert model.config.language_gate"
    run_script(script, f"{gated}\n{loading}\n{gated}")
    assert {*WHOLE, "tokenizer.json"} <= server.files("me/qwen-el").keys()


PLAN = Plan("layer-moe", [3, 1, 2], [0], old=["en"], new=["el"])


@pytest.fixture
def tiny_el(base, tmp_path):
    expand_checkpoint(base, tmp_path / "tiny-el", PLAN)
    return tmp_path / "tiny-el"


def test_other_files_keys_and_links_stay_here_unless_included(tiny_el, tmp_path):
    said = []
    before = published_files(tiny_el, say=said.append)
    assert {"modeling_layer_moe.py", "expanded_model.py", "parts.py", "expanded_config.py"} <= before.keys()
    (tiny_el / "checkpoint-5").mkdir()
    for name in ("notes.txt", "checkpoint-5/optimizer.pt", "tokenizer_key.pem"):
        (tiny_el / name).write_text("x")
    assert published_files(tiny_el, say=said.append) == before
    assert said == ["not published: checkpoint-5, notes.txt, tokenizer_key.pem"]
    assert set(published_files(tiny_el, ["notes.txt"])) == {*before, "notes.txt"}
    for wrong in ("../x", str(tiny_el / "config.json")):
        refused(published_files, tiny_el, [wrong], says=rf"{Path(wrong).name} is no file in the folder")
    (tmp_path / "secret.json").write_text("{}")
    for name, included in (("added_tokens.json", []), ("more.txt", ["more.txt"])):
        (tiny_el / name).symlink_to(tmp_path / "secret.json")
        refused(published_files, tiny_el, included, says=rf"{name} is no file in the folder, or a link")
        (tiny_el / name).unlink()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("expanded_ffn.py", lambda text: text + "\n", r"expanded_ffn\.py differs from this package's"),
        ("own.py", lambda _: "", r"own\.py is not code of this package"),
        ("custom_generate/generate.py", lambda _: "", r"custom_generate/generate\.py is not code of this package"),
        ("config.json", lambda text: text.replace('"modeling_layer_moe.', '"other/repo--modeling_layer_moe.'),
         r"config\.json names code that is not this package's"),
        ("tokenizer_config.json", lambda text: text.replace("{", '{"auto_map": {"AutoTokenizer": ["x.X", null]},', 1),
         r"tokenizer_config\.json names code"),
    ],
)  # fmt: skip
def test_only_this_package_s_code_is_run(tiny_el, name, change, message):
    check_code(tiny_el)
    file = tiny_el / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(change(file.read_text() if file.is_file() else ""))
    refused(check_loads_alone, tiny_el, says=message)


def test_the_check_runs_without_tokens(tiny_el, monkeypatch):
    secret = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY")
    for name in secret:
        monkeypatch.setenv(name, "hf_secret")
    with patch.object(subprocess, "run", return_value=subprocess.CompletedProcess([], 0)) as run:
        check_loads_alone(tiny_el)
    seen = run.call_args.kwargs["env"]
    assert not {*secret} & seen.keys()
    assert "hf_secret" not in seen.values()
    assert not Path(seen["HF_TOKEN_PATH"]).exists()


def test_no_reference_to_code_travels_with_a_base(tmp_path):
    base, out, mean = save_dense(tmp_path / "base"), tmp_path / "out", tmp_path / "mean"
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        fields = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps({**fields, "auto_map": {"AutoTokenizer": ["x/y--t.T", None]}}))
    (base / "custom_generate").mkdir()
    for name in ("custom_generate/generate.py", "t.py"):
        (base / name).write_text("")
    expand_checkpoint(base, out, PLAN)
    average_checkpoints([base, base], mean)
    for made in (out, mean):
        assert not any("x/y" in file.read_text() for file in made.glob("*.json"))
        assert not {"custom_generate", "t.py"} & {path.name for path in made.iterdir()}
    assert "auto_map" not in json.loads((mean / "config.json").read_text())
    check_code(out)


def test_no_token_and_no_password_reaches_a_message(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-token-of-another-kind")
    words = f"hf_{'x' * 30}\na-token-of-another-kind: https://me:opensesame@example.org/x."
    header = ValueError("Illegal header value b'Bearer the one given '")
    for raised, wanted in (
        (OSError(words), "me/x: *** ***: https://me:***@example.org/x."),
        (header, "me/x: Illegal header value b'Bearer ***'."),
    ):
        with pytest.raises(InputError) as error, library_errors_at("me/x", secrets=["the one given ", None]):
            raise raised
        assert str(error.value) == wanted
        assert error.value.__cause__ is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", '{"a": [{"b": "/data/x/el.jsonl"}]}', "config.json: holds a path of this machine .*/data/x/el"),
        ("recipe.yaml", "base: ~/models/tiny", "recipe.yaml: holds a path of this machine .~/models/tiny"),
        ("plan.json", r'{"a": "C:\\Users\\me"}', "plan.json: holds a path"),
        ("README.md", "see /home/me/notes", "README.md: holds a path of this machine ./home/me/notes"),
        ("x.py", "TOKEN = 'hf_abcdefghijklmnopqrstuvwxyz'", r"x.py: holds an access token .hf_abc\.\.\."),
        ("tokenizer.json", '{"sk-abcdefghijklmnopqrstuvwx": 1}', "tokenizer.json: holds an access token"),
        ("x.py", "t = 'github_pat_11ABCDEFGHIJKLMNOPQRST_abcdefghijkl'", "an access token .github"),
        ("README.md", "xoxb-123456789012-abcdefghijklmnop", "an access token .xoxb-1"),
        ("x.txt", "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "an access token .wJal"),
        ("x.txt", "-----BEGIN RSA PRIVATE KEY-----\\nMIIE", "a private key"),
        ("recipe.yaml", "base: https://me:opensesame@example.org/x", "a password in an address .o..."),
        ("plan.json", '{"a": "s3://key:ghijklmno@host/x"}', "a password in an address"),
    ],
)
def test_tokens_and_local_paths_are_refused(name, text, message):
    assert "ghijkl" not in refused(refuse_private, {name: text.encode()}, says=message)


def test_what_only_looks_like_a_path_passes():
    for name, text in (
        ("README.md", "https://huggingface.co/home/me/x and and/or, a/b/c; 24 h/day"),
        ("config.json", '{"a": "org/model", "b": "/", "c": "</s>", "d": "24/7"}'),
        ("tokenizer.json", '{"/home/me": 1, "/usr/bin/x": 2}'),
        ("tokenizer_config.json", r'{"chat_template": "Q:\n\nA:\n/think/no"}'),
        ("README.md", "https://example.org/a:b@c and mailto:me@example.org, https://$USER:$PASSWORD@example.org"),
    ):
        refuse_private({name: text.encode()})


def test_metadata_of_weight_files_and_the_token_in_use_are_checked_too(tmp_path, monkeypatch):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"from": "/home/me/run"})
    refused(refuse_private, {"model.safetensors": tmp_path / "model.safetensors"}, says=r"model\.safetensors: holds a")
    monkeypatch.setenv("HF_TOKEN", "a-token-of-another-kind")
    refused(refuse_private, {"README.md": b"key: a-token-of-another-kind"}, says="an access token")


def test_a_base_that_cannot_be_asked_for_is_named_and_said(tiny_el, monkeypatch):
    monkeypatch.setattr(card, "snapshot_download", Mock(side_effect=LocalEntryNotFoundError("not in the cache")))
    said = []
    pushed = push_to_hub(tiny_el, "me/tiny-el", base="org/tiny", dry_run=True, say=said.append)
    assert any(line.startswith("base: org/tiny was not compared with the checkpoint") for line in said)
    assert "org/tiny" in pushed.card
