"""What goes into a push, without a hub: which files, whose code, no secrets."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import refused, save_dense
from safetensors.torch import save_file

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.checkpoint.average import average_checkpoints
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.private import library_errors_at, refuse_private
from hf_moe_expand.hub.published import check_code, check_loads_alone, published_files

PLAN = Plan("layer-moe", [3, 1, 2], [0], old=["en"], new=["el"])


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    expand_checkpoint(save_dense(folder / "tiny"), folder / "tiny-el", PLAN)
    return folder / "tiny-el"


@pytest.fixture
def folder(local, tmp_path):
    return Path(shutil.copytree(local, tmp_path / "tiny-el"))


def test_other_files_stay_here_unless_included(folder):
    said = []
    before = published_files(folder, say=said.append)
    (folder / "notes.txt").write_text("x")
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "optimizer.pt").write_text("x")
    assert published_files(folder, say=said.append) == before
    assert said == ["not published: checkpoint-5, notes.txt"]
    assert set(published_files(folder, ["notes.txt"])) == {*before, "notes.txt"}
    refused(published_files, folder, ["../x"], says=r"\.\./x is no file in the folder")


def test_keys_and_links_do_not_go_along_with_the_tokenizer(folder, tmp_path):
    before = published_files(folder)
    (folder / "tokenizer_key.pem").write_text("x")
    assert published_files(folder) == before
    (folder / "tokenizer_key.pem").unlink()
    (tmp_path / "secret.json").write_text("{}")
    (folder / "added_tokens.json").symlink_to(tmp_path / "secret.json")
    refused(published_files, folder, says=r"added_tokens\.json is no file in the folder, or a link")
    (folder / "added_tokens.json").unlink()
    (folder / "notes.txt").symlink_to(tmp_path / "secret.json")
    refused(published_files, folder, ["notes.txt"], says=r"notes\.txt is no file in the folder, or a link")
    refused(published_files, folder, [str(folder / "config.json")], says=r"config\.json is no file in the folder")
    (folder / "notes.txt").unlink()
    assert published_files(folder) == before


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
def test_only_this_package_s_code_is_run(folder, name, change, message):
    check_code(folder)
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(change(file.read_text() if file.is_file() else ""))
    refused(check_loads_alone, folder, says=message)


def test_a_checkpoint_with_changed_code_is_written_anew_as_the_message_says(folder):
    (folder / "expanded_ffn.py").write_text("raise SystemExit\n")
    with pytest.raises(InputError, match="Write it again") as refused:
        check_code(folder)
    command = re.search(r'python -c "(.*)"', str(refused.value))
    assert command
    exec(command[1], {})
    check_code(folder)


def test_the_check_runs_without_tokens(folder, monkeypatch):
    seen = {}
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "hf_secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")

    def run(*_, env, **__):
        seen.update(env)
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setattr(subprocess, "run", run)
    check_loads_alone(folder)
    assert not {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY"} & set(seen)
    assert "hf_secret" not in seen.values()
    assert not Path(seen["HF_TOKEN_PATH"]).exists()


def test_no_reference_to_code_travels_with_a_base(tmp_path):
    base = save_dense(tmp_path / "base")
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        fields = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps({**fields, "auto_map": {"AutoTokenizer": ["x/y--t.T", None]}}))
    (base / "custom_generate").mkdir()
    (base / "custom_generate" / "generate.py").write_text("")
    (base / "t.py").write_text("")
    expand_checkpoint(base, tmp_path / "out", PLAN)
    merge = average_checkpoints([base, base], tmp_path / "mean")
    for folder in (tmp_path / "out", merge):
        assert not any("x/y" in file.read_text() for file in folder.glob("*.json"))
        assert not (folder / "custom_generate").exists()
        assert not (folder / "t.py").exists()
    assert "auto_map" not in json.loads((merge / "config.json").read_text())
    check_code(tmp_path / "out")


def test_code_goes_along_and_none_is_missing(folder):
    code = {name for name in published_files(folder) if name.endswith(".py")}
    assert {"modeling_layer_moe.py", "expanded_model.py", "parts.py", "expanded_config.py"} <= code
    (folder / "modeling_layer_moe.py").unlink()
    refused(check_loads_alone, folder, says=r"does not load in a fresh process .*modeling_layer_moe\.py")


def test_no_token_and_no_password_reaches_a_message(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-token-of-another-kind")
    words = f"hf_{'x' * 30}\na-token-of-another-kind, the-token-given: https://me:opensesame@example.org/x."
    with pytest.raises(InputError) as refused, library_errors_at("me/x", "the-token-given"):
        raise OSError(words)
    assert str(refused.value) == "me/x: *** ***, ***: https://me:***@example.org/x."


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", '{"a": [{"b": "/data/x/el.jsonl"}]}', "config.json: holds a path of this machine .*/data/x/el"),
        ("config.json", '{"/srv/me/x": 1}', "/srv/me/x"),
        ("recipe.yaml", "base: ~/models/tiny", "recipe.yaml: holds a path of this machine .~/models/tiny"),
        ("plan.json", r'{"a": "C:\\Users\\me"}', "plan.json: holds a path"),
        ("README.md", "see /home/me/notes", "README.md: holds a path of this machine ./home/me/notes"),
        ("README.md", "file by `/Users/me/x`", "/Users/me/x"),
        ("x.py", "TOKEN = 'hf_abcdefghijklmnopqrstuvwxyz'", r"x.py: holds an access token .hf_abc\.\.\."),
        ("tokenizer.json", '{"hf_abcdefghijklmnopqrstuvwxyz": 1}', "tokenizer.json: holds an access token"),
        ("config.json", '{"key": "sk-abcdefghijklmnopqrstuvwx"}', "an access token"),
        ("recipe.yaml", "a: [", "recipe.yaml: not YAML: line 1"),
        ("config.json", '{"a": ' + "[" * 100_000, "config.json: cannot be read .*recursion depth"),
        ("x.py", "t = 'github_pat_11ABCDEFGHIJKLMNOPQRST_abcdefghijkl'", "an access token .github"),
        ("README.md", "xoxb-123456789012-abcdefghijklmnop", "an access token .xoxb-1"),
        ("README.md", "glpat-abcdefghijklmnopqrst", "an access token"),
        ("README.md", "ASIAABCDEFGHIJKLMNOP", "an access token"),
        ("x.txt", "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "an access token .wJal"),
        ("x.txt", "-----BEGIN RSA PRIVATE KEY-----\\nMIIE", "a private key"),
        ("x.txt", "-----BEGIN OPENSSH PRIVATE KEY-----", "a private key"),
        ("recipe.yaml", "base: https://me:opensesame@example.org/x", "a password in an address .o..."),
        ("plan.json", '{"a": "s3://key:ghijklmno@host/x"}', "a password in an address"),
    ],
)
def test_tokens_and_local_paths_are_refused(name, text, message):
    with pytest.raises(InputError, match=message) as refused:
        refuse_private({name: text.encode()})
    assert "ghijkl" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("README.md", "https://huggingface.co/home/me/x and and/or, a/b/c; 24 h/day"),
        ("config.json", '{"a": "org/model", "b": "/", "c": "</s>", "d": "24/7"}'),
        ("tokenizer.json", '{"/home/me": 1, "/usr/bin/x": 2}'),
        ("tokenizer_config.json", r'{"chat_template": "Q:\n\nA:\n/think/no"}'),
        ("recipe.yaml", "old: {en: data/en.jsonl}"),
        ("README.md", "https://example.org/a:b@c and mailto:me@example.org, https://$USER:$PASSWORD@example.org"),
        ("tokenizer.json", '{"://": 1, ":": 2, "@": 3}'),
    ],
)
def test_what_only_looks_like_a_path_passes(name, text):
    refuse_private({name: text.encode()})


def test_metadata_of_weight_files_is_checked_too(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"from": "/home/me/run"})
    with pytest.raises(InputError, match=r"model\.safetensors: holds a path of this machine"):
        refuse_private({"model.safetensors": tmp_path / "model.safetensors"})


def test_the_token_in_use_is_found_whatever_it_looks_like(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-token-of-another-kind")
    refused(refuse_private, {"README.md": b"key: a-token-of-another-kind"}, says="an access token")
