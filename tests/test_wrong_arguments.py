"""Every argument of every public function and Trainer, wrong in type, missing, or of a sibling stage, is refused in one
line that names it."""

import inspect

import pytest
from conftest import byte_tokenizer, checkpointed, tiny_dense, write_texts
from datasets import Dataset, DatasetDict
from torch.utils.data import Dataset as TorchDataset
from transformers import TrainingArguments
from trl import SFTConfig

import hf_moe_expand
from hf_moe_expand import (
    AdaptConfig,
    AdaptTrainer,
    BalanceLoss,
    DMoEForCausalLM,
    GroupConfig,
    GroupTrainer,
    JointConfig,
    JointTrainer,
    LanguageText,
    Masking,
    MoESFTTrainer,
    Plan,
    PostPretrainConfig,
    PostPretrainTrainer,
    Recipe,
    ReviewConfig,
    ReviewTrainer,
    expand_model,
)
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.schema import checked
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.evaluation.validation import ValidationCurves
from hf_moe_expand.planning.results import DeviationResult, RoutingResult, SimilarityResult

PLAN = Plan("layer-moe", [3, 1, 2], [2], old=["en"], new=["el"])
DENSE = tiny_dense("qwen2")
TOKENIZER = byte_tokenizer()
TEXTS = {"en": ["the cat"], "el": ["η γάτα"]}
ROWS = Dataset.from_dict({"text": ["η γάτα κάθισε στο χαλί"] * 20})
EL = LanguageText("el", "el.jsonl")
WRONG = {
    "None": None, "a number": 5, "a string": "missing", "a dense model": DENSE, "a sibling's": ReviewConfig("out"),
    "a list of None": [None], "a class": int,
}  # fmt: skip
# The arguments without which a function is not called, of their types.
FUNCTIONS = {
    "adapt_language": {"model": "m", "out": "o", "source": EL},
    "allocate_experts": {"similarity": [0.1, 0.2], "total": 5},
    "average_checkpoints": {"models": ["a", "b"]},
    "average_experts": {"model": "m"},
    "collate_blocks": {"rows": [{"input_ids": [1]}]},
    "evaluate_ensemble": {"models": [DENSE], "tokenizer": TOKENIZER, "texts": TEXTS},
    "evaluate_model": {"model": DENSE, "tokenizer": TOKENIZER, "texts": TEXTS},
    "expand_checkpoint": {"base": "m", "out": "o", "plan": PLAN},
    "expand_from_peft": {"base": "m", "adapters": {"el": "a"}, "out": "o"},
    "expand_model": {"dense": DENSE, "plan": PLAN},
    "export_peft": {"model": "m", "out": "o"},
    "fit_base_gate": {"base": "m", "out": "o", "texts": TEXTS, "new": ["el"]},
    "fit_gates": {"model": "m", "texts": TEXTS},
    "freeze": {},  # its arguments are of several kinds
    "gate_from_file": {"file": "f", "base": "m", "new": ["el"]},
    "graft_delta": {"model": "m", "out": "o", "base": "b", "instruct": "i"},
    "group_languages": {"similarity": [[1.0, 0.5], [0.5, 1.0]], "languages": ["en", "el"], "num_groups": 2},
    "grow_checkpoint": {"model": "m", "out": "o", "plan": PLAN},
    "join_expansions": {"packs": ["a", "b"], "out": "o"},
    "load_for_inference": {"name": "m"},
    "make_card": {"model": "m"},
    "mask_routing": {"model": DENSE, "masking": Masking()},
    "measure_deviation": {"model": DENSE, "tokenizer": TOKENIZER, "texts": TEXTS, "work_dir": "w"},
    "measure_routing": {"model": DENSE, "tokenizer": TOKENIZER, "texts": TEXTS},
    "measure_similarity": {"model": DENSE, "tokenizer": TOKENIZER, "texts": TEXTS, "old": ["en"], "new": ["el"]},
    "pack_pairs": {"texts": {"el": ROWS}, "tokenizer": TOKENIZER, "block_size": 16, "seed": 0},
    "pack_texts": {"texts": {"el": ROWS}, "tokenizer": TOKENIZER, "block_size": 16, "seed": 0},
    "push_to_hub": {"model": "m", "repo_id": "me/m"},
    "register_loss": {"loss": BalanceLoss},
    "register_plan_method": {"method": int},
    "register_stage": {"stage": ReviewConfig},
    "run_recipe": {"recipe": None},
    "save_expansion": {"model": "m", "out": "o"},
    "select_layers": {"deviation": [0.1, 0.2]},
    "train_stage": {"model": "m", "out": "o", "data": {"el": EL}, "config": ReviewConfig("out")},
    "validate_recipe": {"recipe": None},
    "BalanceLoss": {"coef": 0.1},
    "ClassifierLoss": {"coef": 0.1},
    "DistillationLoss": {"coef": 0.1},
    "GateBudgetLoss": {"coef": 0.1, "gate_budget": 0.8},
    "GroupLoss": {"coef": 0.1},
    "LanguagePriorLoss": {"coef": 0.1},
    "LocalizedBalanceLoss": {"coef": 0.1, "delta": 0.1},
    "LanguageText": {"language": "el", "source": "el.jsonl"},
    "PairCollator": {"pad_token_id": 0},
}  # fmt: skip
# The kinds of the table above that an argument takes.
TEXTUAL, NUMERIC = frozenset({"a string"}), frozenset({"a number"})
MODEL, CONFIG, CLASS = frozenset({"a dense model"}), frozenset({"a sibling's"}), frozenset({"a class"})
TAKES = {
    **dict.fromkeys(("model", "base", "out", "name", "file", "pack", "work_dir", "instruct", "repo_id"), TEXTUAL),
    **dict.fromkeys(("language", "source"), TEXTUAL),
    **dict.fromkeys(("total", "num_groups", "block_size", "seed", "to", "coef", "gate_budget", "delta"), NUMERIC),
    **dict.fromkeys(("pad_token_id",), NUMERIC),
    **dict.fromkeys(("loss", "method", "stage"), CLASS),
    "dense": MODEL,
    "masking": {"None"},
    "config": CONFIG,
}  # fmt: skip
OF_LOADED = ("evaluate_model", "mask_routing", "measure_deviation", "measure_routing", "measure_similarity")
CASES = [(name, argument) for name, given in FUNCTIONS.items() for argument in given]


