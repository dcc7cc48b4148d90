"""Publishing, against a server that speaks the hub's protocol; clients are processes of their own."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import save_dense, tiny_config
from safetensors.torch import load_file, save_file

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.core.disk import readable_size

PLAN = Plan("layer-moe", [3, 1, 2], [0], old=["en"], new=["el"])
WEIGHTS = "model-00001-of-00003.safetensors"
SCORE = {"perplexity": 9.5, "bits_per_byte": 1.25, "tokens": 100, "bytes": 200}


@pytest.fixture(scope="module")
def base(server, tmp_path_factory):
    """A dense model on the hub, with a license."""
    folder = save_dense(tmp_path_factory.mktemp("dense") / "tiny")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# tiny\n")
    server.add("org/tiny", {file.name: file.read_bytes() for file in folder.iterdir()})
    return folder


@pytest.fixture(scope="module")
def run_folder(base, client, tmp_path_factory):
    """What `run` leaves behind, with the base from the hub."""
    folder = tmp_path_factory.mktemp("run")
    PLAN.save(folder / "plan.json")
    code = "from hf_moe_expand import Plan, expand_checkpoint\n"
    code += "expand_checkpoint('org/tiny', run + '/review', Plan.load(run + '/plan.json'), max_shard_size='80KB')"
    client.run(code, run=str(folder))
    names = ["base", "post-pretrained", "reviewed"]
    evaluation = {"old": ["en"], "new": ["el"], "models": {name: {"en": SCORE, "el": SCORE} for name in names}}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    (folder / "recipe.yaml").write_text("base: org/tiny\noutput: runs/el\nnew: {el: el.jsonl}\n")
    (folder / "steps.json").write_text("{}")
    (folder / "review" / "trainer_state.json").write_text('{"best_model_checkpoint": "/home/me/x"}')
    return folder


@pytest.fixture
def checkpoint(run_folder, tmp_path):
    """A copy of the final checkpoint to change at will."""
    return Path(shutil.copytree(run_folder / "review", tmp_path / "tiny-el"))


def change_weights(folder):
    """Adds 1 to every weight of every file."""
    for file in folder.glob("*.safetensors"):
        save_file({name: value + 1 for name, value in load_file(file).items()}, file, metadata={"format": "pt"})


def test_push_publishes_what_belongs_to_the_checkpoint_and_an_unchanged_one_sends_nothing(server, client, run_folder):
    said = client.push(run_folder / "review", "tiny-el", check=True, private=True)["value"]
    found, repo = server.files("me/tiny-el"), server.repo("me/tiny-el")
    local = {file.name: file.read_bytes() for file in (run_folder / "review").iterdir()}
    del local["trainer_state.json"], local["base_check.json"]
    local |= {name: (run_folder / name).read_bytes() for name in ("plan.json", "recipe.yaml", "evaluation.json")}
    card = found.pop("README.md").decode()
    assert set(found) - set(local) == {".gitattributes"}
    assert {name: found[name] for name in local} == local
    assert WEIGHTS in local
    assert repo.private
    assert (said["repo_id"], said["commit"]) == ("me/tiny-el", repo.branches["main"])  # in the token's namespace
    assert card == said["card"]
    data = yaml.safe_load(card.split("---")[1])
    assert (data["base_model"], data["license"]) == ("org/tiny", "apache-2.0")  # the base's
    assert 'from_pretrained("me/tiny-el", trust_remote_code=True)' in card
    assert "| el (new) | 1.250 | 1.250 | +0.0 % |" in card
    commits, sent = server.count("POST", "/commit/"), server.count("PUT")
    again = client.push(run_folder / "review", "me/tiny-el")
    assert (again["value"]["changed"], again["value"]["commit"]) == (False, said["commit"])
    assert "unchanged" in again["said"]
    assert (server.count("POST", "/commit/"), server.count("PUT")) == (commits, sent)


def test_a_broken_upload_goes_on_where_it_stopped(server, client, checkpoint):
    change_weights(checkpoint)  # nothing of it is on the server yet
    names = sorted(file.name for file in checkpoint.glob("*.safetensors"))
    assert len(names) == 3
    server.uploads_left = 2
    try:
        broken = client.push(checkpoint, "me/broken")
    finally:
        server.uploads_left = None
    assert broken["message"].startswith("me/broken: Error while uploading 'model-0")
    assert set(server.files("me/broken")) == {".gitattributes"}
    sent = server.count("PUT")
    assert client.push(checkpoint, "me/broken")["value"]["changed"]
    assert server.count("PUT") - sent == 1
    found = server.files("me/broken")
    assert all(found[name] == (checkpoint / name).read_bytes() for name in names)


PULL = """
import json, sys
sys.modules["hf_moe_expand"] = None
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
first, local = sys.argv[1:]
remote = {"trust_remote_code": True}
found = {}
model = AutoModelForCausalLM.from_pretrained("me/pinned", **remote)
found["experts"] = model.config.num_experts_per_layer
tokenizer = AutoTokenizer.from_pretrained("me/pinned", **remote)
batch = tokenizer("text", return_tensors="pt")
found["generated"] = model.generate(**batch, max_new_tokens=4, do_sample=False).shape[1] - batch.input_ids.shape[1]
name = "model.layers.0.mlp.router.weight"
old = AutoModelForCausalLM.from_pretrained("me/pinned", revision=first, **remote)
found["step"] = (model.get_parameter(name) - old.get_parameter(name)).mean().item()
whole = AutoModelForCausalLM.from_pretrained(local, **remote).state_dict()
AutoTokenizer.from_pretrained("me/pinned", trust_remote_code=False)  # the tokenizer is the library's own
assembled = AutoModelForCausalLM.from_pretrained("me/added", **remote)
found["added is whole"] = all(torch.equal(whole[key], value) for key, value in assembled.state_dict().items())
found["hidden"] = list(AutoModel.from_pretrained("me/added", **remote)(**batch).last_hidden_state.shape)
try:
    AutoConfig.from_pretrained("me/pinned", token=False, cache_dir=local + "-cache", **remote)
