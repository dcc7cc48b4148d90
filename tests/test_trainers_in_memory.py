"""The stages' trainers on a loaded model and a data set in memory; no auxiliary loss of a mixture's own."""

import copy
import dataclasses
import json
import pickle

import datasets
import numpy
import pytest
import torch
from accelerate import ParallelismConfig
from added import COUNTS, EXPERTS, IDS, fields
from conftest import ADDED, byte_tokenizer, refused, save_dense, tiny_config, tiny_dense, write_texts
from datasets import Dataset
from one_sft_step import ROWS, settings
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, HfArgumentParser
from trl import DPOConfig, DPOTrainer, SFTConfig

import hf_moe_expand as moe
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.records import History

WORDS = {"en": "the cat sat ", "el": "η γάτα κά", "tr": "kedi otur"}
QUICK = {
    "block_size": 16, "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "disable_tqdm": True,
    "seed": 5,
}  # fmt: skip
# A folder of checkpoints: of one new language, of two, and of two groups.
PLANS = {
    "one": moe.Plan("moe-lpr", [2, 1, 3], [2], old=["en"], new=["el"]),
    "two": moe.Plan("moe-lpr", [2, 1, 3], [2], old=["en"], new=["el", "tr"]),
    "dmoe": moe.Plan("dmoe", [3, 1, 3], groups=[["en"], ["tr"], ["el"]]),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("in memory")
    for code in WORDS:
        write_texts(root / f"{code}.jsonl", texts(code))
    save_dense(root / "dense")
    for name, plan in PLANS.items():
        moe.expand_checkpoint(root / "dense", root / name, plan)
    return root


def texts(code):
    return [f"{WORDS[code]} {i} {WORDS[code]}" for i in range(20)]


def tagged(*codes):
    """Texts of several languages in one data set."""
    return Dataset.from_list([{"text": text, "language": code} for code in codes for text in texts(code)])


def by_code(*codes):
    return {code: tagged(code) for code in codes or ("el", "tr")}


# The model, the stage, its settings, and the languages in the order of their rows.
CASES = {
    "one language": ("one", "PostPretrain", {"balance_coef": 0.02}, ["el"]),
    "two": ("two", "PostPretrain", {"masking": moe.Masking(expert_output=0.1)}, ["tr", "el"]),
    "by temperature": ("two", "PostPretrain", {"temperature": 2.0}, ["tr", "el"]),
    "review": ("one", "Review", {"language_prior_coef": 0.3, "old_documents": 8}, ["el", "en"]),
    "group": ("dmoe", "Group", {}, ["el", "en", "tr"]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_in_memory_is_train_stage(root, tmp_path, case):
    name, stage, own, codes = case
    trainer_class, config = getattr(moe, f"{stage}Trainer"), getattr(moe, f"{stage}Config")
    sources = {code: moe.LanguageText(code, str(root / f"{code}.jsonl")) for code in codes}
    record = moe.train_stage(root / name, tmp_path / "stage", sources, config(**QUICK, **own))
    assert compare_checkpoints(root / name, tmp_path / "stage").changed
    # A row of each language in turn.
    in_turn = zip(*map(texts, codes), strict=True)
    rows = [{"text": text, "language": code} for row in in_turn for code, text in zip(codes, row, strict=True)]
    data = Dataset.from_list(rows) if len(codes) > 1 else Dataset.from_dict({"text": texts("el")})
    model = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32)
    arguments = config(str(tmp_path / "run"), **QUICK, **own)
    trainer = trainer_class(model, arguments, train_dataset=data, processing_class=byte_tokenizer())
    trainer.train()
    assert trainer.record == record == History.of(model.config).last.stages[-1]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "stage", dtype=torch.float32)
    assert model.config.expansions == expected.config.expansions
    assert model.config.use_cache is True
    assert model.state_dict().keys() == expected.state_dict().keys()
    for tensor, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[tensor], value), tensor