def takes(name, argument):
    if argument == "model":
        loaded = {*TEXTUAL, *MODEL} if name in ("fit_gates", "average_experts") else TEXTUAL
        return MODEL if name in OF_LOADED else loaded
    if (name, argument) in (("adapt_language", "source"), ("fit_gates", "texts")):
        return {"None"} if argument == "texts" else set()
    return TAKES.get(argument, set())


@pytest.mark.parametrize(("name", "argument"), CASES, ids=[f"{name}-{argument}" for name, argument in CASES])
def test_a_wrong_argument_of_a_function_is_named(name, argument):
    function, given = getattr(hf_moe_expand, name), FUNCTIONS[name]
    for kind in WRONG.keys() - takes(name, argument):
        with pytest.raises(InputError) as refused:
            function(**{**given, argument: WRONG[kind]})
        assert str(refused.value).startswith(f"{name}: {argument} is "), kind
        assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match=f"{name}: unknown key `{argument}_`; did you mean `{argument}`"):
        function(**{**given, f"{argument}_": 1})
    if inspect.signature(function).parameters[argument].default is inspect.Parameter.empty:
        with pytest.raises(InputError, match=f"{name}: missing a required argument: '{argument}'"):
            function(**{key: value for key, value in given.items() if key != argument})


RESULTS = (SimilarityResult, DeviationResult, RoutingResult)
READERS = [
    (one, name)
    for one in (Recipe, Plan, *RESULTS, Evaluation, ValidationCurves)
    for name in ("load", "from_json")
    if hasattr(one, name)
]


@pytest.mark.parametrize(("one", "name"), READERS, ids=[f"{one.__name__}.{name}" for one, name in READERS])
@pytest.mark.parametrize("wrong", [None, 5, {"base": "m"}, ["a"]])
def test_what_is_no_path_is_named(one, name, wrong):
    with pytest.raises(InputError, match=rf"^{one.__name__}\.{name}: path is .*: must be str or Path"):
        getattr(one, name)(wrong)


def test_no_public_function_is_left_out():
    public = {name for name in hf_moe_expand.__all__ if inspect.isfunction(getattr(hf_moe_expand, name))}
    assert public <= FUNCTIONS.keys()


@pytest.mark.parametrize("name", [name for name, given in FUNCTIONS.items() if "o" in given.values()])
def test_a_missing_checkpoint_is_named(name, tmp_path):
    given = {**FUNCTIONS[name], "out": tmp_path / "o"}
    first = next(iter(given))
    missing = str(tmp_path / "missing")
    with pytest.raises(InputError, match="missing") as refused:
        getattr(hf_moe_expand, name)(**{**given, first: [missing, missing] if first == "packs" else missing})
    assert "\n" not in str(refused.value)


