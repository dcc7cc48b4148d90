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
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from hf_moe_expand import (
    GroupConfig,
    GroupTrainer,
    LayerMoEConfig,
    LayerMoEForCausalLM,
    Masking,
    MoESFTTrainer,
    Plan,
    PostPretrainConfig,
    PostPretrainTrainer,
    ReviewConfig,
    ReviewTrainer,
    RouterLossMixin,
    expand_checkpoint,
    expand_model,
    pack_texts,
    train_stage,
)
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.records import History
from hf_moe_expand.data.sources import LanguageText

WORDS = {"en": "the cat sat ", "el": "η γάτα κά", "tr": "kedi otur"}
QUICK = {
    "block_size": 16, "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "disable_tqdm": True,
    "seed": 5,
}  # fmt: skip
# A folder of checkpoints: of one new language, of two, and of two groups.
PLANS = {
    "one": Plan("moe-lpr", [2, 1, 3], [2], old=["en"], new=["el"]),
    "two": Plan("moe-lpr", [2, 1, 3], [2], old=["en"], new=["el", "tr"]),
    "dmoe": Plan("dmoe", [3, 1, 3], groups=[["en"], ["tr"], ["el"]]),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("in memory")
    for code in WORDS:
        write_texts(root / f"{code}.jsonl", texts(code))
    save_dense(root / "dense")
    for name, plan in PLANS.items():
        expand_checkpoint(root / "dense", root / name, plan)
    return root


def texts(code):
    return [f"{WORDS[code]} {i} {WORDS[code]}" for i in range(20)]


def tagged(*codes, order=None):
    """Texts of several languages in one data set, in any order of languages."""
    rows = [{"text": text, "language": code} for code in codes for text in texts(code)]
    if order is not None:
        rows = [rows[i] for i in order]
    return Dataset.from_list(rows)


def by_code(*codes):
    return {code: tagged(code) for code in codes or ("el", "tr")}


def interleaved(*codes):
    """As `tagged`, a row of each language in turn; the rows of one language stay in order."""
    count = len(texts(codes[0]))
    return tagged(*codes, order=[code * count + row for row in range(count) for code in range(len(codes))])


def trained(root, name, kind, config, data):
    """The model after training in memory, and the trainer."""
    model = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32)
    trainer = kind(model, config, train_dataset=data, processing_class=byte_tokenizer())
    trainer.train()
    return model, trainer


def same(model, folder, record):
    """The weights bit for bit, and the history."""
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = model.state_dict()
    assert found.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name
    assert model.config.expansions == expected.config.expansions
    assert History.of(model.config).last.stages[-1] == record