def parsed(*arguments, kind=moe.PostPretrainConfig):
    return HfArgumentParser(kind).parse_args_into_dataclasses(list(arguments))[0]


def test_configurations_are_arguments_of_a_command_line():
    config = parsed("--balance_coef", "0.02", "--masking", '{"expert_output": 0.1}', "--max_steps", "3")
    same = moe.PostPretrainConfig(balance_coef=0.02, masking=moe.Masking(expert_output=0.1), max_steps=3)
    assert config.recorded() == same.recorded()
    assert parsed().recorded() == moe.PostPretrainConfig().recorded()
    assert parsed("--old_documents", "7", kind=moe.ReviewConfig).old_documents == 7
    assert parsed("--replay", "--block_size", "64").replay
    refused(parsed, "--masking", '{"export_output": 0.1}', says="unknown key `export_output`; did you mean `expert_ou")


def test_what_a_history_records_is_json_without_a_token():
    given = {"hub_token": "hf_secret", "fsdp": "full_shard", "fsdp_config": {"min_num_params": 5}}
    config = moe.PostPretrainConfig("out", **given, parallelism_config=ParallelismConfig())
    for one in (config, dataclasses.replace(config, learning_rate=2e-3)):
        one.max_steps = numpy.int64(4)
        recorded = json.loads(json.dumps(one.recorded()))
        assert recorded["max_steps"] == 4
        assert "hf_secret" not in f"{one!r} {one} {recorded}"
    assert config.recorded()["fsdp_config"]["min_num_params"] == 5
    config = parsed("--output_dir", "out", "--lr_scheduler_kwargs", '{"num_cycles": 1}')
    assert config.recorded()["lr_scheduler_kwargs"] == {"num_cycles": 1}


class SmallMemory(moe.PostPretrainTrainer):
    """There is memory for a batch of one row."""

    def training_step(self, model, inputs, *args, **kwargs):
        if len(inputs["input_ids"]) > 1:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(model, inputs, *args, **kwargs)


def record_of(folder, data, trainer=moe.PostPretrainTrainer, resume=False, **options):
    plan = moe.Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el", "tr"], exclusive=True)
    model = moe.expand_model(tiny_dense("qwen2"), plan)
    options = {"per_device_train_batch_size": 4, "save_strategy": "no", "disable_tqdm": True, **options}
    config = moe.PostPretrainConfig(str(folder), **options)
    made = trainer(model, config, train_dataset=data, processing_class=byte_tokenizer())
    made.train(resume_from_checkpoint=resume)
    return made.record


@pytest.mark.parametrize("how", ["packed", "rows"])
def test_a_budget_counts_the_tokens_of_packed_rows(tmp_path, capsys, how):
    record = record_of(tmp_path, in_form(how), tokens=1024)  # block_size is 1024
    assert (record.steps, record.tokens_seen) == (8, 1024)
    assert "8 steps of 128 tokens" in capsys.readouterr().out


def test_rows_that_come_one_by_one_have_no_known_tokens(tmp_path, capsys):
    packed = moe.pack_texts({"el": tagged("el")}, byte_tokenizer(), 32, seed=5, languages=["en", "el", "tr"]).dataset
    rows = Dataset.from_list([packed[number] for number in range(len(packed))]).to_iterable_dataset()
    assert record_of(tmp_path, rows, max_steps=2).tokens_seen == 2 * 4 * 32
    assert "2 steps of 4 rows" in capsys.readouterr().out
    refused(record_of, tmp_path, rows, tokens=512, says="max_steps has to be specified", raises=ValueError)


@pytest.mark.parametrize("options", [{}, {"tokens": 512, "temperature": 2.0}], ids=str)
def test_a_smaller_batch_that_is_found_sees_the_same_tokens(tmp_path, options):
    whole = record_of(tmp_path, tagged("el", "tr"), block_size=32, **options)
    found = record_of(tmp_path, tagged("el", "tr"), SmallMemory, block_size=32, auto_find_batch_size=True, **options)
    assert found.steps > 3 * whole.steps
    assert abs(found.tokens_seen - whole.tokens_seen) < 4 * 32