def test_arguments_of_the_right_type_pass():
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy

    @checked
    def f(a: int, b: Sequence[float], c: Mapping[str, Iterable[str]], d: Callable | None = None, e: float = 1.0):
        return a, b, c

    column = Dataset.from_dict({"text": ["a"]})["text"]
    for arguments in (
        (numpy.int64(3), numpy.ones(2), {"el": (one for one in "ab")}),
        (3, (1, 2.0), {"el": column, "en": {"a"}}, len, 2),
    ):
        assert f(*arguments) == arguments[:3]
    given = (one for one in "ab")
    f(1, [1.0], {"el": given})
    assert list(given) == ["a", "b"]  # not read
    for wrong in ((True, [1.0], {}), (1, "ab", {}), (1, ["a"], {}), (1, [1.0], {"el": "text"}), (1, [1.0], {1: []}),
                  (1, [1.0], {"el": Dataset.from_dict({"text": ["a"]})})):  # fmt: skip
        with pytest.raises(InputError, match=r"^f: [abc] is "):
            f(*wrong)


# --- Trainers --------------------------------------------------------------------------------------------------------

STAGES = {
    PostPretrainTrainer: PostPretrainConfig, ReviewTrainer: ReviewConfig, JointTrainer: JointConfig,
    GroupTrainer: GroupConfig, AdaptTrainer: AdaptConfig,
}  # fmt: skip
QUICK = {"block_size": 16, "max_steps": 1, "per_device_train_batch_size": 2, "disable_tqdm": True}
TAGGED = Dataset.from_list([{"text": text * 3, "language": code} for code, (text,) in TEXTS.items() for _ in range(9)])


def model_for(kind):
    groups = Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]])
    return expand_model(DENSE, groups if kind in (GroupTrainer, AdaptTrainer) else PLAN)


class Unknown(TorchDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"content": "a"}


def of_rows(**columns):
    return Dataset.from_dict(columns)