except OSError as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""


def test_anyone_with_transformers_alone_pulls_it(server, client, base, checkpoint, tmp_path):
    first = client.push(checkpoint, "me/pinned", private=True)["value"]["commit"]
    assert client.push(checkpoint, "me/added", expansion_only=True)["value"]["changed"]
    assert not any(name.startswith("model") and name.endswith(".safetensors") for name in server.files("me/added"))
    assert "expansion.safetensors" in server.files("me/added")
    local = shutil.copytree(checkpoint, tmp_path / "whole")
    change_weights(checkpoint)
    second = client.push(checkpoint, "me/pinned")["value"]
    assert second["changed"]
    assert second["commit"] != first
    # The base moves on; the expansion asks for the commit that it was made from.
    original = {name: data for name, data in server.files("org/tiny").items() if not name.endswith(".safetensors")}
    server.add("org/tiny", {**original, "model.safetensors": b"something else"})
    command = [sys.executable, "-c", PULL, first, str(local)]
    environment = server.environment(tmp_path / "fresh")
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["experts"], found["generated"], found["hidden"]) == ([3, 1, 2], 4, [1, 4, 32])
    assert found["step"] == pytest.approx(1, abs=1e-5)
    assert found["added is whole"]
    assert "me/pinned" in found["refused"]


def test_a_push_to_a_branch_leaves_main_alone_and_shards_of_an_earlier_push_do_not_stay(server, client, checkpoint):
    client.push(checkpoint, "me/again")
    before = server.files("me/again")
    change_weights(checkpoint)
    client.push(checkpoint, "me/again", revision="longer")
    assert server.files("me/again") == before
    assert server.files("me/again", "longer")[WEIGHTS] == (checkpoint / WEIGHTS).read_bytes() != before[WEIGHTS]
    code = "from hf_moe_expand.modeling import LayerMoEForCausalLM\n"
    code += "LayerMoEForCausalLM.from_pretrained(folder).save_pretrained(folder + '-one')"
    client.run(code, folder=str(checkpoint))
    client.push(f"{checkpoint}-one", "me/again")
    assert {name for name in server.files("me/again") if "safetensors" in name} == {"model.safetensors"}