def in_form(how):
    """Text as it is, packed in blocks, or as rows of tokens."""
    if how == "text":
        return tagged("el", "tr")
    packed = moe.pack_texts(by_code(), byte_tokenizer(), 32, seed=5, groups=[["el"], ["tr"]])
    return packed if how == "packed" else Dataset.from_list([*packed.dataset])


PACKED = "train_dataset is packed already, but {} says what to pack: leave it out"


@pytest.mark.parametrize(
    ("forms", "options", "said"),
    [
        (("packed", "rows"), {"tokens_per_language": 512}, PACKED.format("tokens_per_language")),
        (("packed", "rows"), {"replay": True, "replay_share": 0.5}, PACKED.format("replay_share")),
        (("packed", "rows"), {"stream": True}, PACKED.format("stream")),
        (("text", "packed"), {"tokens": 64, "max_steps": 3}, "tokens and max_steps both say how long the training is"),
        (("text", "packed"), {"temperature": 2.0, "ignore_data_skip": True}, "ignore_data_skip, split_batches:"),
    ],
)
def test_settings_are_checked_however_the_text_came(tmp_path, forms, options, said):
    for how in forms:
        refused(record_of, tmp_path, in_form(how), block_size=32, **options, says=said)


@pytest.mark.parametrize("how", ["text", "packed", "rows"])
def test_held_out_text_is_scored_however_the_training_text_came(tmp_path, how):
    texts = {"el": str(write_texts(tmp_path / "el.jsonl", [row["text"] for row in tagged("el")]))}
    record_of(tmp_path, in_form(how), block_size=32, max_steps=2, validation={"texts": texts, "every": 1})
    assert "el" in (tmp_path / "validation.json").read_text("utf-8")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_of_two_bytes_trains_in_float32_and_keeps_its_type(tmp_path, dtype, capsys):
    small = {**QUICK, "learning_rate": 1e-5, "max_steps": 5, "save_steps": 5}
    model = moe.expand_model(tiny_dense("qwen2", dtype=dtype), PLANS["one"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = moe.PostPretrainConfig(str(tmp_path), **small)
    moe.PostPretrainTrainer(model, config, train_dataset=tagged("el"), processing_class=byte_tokenizer()).train()
    assert f"the model is {dtype}; it trains in float32" in capsys.readouterr().out
    assert str(model.config.dtype).removeprefix("torch.") == str(dtype).removeprefix("torch.")
    trained = load_file(tmp_path / "checkpoint-5" / "model.safetensors")  # from which it would go on
    assert not (tmp_path / "checkpoint-5" / "training_args.bin").exists()
    assert 2 < len(trained) <= len(before)  # without what is tied
    for name in trained:
        value = model.state_dict()[name]
        assert (trained[name].dtype, value.dtype) == (torch.float32, dtype)
        assert torch.equal(trained[name].to(dtype), value)  # rounded once
        moved = (trained[name] != before[name].float()).float().mean()
        assert moved > 0.9 if ".experts.1." in name or ".experts.2." in name or "router" in name else moved == 0, name


TEXT = [{"prompt": row["prompt"], "completion": row["completion"]} for row in ROWS]
PAIRS = [{"prompt": "Good day. ", "chosen": "Hello!", "rejected": "No."}] * 2

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL's own


class DPOWithRouterLosses(moe.RouterLossMixin, DPOTrainer):
    pass


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("CI", "true")  # TRL sends no telemetry
    datasets.disable_progress_bars()


def written(folder):
    """config.json but for `use_cache`, which the library's Trainer turns off in any model."""
    return {**json.loads((folder / "config.json").read_text()), "use_cache": True}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint with a large coefficient, as an earlier version's after training with TRL."""
    folder = tmp_path_factory.mktemp("coefficient")
    torch.manual_seed(0)
    dense = tiny_config("qwen3_moe", **EXPERTS, moe_intermediate_size=16, router_aux_loss_coef=10.0)
    config = moe.LayerMoEConfig.from_dense(dense, num_experts_per_layer=COUNTS, **ADDED)
    moe.LayerMoEForCausalLM(config).save_pretrained(folder)
    assert written(folder)["router_aux_loss_coef"] == 10.0
    assert written(folder)["output_router_logits"] is False
    (folder / "config.json").write_text(json.dumps({**written(folder), "output_router_logits": True}))
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "arguments", "rows"), [(moe.MoESFTTrainer, SFTConfig, TEXT), (DPOWithRouterLosses, DPOConfig, PAIRS)]
)
def test_no_trainer_adds_it_or_saves_that_it_is_on(tmp_path, saved, kind, arguments, rows):
    one = kind(
        model=AutoModelForCausalLM.from_pretrained(saved), train_dataset=Dataset.from_list(rows),
        args=settings(tmp_path / "run", arguments, per_device_train_batch_size=2), processing_class=byte_tokenizer(),
    )  # fmt: skip
    one.train()
    logged = one.state.log_history[0]
    assert not [name for name in logged if "aux" in name]
    assert logged["loss"] < 7  # log 257 and a balance loss of 1; the auxiliary loss would be 10 and more
    one.save_model(str(tmp_path / "out"))
    assert written(tmp_path / "out") == written(saved)


