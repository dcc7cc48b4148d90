"""A run's folder in the place of a checkpoint; what a run ends with; and the card, which is the one `push` writes."""

import shlex
import shutil

import pytest
from conftest import byte_tokenizer, invoke, refused, save_dense, write_texts
from typer.testing import CliRunner

from hf_moe_expand import Plan, cli, expand_checkpoint, run_recipe
from hf_moe_expand.checkpoint.source import local_checkpoint, name_in_results
from hf_moe_expand.core.saying import say_once
from hf_moe_expand.hub import card as card_module
from hf_moe_expand.hub.publish import card_to_push, push_to_hub
from hf_moe_expand.runs.pipeline import _what_follows
from hf_moe_expand.runs.recipe import Recipe

RECIPE = """
base: {root}/base
output: {root}/qwen el
old: {{en: {root}/en.jsonl}}
new: {{el: {root}/el.jsonl}}
test: {{el: {root}/el.test.jsonl}}
plan: {{method: moe-lpr, experts: 2}}
post_pretrain: {{block_size: 16, max_steps: 1, per_device_train_batch_size: 1, save_strategy: "no"}}
review: null
evaluation: {{block_size: 16}}
"""


@pytest.fixture(autouse=True)
def said_anew():
    say_once.cache_clear()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of a run, and what the run said."""
    root = tmp_path_factory.mktemp("ran")
    save_dense(root / "base")
    for code, text in {"en": "The cat sat on the mat. ", "el": "Η γάτα κάθισε στο χαλί. "}.items():
        write_texts(root / f"{code}.jsonl", [text * 3] * 4)
    write_texts(root / "el.test.jsonl", ["Ο σκύλος κοιμάται στον κήπο όλη μέρα."] * 4)
    said = []
    run_recipe(Recipe.of_text(RECIPE.format(root=root), "recipe.yaml"), said.append)
    return root / "qwen el", "\n".join(said)


def test_a_run_ends_with_three_commands_that_work(ran):
    run, said = ran
    _, *commands = said[said.index("what follows:") :].splitlines()
    assert [shlex.split(line)[:2] for line in commands] == [
        ["hf-moe-expand", verb] for verb in ("report", "chat", "push")
    ]
    _, chat, push = (invoke(*shlex.split(line)[1:]) for line in commands)
    assert (run / "report.html").is_file()
    assert "base inside" in chat
    assert "model.safetensors" in push


def test_a_model_with_a_chat_template_is_chatted_with(ran, tmp_path):
    final = tmp_path / "chats"
    shutil.copytree(ran[0] / "post_pretrain", final)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(final)
    assert _what_follows(tmp_path, final)[1] == f"hf-moe-expand chat {final} --base inside"


def test_a_run_s_folder_stands_for_its_last_checkpoint(ran, tmp_path):
    run, _ = ran
    last, data = run / "post_pretrain", f"el={run.parent / 'el.jsonl'}"
    for verb in (
        ["inspect", run], ["card", run], ["push", run, "me/x", "--dry-run"], ["chat", run, "--prompt", "The"],
        ["diff", run / "expanded", run],
        ["evaluate", run, "--data", data, "--max-tokens", "20", "--out", tmp_path / "e.json", "--overwrite"],
        ["analyze", "routing", run, "--data", data, "--out", tmp_path / "r.json", "--tokens", "100", "--overwrite"],
    ):  # fmt: skip
        say_once.cache_clear()
        by_run, by_stage = (
            CliRunner().invoke(cli.app, [str(place if part is run else part) for part in verb]) for place in (run, last)
        )
        assert "is the folder of a run" in by_run.stderr, verb
        assert str(last) in by_run.stderr
        assert "is the folder of a run" not in by_stage.stderr
        assert by_run.exit_code == by_stage.exit_code == (verb[0] == "diff"), verb
        assert by_run.stdout == by_stage.stdout, verb
    assert name_in_results(run) == name_in_results(last) == "qwen el/post_pretrain"


def test_a_run_s_folder_before_its_first_checkpoint_and_after_one_is_gone(ran, tmp_path):
    run = shutil.copytree(ran[0], tmp_path / "run")
    shutil.rmtree(run / "post_pretrain")
    assert local_checkpoint(run) == run / "expanded"
    shutil.rmtree(run / "expanded")
    for record in ((run / "steps.json").read_text(), '{"expand": 3, "other": {"output": ["x"]}}'):
        (run / "steps.json").write_text(record)
        refused(local_checkpoint, run, says="of a run that has no finished checkpoint: run its recipe again")


@pytest.mark.parametrize("stage", ["", "expanded", "post_pretrain"])
@pytest.mark.parametrize("options", [{}, {"license": "mit"}, {"base": "org/base"}], ids=str)
def test_card_prints_what_push_writes(ran, monkeypatch, stage, options):
    monkeypatch.setattr(card_module, "_base_license", lambda base: {})
    monkeypatch.setattr("hf_moe_expand.hub.publish.base_on_hub", lambda config, base, token: card_module.BaseModel(
        base, base, None))  # fmt: skip
    notes, pushed = [], []
    card, *_ = card_to_push(ran[0] / stage, "me/x", say=notes.append, **options)
    assert card == push_to_hub(ran[0] / stage, "me/x", dry_run=True, say=pushed.append, **options).card
    assert notes == [line for line in pushed if line in notes]
    assert any("warning: the card names no license" in line for line in notes) == ("license" not in options)
    assert ("| el (new) |" in card) == (stage != "expanded")  # the run's evaluation, where it has this model


def test_a_card_of_the_users_own_is_pushed_as_it_stands(tmp_path):
    expand_checkpoint(save_dense(tmp_path / "tiny"), tmp_path / "el", Plan("moe-lpr", [2] * 3, old=["en"], new=["el"]))
    own, said = tmp_path / "el" / "README.md", []
    for metadata, warned in (("language: [el]", True), ("license: mit", False)):
        own.write_text(f"---\n{metadata}\n---\n# mine\n")
        assert push_to_hub(tmp_path / "el", "me/x", dry_run=True, say=said.append).card == own.read_text()
        assert any("names no license" in line for line in said) == warned
        said.clear()
    assert "# mine" not in card_to_push(tmp_path / "el", "me/x", say=said.append)[0]
    assert any("which `push` publishes as it stands" in line for line in said)
