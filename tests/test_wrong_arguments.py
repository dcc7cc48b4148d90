"""Every wrong or missing argument of a public function or Trainer is refused in one line that names it."""

import inspect

import pytest
from conftest import byte_tokenizer, checkpointed, refused, tiny_dense
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


def takes(name, argument):
    if argument == "model":
        loaded = {*TEXTUAL, *MODEL} if name in ("fit_gates", "average_experts") else TEXTUAL
        return MODEL if name in OF_LOADED else loaded
    if (name, argument) in (("adapt_language", "source"), ("fit_gates", "texts")):
        return {"None"} if argument == "texts" else set()
    return TAKES.get(argument, set())


STAGES = {
    PostPretrainTrainer: PostPretrainConfig, ReviewTrainer: ReviewConfig, JointTrainer: JointConfig,
    GroupTrainer: GroupConfig, AdaptTrainer: AdaptConfig,
}  # fmt: skip
QUICK = {"block_size": 16, "max_steps": 1, "per_device_train_batch_size": 2, "disable_tqdm": True}
TAGGED = Dataset.from_list([{"text": text * 3, "language": code} for code, (text,) in TEXTS.items() for _ in range(9)])


def model_of(dmoe):
    return expand_model(DENSE, Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]]) if dmoe else PLAN)


def model_for(kind):
    return model_of(kind in (GroupTrainer, AdaptTrainer))


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