BLOCK = list(range(16))
DATA = {
    "no data set": (5, "{name} is 5"),
    "a file": ("el.jsonl", "{name} is 'el.jsonl': give a datasets.Dataset"),
    "a source": (EL, "{name} is of type LanguageText: .*load"),
    "a list": (["a"], r"{name} is \['a'\]"),
    "a model": (DENSE, "{name} is of type Qwen2ForCausalLM"),
    "rows in a list": ([{"text": "a"}], r"{name} is \[.*Dataset.from_list"),
    "a stream": (ROWS.to_iterable_dataset(), "{name} is of type IterableDataset"),
    "a column content": (
        of_rows(content=["a"]), r"{name} has the columns content.*rename_column\('content', 'text'\)"
    ),
    "another kind": (Unknown(), "{name} has the columns content"),
    "no rows": (of_rows(input_ids=[]), "{name}"),
    "numbers as text": (of_rows(text=[1, 2]), "{name}: the column `text` holds int64"),
    "texts as tokens": (of_rows(input_ids=["a"], language_ids=["b"]), "{name}: the column `input_ids` holds string"),
    "numbers as tokens": (of_rows(input_ids=[[0.5]], language_ids=[[0]]), "{name}: the column `input_ids` holds"),
    "several lengths": (
        of_rows(input_ids=[[1, 2], [3]], language_ids=[[0, 0], [0]]), "{name} has rows of 1 to 2 tokens"
    ),
    "fewer languages than tokens": (
        of_rows(input_ids=[[1, 2]], language_ids=[[0]]), "{name} has rows whose `language_ids`"
    ),
    "too long": (of_rows(input_ids=[[1] * 65], language_ids=[[0] * 65]), "{name} has rows of 65 tokens.*64 positions"),
    "tokens beyond": (of_rows(input_ids=[[257]], language_ids=[[0]]), "{name} holds token number 257"),
    "negative tokens": (of_rows(input_ids=[[-1]], language_ids=[[0]]), "{name}: the column `input_ids` holds -1"),
    "an unknown language": (of_rows(text=["a"], language=["xx"]), "{name} has the unknown language xx"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize("case", DATA.values(), ids=DATA)
def test_a_wrong_data_set_is_named(case, name):
    data, message = case
    given = {"train_dataset": TAGGED, "processing_class": TOKENIZER, name: data}
    with pytest.raises(InputError, match=message.format(name=name)) as refused:
        PostPretrainTrainer(model_for(PostPretrainTrainer), PostPretrainConfig("out", replay=True, **QUICK), **given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", STAGES)
def test_a_wrong_argument_of_a_trainer_is_named(kind, tmp_path):
    model = model_for(kind)
    good = {"model": model, "args": STAGES[kind](str(tmp_path), **QUICK), "processing_class": TOKENIZER}
    siblings = [config(str(tmp_path)) for config in STAGES.values() if config is not STAGES[kind]]
    plain = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    wrong = {
        "model": [None, 5, "missing", tmp_path / "missing", siblings[0], DENSE],
        "args": [5, "out", {"output_dir": "out"}, plain, *siblings],
        **dict.fromkeys(
            ("data_collator", "compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"), (5, "a")
        ),
        **dict.fromkeys(("mix", "masking", "processing_class", "optimizer_cls_and_kwargs"), (5, "a", DENSE)),
        **dict.fromkeys(("everything", "allow_lost_text"), (None, 5, "a")),
        "callbacks": [5, "a", [5]],
        "optimizers": [5, "a", (5, None), None],
        "router_losses": [5, "balance", [5], BalanceLoss(0.1)],
        "language_classes": [5, "ab", {"en": 0}, [None]],
        "train_dataset": [DatasetDict({"train": TAGGED})],
    }  # fmt: skip
    for argument, values in wrong.items():
        for value in values:
            with pytest.raises(InputError) as refused:
                kind(**{**good, argument: value})
            assert argument in str(refused.value), value
            assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match="unknown key `train_datasets`; did you mean `train_dataset`"):
        kind(**good, train_datasets=TAGGED)
    with pytest.raises(InputError, match="missing a required argument: 'model'"):
        kind()
    if kind not in (ReviewTrainer, GroupTrainer):  # whose losses want the languages of a data set
        with pytest.raises(InputError, match="train_dataset is None"):
            kind(**good).train()


@pytest.mark.parametrize("kind", [ReviewTrainer, GroupTrainer])
def test_tokens_without_languages_are_refused_where_they_are_needed(kind):
    rows = of_rows(input_ids=[BLOCK] * 4)
    with pytest.raises(InputError, match="train_dataset has no column `language_ids`"):
        kind(model_for(kind), STAGES[kind]("out", **QUICK), train_dataset=rows)
    beyond = of_rows(input_ids=[BLOCK] * 4, language_ids=[[2] * 16] * 4)
    with pytest.raises(InputError, match="train_dataset holds the language id 2, but there are 2 languages"):
        kind(model_for(kind), STAGES[kind]("out", **QUICK), train_dataset=beyond)


def test_a_trainer_of_another_family_is_refused():
    for kind in (GroupTrainer, AdaptTrainer):
        with pytest.raises(InputError, match="no language groups"):
            kind(model_for(PostPretrainTrainer), STAGES[kind]("out"), train_dataset=of_rows(input_ids=[BLOCK]))
    dmoe = model_for(GroupTrainer)
    assert isinstance(dmoe, DMoEForCausalLM)
    with pytest.raises(InputError, match="This is a DMoE"):
        PostPretrainTrainer(dmoe, PostPretrainConfig("out"), train_dataset=of_rows(input_ids=[BLOCK]))


def test_a_wrong_argument_of_the_chat_trainer_is_named(tmp_path):
    options = {"max_length": 16, "use_cpu": True, "bf16": False, "report_to": "none", **checkpointed(False)}
    config = SFTConfig(str(tmp_path), **options)
    good = {"model": model_for(None), "args": config, "train_dataset": TAGGED, "processing_class": TOKENIZER}
    wrong = {
        "model": [None, 5, str(tmp_path / "missing"), DENSE],
        "args": ["out", {"output_dir": "out"}, PostPretrainConfig("out"), ReviewConfig("out")],
        "train_dataset": [None, 5, "el.jsonl", ["a"], DENSE],
        "eval_dataset": [5, "el.jsonl"],
        "processing_class": [5, "gpt2"],
        "language_classes": [5, "ab", {"en": "old"}],
        "router_losses": [5, [5]],
        "callbacks": [5],
        "peft_config": [5],
    }
    for argument, values in wrong.items():
        for value in values:
            with pytest.raises(InputError) as refused:
                MoESFTTrainer(**{**good, argument: value})
            assert argument in str(refused.value), value
            assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match="train data set has the columns content"):
        MoESFTTrainer(**{**good, "train_dataset": of_rows(content=["a"])})
    with pytest.raises(InputError, match="unknown key `tokenizer`"):
        MoESFTTrainer(**good, tokenizer=TOKENIZER)


@pytest.mark.parametrize(
    ("name", "value"), [("output_dir", 5), ("output_dir", DENSE), ("report_to", 5), ("run_name", 5), ("bf16", "yes"),
                        ("learning_rate", "fast"), ("eval_steps", "often"), ("masking", 5), ("hub_model_id", 5)],
)  # fmt: skip
def test_a_wrong_argument_of_a_configuration_is_named(name, value):
    with pytest.raises(InputError, match=f"{name}") as refused:
        PostPretrainConfig(**{"output_dir": "out", name: value})
    assert "\n" not in str(refused.value)


def test_a_source_is_text(tmp_path):
    file = write_texts(tmp_path / "el.jsonl", ["η γάτα"])
    assert LanguageText("el", str(file)).load()["text"][:] == ["η γάτα"]
    with pytest.raises(InputError, match=r"source is PosixPath.*must be str"):
        LanguageText("el", file)
