"""Every wrong, missing or too large argument of a public function, Trainer or recipe is refused in one line."""

import inspect
from functools import partial
from itertools import product

import pytest
import yaml
from conftest import byte_tokenizer, refused, save_dense, tiny_dense, write_texts
from datasets import Dataset, DatasetDict
from transformers import TrainingArguments

import hf_moe_expand as moe
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.schema import MOST, checked

PLAN = moe.Plan("layer-moe", [3, 1, 2], [2], old=["en"], new=["el"])
DENSE = tiny_dense("qwen2")
TOKENIZER = byte_tokenizer()
TEXTS = {"en": ["the cat"], "el": ["η γάτα"]}
ROWS = Dataset.from_dict({"text": ["η γάτα κάθισε στο χαλί"] * 20})
EL = moe.LanguageText("el", "el.jsonl")
# What writes a checkpoint: its arguments, the first of which is to be a checkpoint.
WRITERS = {
    "adapt_language": {"model": "m", "source": EL},
    "expand_checkpoint": {"base": "m", "plan": PLAN},
    "expand_tuned": {"base": "m", "tuned": {"el": "a"}},
    "export_peft": {"model": "m"},
    "fit_base_gate": {"base": "m", "texts": TEXTS, "new": ["el"]},
    "graft_delta": {"model": "m", "base": "b", "instruct": "i"},
    "grow_checkpoint": {"model": "m", "plan": PLAN},
    "join_expansions": {"packs": ["m", "m"]},
    "save_expansion": {"model": "m"},
    "train_stage": {"model": "m", "data": {"el": EL}, "config": moe.ReviewConfig("out")},
}
KINDS = ("PostPretrain", "Review", "Joint", "Group", "Adapt")
STAGES = {getattr(moe, f"{name}Trainer"): getattr(moe, f"{name}Config") for name in KINDS}
QUICK = {"block_size": 16, "max_steps": 1, "per_device_train_batch_size": 2, "disable_tqdm": True}
TAGGED = Dataset.from_list([{"text": text * 3, "language": code} for code, (text,) in TEXTS.items() for _ in range(9)])


def model_of(dmoe):
    return moe.expand_model(DENSE, moe.Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]]) if dmoe else PLAN)


def model_for(kind):
    return model_of(kind in (moe.GroupTrainer, moe.AdaptTrainer))


def of_rows(**columns):
    return Dataset.from_dict(columns)


BLOCK = list(range(16))
DATA = {
    "no data set": (5, "{name} is 5"),
    "a file": ("el.jsonl", "{name} is 'el.jsonl': give a datasets.Dataset"),
    "a source": (EL, "{name} is of type LanguageText: .*load"),
    "a list": (["a"], r"{name} is \['a'\]"),
    "a stream": (ROWS.to_iterable_dataset(), "{name} is of type IterableDataset"),
    "a column content": (of_rows(content=["a"]), "{name} has the columns content"),
    "no rows": (of_rows(input_ids=[]), "{name}"),
    "numbers as text": (of_rows(text=[1, 2]), "{name}: the column `text` holds int64"),
    "texts as tokens": (of_rows(input_ids=["a"], language_ids=["b"]), "{name}: the column `input_ids` holds string"),
    "numbers as tokens": (of_rows(input_ids=[[0.5]], language_ids=[[0]]), "{name}: the column `input_ids` holds"),
    "several lengths": (of_rows(input_ids=[[1, 2], [3]], language_ids=[[0, 0], [0]]), "{name} has rows of 1 to 2"),
    "fewer languages": (of_rows(input_ids=[[1, 2]], language_ids=[[0]]), "{name} has rows whose `language_ids`"),
    "too long": (of_rows(input_ids=[[1] * 65], language_ids=[[0] * 65]), "{name} has rows of 65 tokens.*64 positions"),
    "tokens beyond": (of_rows(input_ids=[[257]], language_ids=[[0]]), "{name}: the column `input_ids` holds 257"),
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
        **dict.fromkeys(("processing_class", "optimizer_cls_and_kwargs"), (5, "a", DENSE)),
        "allow_lost_text": (None, 5, "a"),
        "callbacks": [5, "a", [5]],
        "optimizers": [5, "a", (5, None), None],
        "router_losses": [5, "balance", [5], moe.BalanceLoss(0.1)],
        "language_classes": [5, "ab", {"en": 0}, [None]],
        "train_dataset": [DatasetDict({"train": TAGGED})],
    }  # fmt: skip


def is_checked(one):
    classes = (moe.BalanceLoss, moe.LanguageText, moe.PairCollator)
    return one in classes or (inspect.isfunction(one) and one is not moe.freeze)


@pytest.mark.parametrize("name", [name for name in moe.__all__ if is_checked(getattr(moe, name))])
def test_a_wrong_argument_of_a_function_is_named(name):
    function = getattr(moe, name)
    parameters = inspect.signature(function).parameters
    needed = [argument for argument, one in parameters.items() if one.default is inspect.Parameter.empty]
    first, *_ = [*needed, *parameters]
    if needed:
        refused(function, says=f"missing a required argument: '{first}'", raises=TypeError)
    given = {argument: object() for argument in needed or [first]}
    refused(function, **given, says=rf"^{name}: ({'|'.join(given)}) is ")
    says = f"(unexpected keyword argument '{first}_'|missing .* argument: '{first}')"
    refused(function, **{f"{first}_": 1}, says=says, raises=TypeError)


