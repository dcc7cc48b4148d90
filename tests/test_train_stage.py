"""`train_stage` when things go wrong, what it records, and held-out loss meanwhile, which training does not notice."""

import json
import math
import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from conftest import byte_tokenizer, fork_ranks, interrupted, invoke, keywords, refused, save_dense, write_texts
from safetensors.torch import load_file, save_file

import hf_moe_expand as moe
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.source import load_expanded_config
from hf_moe_expand.core.errors import DivergedError, InputError
from hf_moe_expand.stages.config import ValidationSettings
from hf_moe_expand.stages.prepare import check_enough
from hf_moe_expand.stages.run import check_frozen
from hf_moe_expand.stages.trainer import StageTrainer

QUICK = {"per_device_train_batch_size": 2, "learning_rate": 1e-3, "disable_tqdm": True}
FROZEN, TRAINED = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.1.up_proj.weight"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("stage")
    write_texts(root / "el.jsonl", [f"η γάτα {i} κάθεται" for i in range(30)])
    write_texts(root / "en.jsonl", [f"the cat {i} sits" for i in range(20)])
    write_texts(root / "hi.jsonl", [f"बिल्ली {i}" for i in range(30)])
    save_dense(root / "dense")
    moe.expand_checkpoint(root / "dense", root / "expanded", moe.Plan("moe-lpr", [2, 1, 2], old=["en"], new=["el"]))
    moe.expand_checkpoint(root / "dense", root / "dmoe", moe.Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]]))
    return root


def texts_in(folder, *codes, suffix=".jsonl"):
    return {code: moe.LanguageText(code, f"{folder}/{code}{suffix}") for code in codes}


@pytest.fixture
def data(root):
    return texts_in(root, "el")


def config(**changes):
    return moe.PostPretrainConfig(**{"block_size": 16, "max_steps": 2, **QUICK, **changes})


def same_files(folder, expected):
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in expected.iterdir())
    for path in expected.iterdir():
        if path.name != "trainer_state.json":  # it holds times
            assert (folder / path.name).read_bytes() == path.read_bytes(), path.name


CHANGES = {
    "a frozen tensor less": (lambda tensors: tensors.pop(FROZEN), FROZEN),
    "a trained tensor less": (lambda tensors: tensors.pop(TRAINED), TRAINED),
    "a tensor more": (lambda tensors: tensors.update(more=torch.ones(3)), "more"),
    "a frozen tensor changed": (lambda tensors: tensors[FROZEN].view(-1)[0].add_(1e-6), FROZEN),
}


@pytest.mark.parametrize("case", CHANGES)
def test_p3_a_tensor_that_had_to_stay_is_found_out(root, tmp_path, case):
    assert check_frozen(root / "expanded", root / "expanded", moe.PostPretrainConfig())
    change, name = CHANGES[case]
    after = shutil.copytree(root / "expanded", tmp_path / "after")
    tensors = load_file(after / "model.safetensors")
    change(tensors)
    save_file(tensors, after / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError, match=f"post-pretrain changed tensors that it had to leave alone: {name}"):
        check_frozen(root / "expanded", after, moe.PostPretrainConfig())


def both(root):
    return {"en": moe.LanguageText("en", str(root / "hi.jsonl")), "el": moe.LanguageText("el", str(root / "el.jsonl"))}


def test_the_record_counts_the_text_that_was_seen(root, tmp_path, monkeypatch):
    batches, step = [], StageTrainer.training_step

    def kept(trainer, model, inputs, *arguments):
        batches.append({name: value.clone() for name, value in inputs.items()})
        return step(trainer, model, inputs, *arguments)

    monkeypatch.setattr(StageTrainer, "training_step", kept, raising=False)
    options = config(gradient_accumulation_steps=3, max_steps=4, replay=True)
    record = moe.train_stage(root / "expanded", tmp_path / "out", both(root), options)
    ids = torch.cat([batch["language_ids"].flatten() for batch in batches])
    assert record.blocks_seen == sum(len(batch["input_ids"]) for batch in batches) == 4 * 3 * 2
    assert record.tokens_seen == len(ids) == 24 * 16
    counts = {code: int((ids == number).sum()) for number, code in enumerate(["en", "el"])}
    assert min(counts.values()) > 0
    assert record.tokens_seen_by_language == counts
    assert sum(record.tokens.values()) != record.tokens_seen