def test_the_fields_read_as_off_and_keep_what_they_were(saved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved)
    config = model.config
    config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    for same in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config)), type(config)(**config.to_dict())):
        assert (same.output_router_logits, same.router_aux_loss_coef) == (False, 0.0)
        assert (same.to_dict()["output_router_logits"], same.to_dict()["router_aux_loss_coef"]) == (True, 10.0)
    with torch.no_grad():
        on, off = model(IDS, labels=IDS, output_router_logits=True), model(IDS, labels=IDS)
    assert torch.equal(on.loss, off.loss)
    assert len(on.router_logits) == len(COUNTS)
    model.save_pretrained(tmp_path)
    assert written(tmp_path) == written(saved)


@pytest.mark.parametrize("base", ["qwen2", "deepseek_v3"])
def test_configurations_without_the_fields_get_none(base):
    config = moe.LayerMoEConfig.from_dense(tiny_config(base, **fields(base)), num_experts_per_layer=[1, 1, 1])
    assert not hasattr(config, "router_aux_loss_coef")
    assert "router_aux_loss_coef" not in config.to_dict()


def test_a_coefficient_that_is_asked_for_is_refused_beside_router_losses(tmp_path, saved):
    arguments = settings(tmp_path, SFTConfig, router_aux_loss_coef=0.01)
    given, said = {"train_dataset": Dataset.from_list(TEXT)}, "router_aux_loss_coef weighs"
    refused(moe.MoESFTTrainer, str(saved), arguments, **given, says=said, raises=ValueError)


def test_restored_callbacks_count_on(tmp_path):
    options = {"block_size": 32, "max_steps": 6, "save_steps": 2, "save_strategy": "steps", "save_total_limit": None,
               "restore_callback_states_from_checkpoint": True}  # fmt: skip
    record_of(tmp_path, tagged("el", "tr"), **options)
    record = record_of(tmp_path, tagged("el", "tr"), resume=str(tmp_path / "checkpoint-4"), **options)
    assert (record.blocks_seen, record.tokens_seen) == (24, 24 * 32)


def test_rows_without_languages_train_where_no_loss_needs_them(root, tmp_path):
    rows = Dataset.from_dict({"input_ids": [list(range(16))] * 4})
    config = moe.PostPretrainConfig(str(tmp_path), **{**QUICK, "max_steps": 1, "save_strategy": "no"})
    model = AutoModelForCausalLM.from_pretrained(root / "one")
    assert moe.PostPretrainTrainer(model, config, train_dataset=rows).train().global_step == 1