@pytest.mark.parametrize("name", WRITERS)
def test_a_missing_checkpoint_is_named(name, tmp_path):
    first, *_ = WRITERS[name]
    missing = [str(tmp_path / "missing")] * 2
    given = {**WRITERS[name], first: missing if first == "packs" else missing[0], "out": tmp_path / "o"}
    refused(getattr(moe, name), **given, says="missing")


def test_arguments_of_the_right_type_pass():
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy

    @checked
    def f(a: int, b: Sequence[float], c: Mapping[str, Iterable[str]], d: Callable | None = None, e: float = 1.0):
        return a, b, c

    rows, unread = of_rows(text=["a"]), (one for one in "ab")
    texts = {"el": rows["text"], "en": {"a"}}
    for given in ((numpy.int64(3), numpy.ones(2), {"el": unread}), (3, (1, 2.0), texts, len, 2)):
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
    config, kind = moe.PostPretrainConfig("out", replay=True, **QUICK), moe.PostPretrainTrainer
    refused(kind, model_for(kind), config, **given, says=message.format(name=name))


@pytest.mark.parametrize("kind", STAGES)
def test_a_wrong_argument_of_a_trainer_is_named(kind, tmp_path):
    config, rows = STAGES[kind](str(tmp_path), **QUICK), of_rows(input_ids=[BLOCK] * 4)
    good = {"model": model_for(kind), "args": config, "processing_class": TOKENIZER}
    for argument, values in wrong_of_trainer(kind).items():
        for value in values:
            refused(kind, **{**good, argument: value}, says=argument)
    says = "unexpected keyword argument 'train_datasets'"
    refused(kind, **good, train_datasets=rows, says=says, raises=TypeError)
    refused(kind, says="missing a required argument: 'model'", raises=TypeError)
    if kind not in (moe.ReviewTrainer, moe.GroupTrainer):  # whose losses want the languages of a data set
        refused(lambda: kind(**good).train(), says="train_dataset is None")
    else:
        refused(kind, **good, train_dataset=rows, says="train_dataset has no column `language_ids`")
        beyond = rows.add_column("language_ids", [[2] * 16] * 4)
        refused(kind, **good, train_dataset=beyond, says="the column `language_ids` holds 2: must be below 2")
    if kind not in (moe.JointTrainer, moe.ReviewTrainer):
        other = model_of(dmoe=not isinstance(good["model"], moe.DMoEForCausalLM))
        refused(kind, **{**good, "model": other}, train_dataset=rows, says="no language groups|This is a DMoE")


IS_TOO_LARGE = r"must be at most|less than|at most 65,536 experts|a valid (number|integer)|below 2 \*\* 32"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("amounts")
    save_dense(folder / "base")
    for code in ("en", "el"):
        write_texts(folder / f"{code}.jsonl", ["some text of a language"] * 40)
    write_texts(folder / "test.jsonl", ["held-out text of a language"])
    return folder


def recipe(home, *path, value=None):
    """A recipe in which the key at `path` has a value."""
    mapping = {
        "base": f"{home}/base", "output": f"{home}/run", "old": {"en": f"{home}/en.jsonl"},
        "new": {"el": f"{home}/el.jsonl"}, "test": {"el": f"{home}/test.jsonl"},
        "plan": {"method": "moe-lpr", "experts": 2},
        "post_pretrain": {"block_size": 16, "max_steps": 1},
        "review": {"block_size": 16, "old_documents": 5, "max_steps": 1},
    }  # fmt: skip
    inner = mapping
    for key in path[:-1]:
        inner = inner.setdefault(key, {})
    if path:
        inner[path[-1]] = value
    return moe.Recipe.of_text(yaml.safe_dump(mapping), "recipe.yaml")


def test_a_recipe_refuses_a_count_that_nothing_takes(home):
    paths = "seed", "review.old_documents", "post_pretrain.max_steps", "evaluation.batch_size", "plan.experts"
    for path, value in product((path.split(".") for path in paths), (10**26 + 1, 1e27)):
        wrong = partial(recipe, home, *path, value=value)
        assert path[-1] in refused(lambda: moe.validate_recipe(wrong()), says=IS_TOO_LARGE)  # noqa: B023


def test_the_largest_count_and_the_smallest_share_overflow_nothing(home):
    moe.validate_recipe(recipe(home))
    moe.validate_recipe(recipe(home, "post_pretrain", "save_steps", value=5e-324))
    for path in (("review", "new_per_old"), ("review", "old_documents")):
        with pytest.raises(InputError, match=r"has 40 documents, but the mix asks for \d+: give more text"):
            moe.validate_recipe(recipe(home, *path, value=MOST))
    both = recipe(home, "review", value={"old_documents": MOST, "new_per_old": MOST, "block_size": 16})
    refused(moe.validate_recipe, both, says="but the mix asks for")
    moe.validate_recipe(recipe(home, "post_pretrain", "num_train_epochs", value=MOST))