def test_a_dry_run_prints_files_and_card_and_asks_the_hub_for_nothing(server, client, checkpoint):
    asked = len(server.requests)
    done = client.push(checkpoint, "me/dry", token="", dry_run=True)
    # A process of another test may still end its own.
    assert not [one for one in server.requests[asked:] if "dry" in one or "whoami" in one]
    assert f"{readable_size((checkpoint / WEIGHTS).stat().st_size):>10}  {WEIGHTS}\n" in done["said"]
    assert "no evaluation" in done["said"]  # this folder lies in no run
    assert done["value"]["commit"] is None
    assert ("model", "me/dry") not in server.repos
    # A card that a trainer wrote gives way to ours.
    (checkpoint / "README.md").write_text("---\ntags: [generated_from_trainer]\n---\n# theirs\n")
    card = client.push(checkpoint, "me/x", token="", dry_run=True)["value"]["card"]
    assert "# theirs" not in card
    assert "LayerMoE" in card


@pytest.fixture
def of_a_folder(server, base, tmp_path):
    """A run whose base was a local folder, as its recipe says; the hub has it as org/mine."""
    server.add("org/mine", {file.name: file.read_bytes() for file in base.iterdir()})
    shutil.copytree(base, tmp_path / "models" / "mine")
    run = tmp_path / "run"
    expand_checkpoint(tmp_path / "models" / "mine", run / "review", PLAN)
    (run / "steps.json").write_text("{}")
    (run / "recipe.yaml").write_text(
        f"base: {tmp_path}/models/mine\nold: {{en: $DATA/en.jsonl}}\nnew: {{el: {tmp_path}/el.jsonl}}  # /home/me\n"
    )
    (run / "settings.json").write_text(json.dumps({"base": f"{tmp_path}/models/mine", "old": {"en": "$DATA/en.jsonl"}}))
    return run / "review"


def test_the_base_can_be_named_after_training(server, client, of_a_folder):
    before = (of_a_folder / "config.json").read_bytes()
    assert json.loads(before)["expansions"][0]["base_model"] == "mine"
    said = client.push(of_a_folder, "me/local")["said"]
    assert "base: mine, a local folder; if it is published too, name it with --base HUB_ID" in said
    files = server.files("me/local")  # of local paths the last part
    assert files["recipe.yaml"].decode() == "base: mine\nold: {en: $DATA/en.jsonl}\nnew: {el: el.jsonl}  # me\n"
    assert json.loads(files["settings.json"]) == {"base": "mine", "old": {"en": "$DATA/en.jsonl"}}
    client.push(of_a_folder, "me/named", base="org/mine")
    files = server.files("me/named")
    (record,) = json.loads(files["config.json"])["expansions"]
    assert record["base_model"] == "org/mine"
    assert record["base_revision"]
    assert "base_model: org/mine" in files["README.md"].decode()
    assert f"revision `{record['base_revision']}`" in files["README.md"].decode()
    assert {**json.loads(files["config.json"]), "expansions": 0} == {**json.loads(before), "expansions": 0}
    assert (of_a_folder / "config.json").read_bytes() == before
    only = client.push(of_a_folder, "me/named-only", base="org/mine", expansion_only=True)
    assert "value" in only, only
    fields = json.loads(server.files("me/named-only")["config.json"])
    assert fields["expansions"] == [record]
    assert fields["parts"]["expansion_only"] == {"base_model": "org/mine", "revision": record["base_revision"]}


PACKS = """
from hf_moe_expand import Plan, expand_checkpoint
for code, counts in (("el", [3, 1, 2]), ("hu", [2, 2, 1])):
    plan = Plan("layer-moe", counts, old=["en"], new=[code], exclusive=True)
    expand_checkpoint("org/of-packs", f"{folder}/tiny-{code}", plan, seed=counts[0])
"""
JOIN = """
from hf_moe_expand import join_expansions
result = join_expansions(packs, out).packs
"""