def test_a_dense_baseline_trains_with_a_share_of_replay(root, tmp_path):
    settings = moe.DenseConfig(block_size=16, max_steps=1, replay=["en"], replay_share=0.2, **QUICK)
    record = moe.train_stage(root / "dense", tmp_path / "out", both(root), settings)
    assert record.tokens["en"] / sum(record.tokens.values()) == pytest.approx(0.2, abs=0.03)
    assert (record.settings["replay"], record.settings["replay_share"]) == (["en"], 0.2)
    assert (record.blocks_seen, record.tokens_seen, record.tokens_seen_by_language) == (2, 32, None)


def test_an_epochs_last_batch_may_be_smaller(root, data, tmp_path):
    options = config(max_steps=-1, num_train_epochs=2, per_device_train_batch_size=7)
    record = moe.train_stage(root / "expanded", tmp_path / "out", data, options)
    blocks = record.tokens["el"] // 16
    assert blocks % 7
    assert record.blocks_seen == 2 * blocks
    assert record.tokens_seen == record.tokens_seen_by_language["el"] == 2 * blocks * 16


@pytest.mark.skipif(torch.accelerator.is_available(), reason="of a machine without tf32")
def test_what_the_machine_cannot_do_is_refused_where_training_begins(root, data, tmp_path):
    for wanted in (config(tf32=True), replace(config(), tf32=True), keywords(moe.PostPretrainConfig, tf32=True)):
        assert wanted.changes()["tf32"] is True
        refused(wanted.begun, says="tf32 requires Ampere")
        refused(moe.train_stage, root / "expanded", tmp_path / "out", data, wanted, says="tf32 requires Ampere")
    nothing_written(tmp_path / "out")


def nothing_written(out):
    assert not out.exists()
    assert not list(out.parent.glob(f".{out.name}.*"))