def wrong_of_trainer(kind):
    """The wrong values of each argument of a stage's Trainer."""
    siblings = [config("out") for config in STAGES.values() if config is not STAGES[kind]]
    plain = TrainingArguments("out", use_cpu=True, report_to="none")
    return {
        "model": [None, 5, "missing", siblings[0], DENSE],
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


WRONG_OF_CHAT = {
    "model": [None, 5, "missing", DENSE],
    "args": ["out", {"output_dir": "out"}, PostPretrainConfig("out"), ReviewConfig("out")],
    "train_dataset": [None, 5, "el.jsonl", ["a"], DENSE],
    "eval_dataset": [5, "el.jsonl"],
    "processing_class": [5, "gpt2"],
    "language_classes": [5, "ab", {"en": "old"}],
    "router_losses": [5, [5]],
    "callbacks": [5],
    "peft_config": [5],
}
OF_CONFIGURATION = (
    ("output_dir", 5),
    ("output_dir", DENSE),
    ("report_to", 5),
    ("run_name", 5),
    ("bf16", "yes"),
    ("learning_rate", "fast"),
    ("eval_steps", "often"),
    ("masking", 5),
    ("hub_model_id", 5),
)


@pytest.mark.parametrize(("name", "argument"), [(name, one) for name in FUNCTIONS for one in FUNCTIONS[name]])
def test_a_wrong_argument_of_a_function_is_named(name, argument):
    function, given = getattr(hf_moe_expand, name), FUNCTIONS[name]
    for kind in WRONG.keys() - takes(name, argument):
        assert refused(function, **{**given, argument: WRONG[kind]}).startswith(f"{name}: {argument} is "), kind
    refused(function, **given, **{f"{argument}_": 1}, says=f"unknown key `{argument}_`; did you mean `{argument}`")
    if inspect.signature(function).parameters[argument].default is inspect.Parameter.empty:
        others = {key: value for key, value in given.items() if key != argument}
        refused(function, **others, says=f"{name}: missing a required argument: '{argument}'")


@pytest.mark.parametrize(
    "one", [Recipe, Plan, SimilarityResult, DeviationResult, RoutingResult, Evaluation, ValidationCurves]
)
def test_what_is_no_path_is_named(one):
    for name in {"load", "from_json"} & set(dir(one)):
        for value in (None, 5, {"base": "m"}, ["a"]):
            refused(getattr(one, name), value, says=rf"^{one.__name__}\.{name}: path is .*: must be str or Path")


def test_no_public_function_is_left_out():
    public = {name for name in hf_moe_expand.__all__ if inspect.isfunction(getattr(hf_moe_expand, name))}
    assert public <= FUNCTIONS.keys()


@pytest.mark.parametrize("name", [name for name, given in FUNCTIONS.items() if "o" in given.values()])
def test_a_missing_checkpoint_is_named(name, tmp_path):
    given, missing = {**FUNCTIONS[name], "out": tmp_path / "o"}, str(tmp_path / "missing")
    first = next(iter(given))
    given[first] = [missing, missing] if first == "packs" else missing
    refused(getattr(hf_moe_expand, name), **given, says="missing")


def test_arguments_of_the_right_type_pass():
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy

    @checked
    def f(a: int, b: Sequence[float], c: Mapping[str, Iterable[str]], d: Callable | None = None, e: float = 1.0):
        return a, b, c

    rows, unread = of_rows(text=["a"]), (one for one in "ab")
    for given in (
        (numpy.int64(3), numpy.ones(2), {"el": unread}),
        (3, (1, 2.0), {"el": rows["text"], "en": {"a"}}, len, 2),
    ):
        assert f(*given) == given[:3]
    assert list(unread) == ["a", "b"]
    for given in ((True, [1.0], {}), (1, "ab", {}), (1, ["a"], {}), (1, [1.0], {"el": "text"}), (1, [1.0], {1: []}),
                  (1, [1.0], {"el": rows})):  # fmt: skip
        refused(f, *given, says=r"^f: [abc] is ")


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize("case", DATA.values(), ids=DATA)
def test_a_wrong_data_set_is_named(case, name):
    data, message = case
    given = {"train_dataset": TAGGED, "processing_class": TOKENIZER, name: data}
    config, kind = PostPretrainConfig("out", replay=True, **QUICK), PostPretrainTrainer
    refused(kind, model_for(kind), config, **given, says=message.format(name=name))


@pytest.mark.parametrize("kind", STAGES)
def test_a_wrong_argument_of_a_trainer_is_named(kind, tmp_path):
    config, rows = STAGES[kind](str(tmp_path), **QUICK), of_rows(input_ids=[BLOCK] * 4)
    good = {"model": model_for(kind), "args": config, "processing_class": TOKENIZER}
    for argument, values in wrong_of_trainer(kind).items():
        for value in values:
            refused(kind, **{**good, argument: value}, says=argument)
    refused(kind, **good, train_datasets=rows, says="unknown key `train_datasets`; did you mean `train_dataset`")
    refused(kind, says="missing a required argument: 'model'")
    if kind not in (ReviewTrainer, GroupTrainer):  # whose losses want the languages of a data set
        refused(lambda: kind(**good).train(), says="train_dataset is None")
    else:
        refused(kind, **good, train_dataset=rows, says="train_dataset has no column `language_ids`")
        beyond = rows.add_column("language_ids", [[2] * 16] * 4)
        refused(kind, **good, train_dataset=beyond, says="language id 2, but there are 2 languages")
    if kind not in (JointTrainer, ReviewTrainer):
        other = model_of(dmoe=not isinstance(good["model"], DMoEForCausalLM))
        refused(kind, **{**good, "model": other}, train_dataset=rows, says="no language groups|This is a DMoE")


def test_a_wrong_argument_of_the_chat_trainer_is_named(tmp_path):
    options = {"max_length": 16, "use_cpu": True, "bf16": False, "report_to": "none", **checkpointed(False)}
    kind, good = MoESFTTrainer, {"model": model_of(dmoe=False), "processing_class": TOKENIZER}
    good |= {"args": SFTConfig(str(tmp_path), **options), "train_dataset": TAGGED}
    for argument, values in WRONG_OF_CHAT.items():
        for value in values:
            refused(kind, **{**good, argument: value}, says=argument)
    columns = good | {"train_dataset": of_rows(content=["a"])}
    refused(kind, **columns, says="train data set has the columns content")
    refused(kind, **good, tokenizer=TOKENIZER, says="unknown key `tokenizer`")


@pytest.mark.parametrize(("name", "value"), OF_CONFIGURATION)
def test_a_wrong_argument_of_a_configuration_is_named(name, value):
    refused(PostPretrainConfig, **{"output_dir": "out", name: value}, says=name)