def test_packs_of_the_hub_join_and_the_joined_model_is_published(server, client, base, tmp_path):
    server.add("org/of-packs", {file.name: file.read_bytes() for file in base.iterdir()})
    client.run(PACKS, folder=str(tmp_path))
    for code in ("el", "hu"):
        assert "value" in client.push(tmp_path / f"tiny-{code}", f"me/tiny-{code}", expansion_only=True)
    joined, here, names = tmp_path / "joined", tmp_path / "here", ["me/tiny-el", "me/tiny-hu"]
    assert client.run(JOIN, packs=names, out=str(joined))["value"] == names
    client.run(JOIN, packs=[str(tmp_path / "tiny-el"), str(tmp_path / "tiny-hu")], out=str(here))
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (here, joined))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for repo, options in (("me/joined", {}), ("me/joined-only", {"expansion_only": True})):
        answer = client.push(joined, repo, **options)
        assert "[me/tiny-hu](https://huggingface.co/me/tiny-hu)" in answer["value"]["card"]
    assert "model.safetensors" not in server.files("me/joined-only")
    more = client.run(JOIN, packs=["me/joined-only", str(tmp_path / "tiny-el")], out=str(tmp_path / "no"))
    assert "me/joined-only and tiny-el both add it" in more["message"]


def test_a_base_that_cannot_be_it_is_refused(server, client, of_a_folder, tmp_path):
    tiny_config("qwen2", hidden_size=64).save_pretrained(tmp_path)
    server.add("org/wide", {"config.json": (tmp_path / "config.json").read_bytes()})
    server.add("org/empty", {"README.md": b"x"})
    for message, options in (
        ("was expanded from mine, a local folder: give `base`", {"expansion_only": True}),
        ("--base /: is a local folder; give the base model's hub id", {"base": "/"}),
        ("--base org/nothing: 404 Client Error. Repository Not Found for url", {"base": "org/nothing"}),
        ("^--base org/wide: is not the model that was expanded: its hidden_size is 64, not 32", {"base": "org/wide"}),
        ("--base org/empty: .*config.json: no such file", {"base": "org/empty"}),
    ):
        assert re.search(message, client.push(of_a_folder, "me/x", dry_run=True, **options)["message"])


def test_what_a_push_refuses(server, client, checkpoint):
    server.add("me/public", {"README.md": b"x"})
    commits = server.count("POST", "/commit/")
    for repo_id, options, message in (
        ("me/x", {"token": ""}, "Token is required .* logged in to Hugging Face with `hf auth login`"),
        ("me/x", {"token": "hf_" + "wrong" * 6}, "Invalid user token"),
        ("other/x", {}, "403 Forbidden: You don't have the rights to create a model"),
        ("me/public", {"private": True}, "exists already and is public"),
        ("a/b/c", {}, "Repo id must be in the form"),
    ):
        said = client.push(checkpoint, repo_id, **options)["message"]
        assert re.search(f"{repo_id}: {message}", said)
        assert "\n" not in said
    assert server.count("POST", "/commit/") == commits


def test_a_checkpoint_that_does_not_load_alone_is_refused(server, client, checkpoint):
    (checkpoint / "tokenizer.json").write_text("{}")
    answer = client.push(checkpoint, "me/unloadable", check=True)
    assert "does not load in a fresh process with transformers alone" in answer["message"]
    assert ("model", "me/unloadable") not in server.repos


def test_a_private_model_without_a_token_is_a_clear_error(server, client):
    server.add("me/secret", {"config.json": b"{}"}, private=True)
    client.run("import os; os.environ.pop('HF_TOKEN', None)")
    code = "from hf_moe_expand.checkpoint.source import resolve_checkpoint; resolve_checkpoint(name)"
    said = client.run(code, name="me/secret")["message"]
    assert said.startswith("me/secret: no such folder, and the hub does not give it: 401 Client Error.")
    assert "private or gated repo, make sure you are authenticated" in said