def test_a_learning_rate_that_diverges_is_exit_code_2_and_one_line(root, tmp_path, monkeypatch, capsys):
    (tmp_path / "stage.yaml").write_text("{block_size: 16, max_steps: 3, learning_rate: 1e30, disable_tqdm: true}")
    arguments = ("train", "post-pretrain", root / "expanded", tmp_path / "out", "--data", f"el={root / 'el.jsonl'}")
    arguments = (*arguments, "--config", tmp_path / "stage.yaml")
    monkeypatch.setattr(sys, "argv", ["hf-moe-expand", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        moe.cli.main()
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert re.search(r"error: post-pretrain: the (loss|norm of the gradient) is (nan|inf) at step [23]", said)
    assert "Traceback" not in said
    nothing_written(tmp_path / "out")


def test_weights_that_the_last_step_spoilt_are_not_written(root, data, tmp_path):
    # The only loss is that before the step.
    with pytest.raises(DivergedError, match=r"post-pretrain: \S+ is not finite after training"):
        moe.train_stage(root / "expanded", tmp_path / "out", data, config(learning_rate=1e39, max_steps=1))
    nothing_written(tmp_path / "out")


def test_a_review_that_may_take_fewer_documents_records_how_many_it_took(root, tmp_path):
    both = texts_in(root, "en", "el")
    there = {code: len(source.load()) for code, source in both.items()}
    options = {"block_size": 16, "max_steps": 1, "old_documents": 50_000, **QUICK}
    given = (root / "expanded", tmp_path / "out", both)
    refused(moe.train_stage, *given, moe.ReviewConfig(**options), says="set `fewer_documents: true`")
    record = moe.train_stage(*given, moe.ReviewConfig(fewer_documents=True, **options))
    old = min(there["en"], there["el"] // 2)
    assert record.documents == {"en": old, "el": 2 * old}
    history = json.loads((tmp_path / "out" / "config.json").read_text())["expansions"][-1]["stages"][-1]
    assert history["documents"] == record.documents
    assert (history["settings"]["old_documents"], history["settings"]["fewer_documents"]) == (50_000, True)
    card = str(moe.make_card(tmp_path / "out"))
    assert f"| en | {old} |" in card
    assert "fewer_documents: true" in card


def test_a_users_folder_named_as_the_training_folder_is_neither_used_nor_removed(root, data, tmp_path):
    mine = tmp_path / "out.training"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    said = r"out\.training: is not the folder of an interrupted training of out"
    refused(moe.train_stage, root / "expanded", tmp_path / "out", data, config(), says=said)
    assert [path.name for path in tmp_path.rglob("*")] == ["out.training", "notes.txt"]


def test_blocks_longer_than_the_models_positions_are_refused_before_any_work(root, data, tmp_path, monkeypatch):
    monkeypatch.setattr(moe.LanguageText, "load", lambda *_: pytest.fail("read text in vain"))
    dense, hindi, out = moe.DenseConfig(block_size=65), moe.LanguageText("hi", str(root / "hi.jsonl")), tmp_path / "out"
    refused(moe.train_stage, root / "dense", out, data, dense, says="block_size is 65, but the base takes 64")
    refused(moe.adapt_language, root / "dmoe", out, hindi, says="block_size is 2048, but the base takes 64")


def test_data_or_model_inside_the_training_folder_is_refused(root, data, tmp_path):
    ours = tmp_path / "out.training"
    ours.mkdir()
    (ours / ".hf-moe-expand").touch()  # as an interrupted training leaves it
    shutil.copyfile(root / "el.jsonl", ours / "el.jsonl")
    shutil.copytree(root / "expanded", ours / "model")
    for model, text, named in (
        (root / "expanded", texts_in(ours, "el"), r"el\.jsonl"),
        (ours / "model", data, "model"),
    ):
        said = rf"{named}: lies in \S+out\.training, which is removed at the end"
        refused(moe.train_stage, model, tmp_path / "out", text, config(), says=said)
    assert (ours / "el.jsonl").read_bytes() == (root / "el.jsonl").read_bytes()
    assert (ours / "model" / "model.safetensors").is_file()
    assert not (tmp_path / "out").exists()


def test_adaptation_does_not_touch_a_users_folder_named_as_its_scratch_folder(root, tmp_path):
    mine = tmp_path / "out.grown"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    source = moe.LanguageText("hi", str(root / "hi.jsonl"))
    chosen = moe.AdaptConfig(block_size=16, sample_tokens=100, max_steps=1, **QUICK)
    dead = tmp_path / f".out.grown-{2**22 + 1}"
    (dead / "model").mkdir(parents=True)
    assert moe.adapt_language(root / "dmoe", tmp_path / "out", source, chosen).record.steps == 1
    assert json.loads((tmp_path / "out" / "config.json").read_text())["language_groups"] == [["en"], ["el"], ["hi"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.grown"]
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]


WORDS = {"en": "the cat sat ", "el": "η γάτα κά", "tr": "kedi otur"}
TRAINING = {
    "max_steps": 5, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "disable_tqdm": True, "save_steps": 2
}  # fmt: skip


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """An expanded checkpoint whose backbone has dropout, and text."""
    scored = tmp_path_factory.mktemp("validation")
    for code, words in WORDS.items():
        write_texts(scored / f"{code}.jsonl", [f"{words} {i} {words}" for i in range(40)])
        write_texts(scored / f"{code}.test.jsonl", [f"{words} {i + 100}" for i in range(5)])
    plan = moe.Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el", "tr"])
    moe.expand_checkpoint(save_dense(scored / "dense", "gpt2"), scored / "expanded", plan)
    return scored


def train(scored, name, every=2, texts=("en", "el"), **changes):
    validation = ValidationSettings({code: str(scored / f"{code}.test.jsonl") for code in texts}, every, max_tokens=60)
    settings = {"validation": validation, "masking": moe.Masking(expert_output=0.2), **TRAINING, **changes}
    config = moe.PostPretrainConfig(block_size=16, **settings)
    moe.train_stage(scored / "expanded", scored / name, texts_in(scored, "el", "tr"), config)
    return scored / name


@pytest.fixture(scope="module")
def validated(scored):
    return train(scored, "validated")


def curves(folder):
    return json.loads((folder / "validation.json").read_text())


def test_every_so_many_steps_and_at_the_end_it_scores_what_evaluate_scores(validated, scored):
    found = curves(validated)
    assert found["steps"] == [0, 2, 4, 5]
    assert found["total_steps"] == 5
    assert found["trained"] == ["el", "tr"]
    for step, folder in ((0, scored / "expanded"), (-1, validated)):
        model = moe.LayerMoEForCausalLM.from_pretrained(folder)
        for code, source in texts_in(scored, "en", "el", suffix=".test.jsonl").items():
            texts = {code: source.load()["text"]}
            score = moe.evaluate_model(model, byte_tokenizer(), texts, 16, max_tokens=60)[code]
            assert found["loss"][code][step] == pytest.approx(math.log(score.perplexity), rel=1e-5)
            assert found["bits_per_byte"][code][step] == pytest.approx(score.bits_per_byte, rel=1e-5)
            assert found["tokens"][code] == score.tokens
    assert found["loss"]["el"][-1] < found["loss"]["el"][0]


def test_training_with_and_without_it_is_the_same_to_the_bit(validated, scored):
    without = train(scored, "without", texts=())
    assert not (without / "validation.json").exists()
    assert (without / "model.safetensors").read_bytes() == (validated / "model.safetensors").read_bytes()
    assert (without / "config.json").read_bytes() == (validated / "config.json").read_bytes()
    assert compare_checkpoints(scored / "expanded", validated).changed


def test_an_interrupted_run_ends_with_the_same_curves(scored):
    whole = train(scored, "whole", every=1)
    with interrupted(3), pytest.raises(KeyboardInterrupt):
        train(scored, "broken", every=1)
    assert curves(scored / "broken.training")["steps"] == [0, 1, 2, 3]
    assert (scored / "broken.training" / "checkpoint-2").is_dir()  # so step 3 comes again
    broken = train(scored, "broken", every=1)
    assert curves(broken)["steps"] == [0, 1, 2, 3, 4, 5]
    assert curves(broken) == curves(whole)


def test_two_ranks_score_what_one_does_and_one_writes(scored):
    settings = {"block_size": 16, "temperature": 2, "max_steps": 3, "learning_rate": 1e-2}
    settings["validation"] = {"texts": {code: str(scored / f"{code}.test.jsonl") for code in ("el", "tr")}}
    text = [part for code in ("el", "tr") for part in ("--data", f"{code}={scored / code}.jsonl")]
    for batch in (4, 2):  # in a step four blocks either way
        settings["per_device_train_batch_size"] = batch
        (scored / f"{batch}.yaml").write_text(json.dumps(settings))
    plan = moe.Plan("moe-lpr", [2, 1, 1], new=["el", "tr"])
    moe.expand_checkpoint(save_dense(scored / "no-dropout"), scored / "plain", plan)
    invoke("train", "post-pretrain", scored / "plain", scored / "one", *text, "--config", scored / "4.yaml")
    fork_ranks(
        "hf_moe_expand", "train", "post-pretrain", *map(str, (scored / "plain", scored / "two")), *text,
        "--config", str(scored / "2.yaml"),
    )  # fmt: skip
    one, two = curves(scored / "one"), curves(scored / "two")
    assert one["steps"] == two["steps"] == [0, 3]
    assert set(one["loss"]) == {"el", "tr"}
    assert two["loss"]["tr"] == pytest.approx(one["loss"]["tr"], rel=1e-3)
    weights = [load_file(scored / name / "model.safetensors") for name in ("one", "two")]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_replayed_text_may_be_less_than_is_asked_of_each_language(root, tmp_path):
    model = load_expanded_config(root / "expanded")
    for greek in (40, 100_000):  # of a long text, a beginning is read
        texts = {
            code: moe.LanguageText(code, str(write_texts(tmp_path / f"{code}-{greek}.jsonl", [text] * number)))
            for code, text, number in (("en", "A cat sleeps.", 6), ("el", "Η γάτα κοιμάται.", greek))
        }
        check_enough(config(replay=True, replay_share=0.05, tokens_per_language=900), model, texts, byte_tokenizer())
        with pytest.raises(InputError, match=r"Language 'en' has .* but 900"):
            check_enough(config(replay=True, tokens_per_language=900), model, texts, byte_tokenizer())