CASES = {
    "post-pretraining, one language": (
        "one", PostPretrainTrainer, PostPretrainConfig, {"balance_coef": 0.02}, ["el"], None
    ),
    "post-pretraining, columns text and language": (
        "two", PostPretrainTrainer, PostPretrainConfig, {"masking": Masking(expert_output=0.1)}, ["el", "tr"],
        interleaved("tr", "el"),
    ),
    "post-pretraining by temperature": (
        "two", PostPretrainTrainer, PostPretrainConfig, {"temperature": 2.0}, ["el", "tr"], interleaved("tr", "el")
    ),
    "review": (
        "one", ReviewTrainer, ReviewConfig, {"language_prior_coef": 0.3, "old_documents": 8}, ["en", "el"],
        interleaved("el", "en"),
    ),
    "group": ("dmoe", GroupTrainer, GroupConfig, {}, ["en", "el", "tr"], interleaved("el", "en", "tr")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_in_memory_is_train_stage(root, tmp_path, case):
    name, kind, config_class, own, codes, data = case
    options = {**QUICK, **own}
    sources = {code: LanguageText(code, str(root / f"{code}.jsonl")) for code in codes}
    record = train_stage(root / name, tmp_path / "stage", sources, config_class(**options))
    assert compare_checkpoints(root / name, tmp_path / "stage").changed
    data = Dataset.from_dict({"text": texts(codes[0])}) if data is None else data
    arguments = config_class(str(tmp_path / "run"), **options)
    model, trainer = trained(root, name, kind, arguments, data)
    assert trainer.record == record
    same(model, tmp_path / "stage", record)
    assert model.config.use_cache is True


def parsed(*arguments, kind=PostPretrainConfig):
    (config,) = HfArgumentParser(kind).parse_args_into_dataclasses(list(arguments))
    return config


def test_configurations_are_arguments_of_a_command_line():
    config = parsed("--balance_coef", "0.02", "--masking", '{"expert_output": 0.1}', "--max_steps", "3")
    assert (config.balance_coef, config.max_steps) == (0.02, 3)
    assert config.masking == Masking(expert_output=0.1)
    same = PostPretrainConfig(balance_coef=0.02, masking=Masking(expert_output=0.1), max_steps=3)
    assert config.recorded() == same.recorded()
    assert parsed().recorded() == PostPretrainConfig().recorded()
    assert parsed("--old_documents", "7", kind=ReviewConfig).old_documents == 7
    assert parsed("--replay", "--block_size", "64").replay
    refused(parsed, "--masking", '{"export_output": 0.1}', says="unknown key `export_output`; did you mean `expert_ou")


def test_what_a_history_records_is_json_without_a_token():
    given = {"hub_token": "hf_secret", "fsdp": "full_shard", "fsdp_config": {"min_num_params": 5}}
    config = PostPretrainConfig("out", **given, parallelism_config=ParallelismConfig())
    for one in (config, dataclasses.replace(config, learning_rate=2e-3)):
        one.max_steps = numpy.int64(4)
        recorded = json.loads(json.dumps(one.recorded()))
        assert recorded["max_steps"] == 4
        assert "hf_secret" not in f"{one!r} {one} {recorded}"
    assert config.recorded()["fsdp_config"]["min_num_params"] == 5
    config = parsed("--output_dir", "out", "--lr_scheduler_kwargs", '{"num_cycles": 1}')
    assert config.recorded()["lr_scheduler_kwargs"] == {"num_cycles": 1}


class SmallMemory(PostPretrainTrainer):
    """There is memory for a batch of one row."""

    def training_step(self, model, inputs, *args, **kwargs):
        if len(inputs["input_ids"]) > 1:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(model, inputs, *args, **kwargs)


def record_of(folder, data, trainer=PostPretrainTrainer, resume=False, **options):
    plan = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el", "tr"], exclusive=True)
    model = expand_model(tiny_dense("qwen2"), plan)
    options = {"per_device_train_batch_size": 4, "save_strategy": "no", "disable_tqdm": True, **options}
    config = PostPretrainConfig(str(folder), **options)
    made = trainer(model, config, train_dataset=data, processing_class=byte_tokenizer())
    made.train(resume_from_checkpoint=resume)
    return made.record


@pytest.mark.parametrize("how", ["packed", "rows"])
def test_a_budget_counts_the_tokens_of_packed_rows(tmp_path, capsys, how):
    record = record_of(tmp_path, in_form(how), tokens=1024)  # block_size is 1024
    assert (record.steps, record.tokens_seen) == (8, 1024)
    assert "8 steps of 128 tokens" in capsys.readouterr().out


def test_rows_that_come_one_by_one_have_no_known_tokens(tmp_path, capsys):
    packed = pack_texts({"el": tagged("el")}, byte_tokenizer(), 32, seed=5, languages=["en", "el", "tr"]).dataset
    rows = Dataset.from_list([packed[number] for number in range(len(packed))]).to_iterable_dataset()
    assert record_of(tmp_path, rows, max_steps=2).tokens_seen == 2 * 4 * 32
    assert "2 steps of 4 rows" in capsys.readouterr().out
    refused(record_of, tmp_path, rows, tokens=512, says="max_steps has to be specified", raises=ValueError)


@pytest.mark.parametrize("options", [{"tokens": 512}, {"temperature": 2.0}, {"tokens": 512, "temperature": 2.0}, {}])
def test_a_smaller_batch_that_is_found_sees_the_same_tokens(tmp_path, options):
    whole = record_of(tmp_path, tagged("el", "tr"), block_size=32, **options)
    found = record_of(tmp_path, tagged("el", "tr"), SmallMemory, block_size=32, auto_find_batch_size=True, **options)
    assert found.steps > 3 * whole.steps
    assert abs(found.tokens_seen - whole.tokens_seen) < 4 * 32


def in_form(how, size=32):
    """Text as it is, packed in blocks, or as rows of tokens."""
    if how == "text":
        return tagged("el", "tr")
    packed = pack_texts(by_code(), byte_tokenizer(), size, seed=5, groups=[["el"], ["tr"]])
    return packed if how == "packed" else Dataset.from_list([*packed.dataset])


PACKED = "train_dataset is packed already, but {} says what to pack: pass text"


@pytest.mark.parametrize(
    ("forms", "options", "said"),
    [
        (("packed", "rows"), {"tokens_per_language": 512}, PACKED.format("tokens_per_language")),
        (("packed", "rows"), {"replay": True, "replay_share": 0.5}, PACKED.format("replay_share")),
        (("packed", "rows"), {"stream": True}, PACKED.format("stream")),
        (("text", "packed"), {"tokens": 64, "max_steps": 3}, "tokens and max_steps both say how long the training is"),
        (("text", "packed"), {"temperature": 2.0, "ignore_data_skip": True}, "ignore_data_skip and split_batches can"),
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
    model = expand_model(tiny_dense("qwen2", dtype=dtype), PLANS["one"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = PostPretrainConfig(str(tmp_path), **small)
    PostPretrainTrainer(model, config, train_dataset=tagged("el"), processing_class=byte_tokenizer()).train()
    assert f"the model is {dtype}; it trains in float32" in capsys.readouterr().out
    assert str(model.config.dtype).removeprefix("torch.") == str(dtype).removeprefix("torch.")
    trained = load_file(tmp_path / "checkpoint-5" / "model.safetensors")  # from which it would go on
    assert not (tmp_path / "checkpoint-5" / "training_args.bin").exists()
    for name, value in model.state_dict().items():
        if name not in trained:  # tied
            continue
        assert (trained[name].dtype, value.dtype) == (torch.float32, dtype)
        assert torch.equal(trained[name].to(dtype), value)  # rounded once
        moved = (trained[name] != before[name].float()).float().mean()
        assert moved > 0.9 if ".experts.1." in name or ".experts.2." in name or "router" in name else moved == 0, name


BASES = ("mixtral", "qwen3_moe")
OFF = (False, 0.0)
TEXT = [{"prompt": row["prompt"], "completion": row["completion"]} for row in ROWS]
PAIRS = [{"prompt": "Good day. ", "chosen": "Hello!", "rejected": "No."}] * 2
JUDGED = [{"prompt": "a", "completion": "b", "label": bool(label)} for label in (0, 1)]
ASKED = [{"prompt": "Good day. "}] * 2

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL's own


class WithRouterLosses(RouterLossMixin, Trainer):
    pass


class DPOWithRouterLosses(RouterLossMixin, DPOTrainer):
    pass


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("CI", "true")  # TRL sends no telemetry
    datasets.disable_progress_bars()


def build(base, **changes):
    torch.manual_seed(0)
    dense = tiny_config(base, **EXPERTS | fields(base) | {"moe_intermediate_size": 16} | changes)
    return LayerMoEForCausalLM(LayerMoEConfig.from_dense(dense, num_experts_per_layer=COUNTS, **ADDED))


def read_of(config):
    return config.output_router_logits, config.router_aux_loss_coef


def written(folder):
    """config.json but for `use_cache`, which the library's Trainer turns off in any model."""
    return {**json.loads((folder / "config.json").read_text()), "use_cache": True}


@pytest.fixture(scope="module", params=BASES)
def saved(request, tmp_path_factory):
    """A checkpoint with a large coefficient, as an earlier version's after training with TRL."""
    folder = tmp_path_factory.mktemp(request.param)
    build(request.param, router_aux_loss_coef=10.0).save_pretrained(folder)
    assert written(folder)["router_aux_loss_coef"] == 10.0
    assert written(folder)["output_router_logits"] is False
    (folder / "config.json").write_text(json.dumps({**written(folder), "output_router_logits": True}))
    byte_tokenizer().save_pretrained(folder)
    return folder


def trainer_of(kind, folder, model):
    if issubclass(kind, SFTTrainer):
        arguments, rows = settings(folder), TEXT
    elif issubclass(kind, DPOTrainer):
        arguments, rows = settings(folder, DPOConfig, per_device_train_batch_size=2), PAIRS
    elif issubclass(kind, KTOTrainer):
        arguments, rows = settings(folder, KTOConfig, per_device_train_batch_size=2), JUDGED
    elif issubclass(kind, GRPOTrainer):
        arguments = settings(
            folder, lambda max_length, **other: GRPOConfig(**other), per_device_train_batch_size=2, num_generations=2,
            max_completion_length=3,
        )  # fmt: skip
        rows = ASKED
    else:
        plain = lambda max_length, **other: TrainingArguments(**other)  # noqa: E731
        arguments = settings(folder, plain, per_device_train_batch_size=2)
        rows = [{"input_ids": row, "labels": row} for row in IDS]
        return kind(model, arguments, train_dataset=rows)
    more = {"reward_funcs": lambda completions, **_: [float(len(c)) for c in completions]}
    return kind(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=byte_tokenizer(),
        **(more if issubclass(kind, GRPOTrainer) else {}),
    )  # fmt: skip


@pytest.mark.parametrize(
    "kind", [Trainer, WithRouterLosses, MoESFTTrainer, DPOWithRouterLosses, KTOTrainer, GRPOTrainer]
)
def test_no_trainer_adds_it_or_saves_that_it_is_on(tmp_path, saved, kind):
    model = AutoModelForCausalLM.from_pretrained(saved)
    one = trainer_of(kind, tmp_path / "run", model)
    one.train()
    logged = one.state.log_history[0]
    assert not [name for name in logged if "aux" in name]
    assert logged["loss"] < 7  # log 257 and a balance loss of 1; the auxiliary loss would be 10 and more
    if "next_token_loss" in logged:
        assert logged["loss"] == pytest.approx(logged["next_token_loss"], rel=1e-4)
    one.save_model(str(tmp_path / "out"))
    assert written(tmp_path / "out") == written(saved)


def test_the_fields_read_as_off_and_keep_what_they_were(saved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved)
    config = model.config
    config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    for same in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config)), type(config)(**config.to_dict())):
        assert read_of(same) == OFF
        assert read_of(type("", (), same.to_dict())) == (True, 10.0)
    with torch.no_grad():
        on, off = model(IDS, labels=IDS, output_router_logits=True), model(IDS, labels=IDS)
    assert torch.equal(on.loss, off.loss)
    assert len(on.router_logits) == len(COUNTS)
    model.save_pretrained(tmp_path)
    assert written(tmp_path) == written(saved)


@pytest.mark.parametrize("base", ["qwen2", "deepseek_v3"])
def test_configurations_without_the_fields_get_none(base):
    config = LayerMoEConfig.from_dense(tiny_config(base, **fields(base)), num_experts_per_layer=[1, 1, 1])
    assert not hasattr(config, "router_aux_loss_coef")
    assert "router_aux_loss_coef" not in config.to_dict()


def test_a_coefficient_that_is_asked_for_is_refused_beside_router_losses(tmp_path, saved):
    arguments = settings(tmp_path, SFTConfig, router_aux_loss_coef=0.01)
    given, said = (
        {"train_dataset": Dataset.from_list(TEXT)},
        r"router_aux_loss_coef is 0\.01: it weighs .* Leave it out",
    )
    refused(MoESFTTrainer, str(saved), arguments, **given, says=said, raises=ValueError)


def test_restored_callbacks_count_on(tmp_path):
    options = {"block_size": 32, "max_steps": 6, "save_steps": 2, "save_strategy": "steps", "save_total_limit": None}
    options["restore_callback_states_from_checkpoint"] = True
    record_of(tmp_path, tagged("el", "tr"), **options)
    record = record_of(tmp_path, tagged("el", "tr"), resume=str(tmp_path / "checkpoint-4"), **options)
    assert (record.blocks_seen, record.tokens_seen) == (24, 24 * 32)


def test_rows_without_languages_train_where_no_loss_needs_them(root, tmp_path):
    rows = Dataset.from_dict({"input_ids": [list(range(16))] * 4})
    options = {**QUICK, "max_steps": 1, "save_strategy": "no"}
    model = AutoModelForCausalLM.from_pretrained(root / "one")
    trainer = PostPretrainTrainer(model, PostPretrainConfig(str(tmp_path), **options), train_dataset=rows)
    assert trainer.train().global_step == 1
