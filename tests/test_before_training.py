"""What is said of a training before it begins: memory, bfloat16 by device, tokens, room on a disk; and text that a
tokenizer loses: what counts, and where it is said, marked and refused."""

import gzip
import json
import re
import shutil
import unicodedata
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transformers.trainer
from conftest import byte_tokenizer, invoke, keywords, refused, save_dense, tiny_dense, write_texts
from datasets import Dataset
from encoder_decoders import SENTENCES, byt5_tokenizer, mbart50_tokenizer, mbart_tokenizer, nllb_tokenizer, t5_tokenizer
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_moe_expand import DenseConfig, Plan, PostPretrainConfig, ReviewConfig, expand_checkpoint, freeze, train_stage
from hf_moe_expand.checkpoint.stored import network_of
from hf_moe_expand.core.disk import peak, readable_size
from hf_moe_expand.core.schema import changed
from hf_moe_expand.data.lost import check_lost, lost_text, token_line
from hf_moe_expand.data.packing import pack_texts
from hf_moe_expand.data.pairs import PairEncoder, SentencePair
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.data.tokens import tokens_at_hand
from hf_moe_expand.evaluation.perplexity import LanguageScore, text_stream
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.inference.memory import least_memory, training_disk
from hf_moe_expand.inference.models import load_config
from hf_moe_expand.modeling import LayerMoEForCausalLM
from hf_moe_expand.report.inspection import inspect_checkpoint
from hf_moe_expand.runs import pipeline
from hf_moe_expand.runs.pipeline import run_recipe, validate_recipe
from hf_moe_expand.runs.recipe import Recipe
from hf_moe_expand.runs.steps import stage as stage_steps
from hf_moe_expand.stages import keywords as of_stages
from hf_moe_expand.stages import prepare
from hf_moe_expand.trainers.bfloat16 import has_bfloat16

QUICK = {"block_size": 16, "per_device_train_batch_size": 2, "disable_tqdm": True}
PLAN = Plan("layer-moe", [2, 1, 3], [2], old=["en"], new=["el"])
RECIPE = """{{base: {root}/base, output: {out}/run, old: {{en: {root}/en.jsonl}}, new: {{el: {root}/el.jsonl}},
plan: {{method: moe-lpr, experts: 3}},
post_pretrain: {{block_size: 16, max_steps: 3, save_steps: 1, per_device_train_batch_size: 2}},
review: {{block_size: 16, max_steps: 1, save_strategy: "no", per_device_train_batch_size: 2}}}}"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("costs")
    save_dense(root / "base", dtype=torch.bfloat16, tie_word_embeddings=False)
    write_texts(root / "en.jsonl", [f"the cat {i} sits" for i in range(30)])
    write_texts(root / "el.jsonl", [f"η γάτα {i} κάθεται" for i in range(60)])
    expand_checkpoint(root / "base", root / "expanded", PLAN)
    return root


@pytest.fixture
def costly(root, tmp_path):
    return Recipe.of_text(RECIPE.format(root=root, out=tmp_path), "recipe.yaml")


def disk_with(monkeypatch, free):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


def tensor_bytes(folder):
    """Bytes of the weights, and of the two moments of each weight that an optimizer keeps."""
    found = sum(tensor.nbytes for file in folder.glob("*.safetensors") for tensor in load_file(file).values())
    if (folder / "optimizer.pt").is_file():
        state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
        found += sum(t.nbytes for moments in state.values() for name, t in moments.items() if name != "step")
    return found


def of_the_stage(checkpoint, config):
    """Bytes of a trained checkpoint and of the training checkpoints beside it."""
    return tensor_bytes(checkpoint) + training_disk(network_of(load_config(checkpoint)), config)


EVERY, ALL = {"max_steps": 3, "save_steps": 1}, {"save_total_limit": None}


# `least` is less than 1 where no interrupt saves the checkpoint that there is room for.
@pytest.mark.parametrize(
    ("model", "stage", "options", "least"),
    [
        ("expanded", PostPretrainConfig, EVERY, 0.8),  # experts that no token met have no moments
        ("expanded", PostPretrainConfig, EVERY | ALL | {"optim": "sgd"}, 1),
        ("base", DenseConfig, {"max_steps": 4, "save_steps": 0.5} | ALL, 2 / 3),
        ("base", DenseConfig, {"max_steps": 3, "save_steps": 500}, 1 / 2),
        ("base", DenseConfig, {"max_steps": 3, "save_strategy": "no"}, 1),
        ("base", DenseConfig, {"num_train_epochs": 2, "save_strategy": "epoch"} | ALL, 2 / 3),
    ],
)
def test_training_checkpoints_have_the_counted_bytes(root, tmp_path, monkeypatch, model, stage, options, least):
    found, real = [0], transformers.trainer.rotate_checkpoints

    def counted(output_dir, *args, **kwargs):  # before the oldest is removed
        found.append(sum(map(tensor_bytes, Path(output_dir).glob("checkpoint-*"))))
        real(output_dir, *args, **kwargs)

    monkeypatch.setattr(transformers.trainer, "rotate_checkpoints", counted)
    config = stage(**QUICK, **options)
    most = training_disk(network_of(load_config(root / model)), config)
    train_stage(root / model, tmp_path / "out", {"el": LanguageText("el", str(root / "el.jsonl"))}, config)
    assert least * most <= max(found) <= most


def test_training_is_refused_where_the_disk_has_too_little_room(root, tmp_path, monkeypatch):
    config, text = PostPretrainConfig(**EVERY, **QUICK), {"el": LanguageText("el", str(root / "el.jsonl"))}
    given = (train_stage, root / "expanded", tmp_path / "out", text, config)
    needed = of_the_stage(root / "expanded", config)
    disk_with(monkeypatch, needed - 1)
    with monkeypatch.context() as patch:
        patch.setattr(LanguageText, "load", lambda *_: pytest.fail("read text in vain"))
        refused(*given, says=rf"out: needs {readable_size(needed)} for .*, 1 byte more than the disk has free")
        patch.setenv("ACCELERATE_USE_FSDP", "true")  # a split model is gathered
        refused(*given, says=f"out: needs {readable_size(needed + tensor_bytes(root / 'expanded'))} for ")


def test_a_run_writes_what_validate_says(costly, tmp_path, monkeypatch):
    def most():
        said = "\n".join(validate_recipe(costly))
        assert re.search(r"post_pretrain: about 3 steps of 32 tokens; passes over the text: .*about: el ", said)
        needed = peak(pipeline._checked(costly)[1])
        assert f"disk: up to {readable_size(needed)} for checkpoints" in said
        return needed

    needed = most()
    disk_with(monkeypatch, needed - 1)
    too_little = rf"run: needs {readable_size(needed)} for checkpoints.*, 1 byte more than"
    for do in (validate_recipe, run_recipe):
        refused(do, costly, says=too_little)
    assert validate_recipe(costly, here=False)  # for another machine
    assert not (tmp_path / "run").exists()
    disk_with(monkeypatch, needed)
    said = []
    run_recipe(costly, said.append)
    assert [line for line in said if line.startswith("warning: post_pretrain: fewer than 50 steps")] == said[:1]
    kept = {name: tensor_bytes(tmp_path / "run" / name) for name in ("expanded", "post_pretrain", "review")}
    of_stage = of_the_stage(tmp_path / "run" / "expanded", costly.post_pretrain)
    assert needed == max(kept["expanded"] + of_stage, sum(kept.values()))
    shutil.rmtree(tmp_path / "run" / "review")
    assert most() == kept["review"]


def test_an_emulated_bfloat16_is_said(costly, monkeypatch):
    asking = changed(costly, post_pretrain=keywords(PostPretrainConfig, block_size=16, max_steps=1, bf16=True))
    for able, given, said in ((False, asking, 1), (True, asking, 0), (False, costly, 0)):
        monkeypatch.setattr(stage_steps, "has_bfloat16", lambda able=able: able)
        lines = validate_recipe(given)
        assert sum(line.startswith("warning: post_pretrain: bf16: this machine has no") for line in lines) == said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_keeps_more_than_the_least(tmp_path, dtype):
    """Beside float32 weights, gradients and AdamW: the tensors that torch keeps for the backward pass."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 32}
    save_dense(tmp_path / "base", "llama", num_hidden_layers=6, **sizes)
    expand_checkpoint(tmp_path / "base", tmp_path / "out", Plan("moe-lpr", [2] * 6, old=["en"], new=["el"]))
    model, kept = LayerMoEForCausalLM.from_pretrained(tmp_path / "out").train(), {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    fixed = 4 * model.num_parameters() + 12 * freeze(model, "post-pretrain").trainable

    def pack(tensor):
        if (storage := tensor.untyped_storage()).data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no other takes its place
        return tensor

    ids = torch.randint(0, model.config.vocab_size, (4, 256))
    half = torch.autocast("cpu", torch.bfloat16, dtype == torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), half:
        model(input_ids=ids, labels=ids, use_cache=False)
    config = PostPretrainConfig(block_size=256, per_device_train_batch_size=4)
    hidden, logits = 4 * 1024 * 6 * 128, 4 * 1024 * model.config.vocab_size
    assert least_memory(model, config) == fixed + hidden + logits
    assert hidden + logits < sum(size for size, _ in kept.values())
    assert least_memory(model, config, kept=3) == fixed + 3 * hidden + logits


@pytest.mark.parametrize(
    ("stage", "settings", "said", "warned"),
    [
        (DenseConfig, {"num_train_epochs": 2, "gradient_accumulation_steps": 3}, "about 33 .* 96 .*text: 2;", "f"),
        (DenseConfig, {"max_steps": 49}, "about 49 steps of 32 tokens; passes over the text: 0.98;", "f"),
        (DenseConfig, {"max_steps": 50}, "about 50 steps", ""),
        (DenseConfig, {"tokens": 6400}, "about 200 steps .*text: 4;", ""),
        (DenseConfig, {"tokens": 6432}, "about 201 steps .*text: 4.02;", "m"),
        (DenseConfig, {"tokens": 6432, "gradient_accumulation_steps": 5}, "about 40 steps .*text: 4.02;", "fm"),
        (DenseConfig, {"tokens_per_language": 400, "num_train_epochs": 1}, "about 25 steps of 32 .*text: 1;", "f"),
        (ReviewConfig, {"num_train_epochs": 1}, "about 37 steps of 32 .*text: 1;", "f"),  # as much old text as new
        (ReviewConfig, {"old_documents": 5}, "^x: tokens at hand", ""),
    ],
)
def test_steps_and_passes(root, monkeypatch, stage, settings, said, warned):
    counts = {"en": 600, "el": 1000}
    monkeypatch.setattr(prepare, "tokens_at_hand", lambda text, tokenizer: counts[text.language])
    texts = {code: LanguageText(code, str(root / f"{code}.jsonl")) for code in ("en", "el")}
    model = load_config(root / ("base" if stage is DenseConfig else "expanded"))
    found, *warnings = prepare.length(stage(**settings, **QUICK), model, texts, "x", byte_tokenizer())
    assert re.search(said, found), found
    assert found.endswith("tokens at hand, about: en 600, el 1,000")
    of = {"f": "warning: x: fewer than 50 steps", "m": "warning: x: after more than 4 passes"}
    assert [line[: len(of[kind])] for line, kind in zip(warnings, warned, strict=True)] == [of[kind] for kind in warned]


def test_tokens_are_estimated_from_the_beginning_of_each_file(tmp_path):
    tokens = lambda path: tokens_at_hand(LanguageText("el", str(path)), byte_tokenizer())  # noqa: E731
    texts = [f"number {number} of many texts, {'long ' * (number % 7)}" for number in range(30_000)]
    expected = sum(map(len, texts)) + len(texts)
    assert tokens(write_texts(tmp_path / "el.jsonl", texts)) == pytest.approx(expected, rel=0.02)
    assert tokens(write_texts(tmp_path / "few.jsonl", ["abc", "defg"])) == 9  # each document with its end
    Dataset.from_dict({"text": ["abc", "defg"] * 3000}).to_parquet(tmp_path / "x.parquet")
    assert tokens(tmp_path / "x.parquet") == 27_000
    packed = gzip.compress((tmp_path / "el.jsonl").read_bytes())
    (tmp_path / "el.jsonl.gz").write_bytes(packed)
    assert tokens(tmp_path / "el.jsonl.gz") == pytest.approx(expected, rel=0.2)
    (tmp_path / "wrong.jsonl").write_text('{"text": "one"}\n{"words": "two"}\n')
    refused(tokens, tmp_path / "wrong.jsonl", says=r"wrong\.jsonl:2: has no string under `text`")


def test_more_memory_than_there_is(costly, monkeypatch):
    monkeypatch.setattr(stage_steps, "memory_of_all", lambda: 1000)
    refused(validate_recipe, costly, says=r"post_pretrain: takes at least .* but 1.0 kB are here: lower .*--offline")
    # Another machine may be the one that trains, or split the model.
    split = keywords(PostPretrainConfig, block_size=16, max_steps=1, distributed_config={"fsdp_size": 2})
    split = changed(costly, post_pretrain=split, review=None)
    for given, options in ((costly, {"here": False}), (costly, {"offline": True}), (split, {})):
        assert validate_recipe(given, **options)
    monkeypatch.setattr(stage_steps, "memory_of_all", lambda: None)  # a device of which it is not known
    assert validate_recipe(costly)


def test_a_cpu_has_it_by_its_instructions_and_a_gpu_where_it_does_not_emulate_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    if torch.backends.mkldnn.is_available():
        assert has_bfloat16() == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not has_bfloat16()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert has_bfloat16()
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)  # by emulation
    for major, has in ((7, False), (8, True)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, major=major: Mock(major=major))
        assert has_bfloat16() == has


def test_a_stage_on_a_machine_without_it_warns(monkeypatch, tmp_path):
    monkeypatch.setattr(of_stages, "has_bfloat16", lambda: False)
    with pytest.warns(UserWarning, match="no instructions for bfloat16.*leave `bf16: true` out"):
        PostPretrainConfig(str(tmp_path), bf16=True, use_cpu=True).begun()
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)  # by emulation
    with pytest.warns(UserWarning, match="or give `fp16: true` on a GPU"):
        PostPretrainConfig(str(tmp_path), bf16=True, use_cpu=False).begun()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PostPretrainConfig(str(tmp_path), use_cpu=True).begun()
        monkeypatch.setattr(of_stages, "has_bfloat16", lambda: True)
        PostPretrainConfig(str(tmp_path), bf16=True, use_cpu=True).begun()


def test_inspect_shows_what_a_plan_makes_without_weights(root, tmp_path):
    shutil.copy(root / "base" / "config.json", tmp_path)
    plan, said = tmp_path / "plan.json", inspect_checkpoint(root / "expanded").lines()
    PLAN.save(plan)
    assert invoke("inspect", tmp_path, "--plan", plan).splitlines() == [
        line for line in said if not line.startswith(("expansion", "base inside"))
    ]
    refused(invoke, "inspect", root / "expanded", "--plan", plan, says="is an expanded checkpoint already")
    for counts, before, why in (([2, 2], [], "is for 2 layers"), ([3] * 3, [2] * 3, "dense base and its first plan")):
        Plan("moe-lpr", counts, old=["en"], new=["el"], grows_from=before).save(plan)
        refused(invoke, "inspect", root / "base", "--plan", plan, says=why)


ENGLISH = "the quick brown fox jumps over the lazy dog"
GREEK = "ξεσκεπάζω την ψυχοφθόρα βδελυγμία"


def unigram(known=ENGLISH, normalizer=None, pieces=()):
    """SentencePiece's kind, of single characters: no bytes to fall back on."""
    letters = dict.fromkeys("▁" + known.replace(" ", ""))
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *((one, -1.0) for one in letters)], 0))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def fallback():
    """Llama's kind, with bytes to fall back on and a space in front."""
    tokens = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *dict.fromkeys(ENGLISH.replace(" ", ""))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def dropping():
    """BPE without an unknown token, which drops what it does not know."""
    vocabulary = {one: number for number, one in enumerate(dict.fromkeys(ENGLISH))}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, [])))


def normalised(normalizer):
    tokenizer = byte_tokenizer().backend_tokenizer
    tokenizer.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


KEPT = {
    "bytes": (byte_tokenizer, GREEK), "a space in front, bytes to fall back on": (fallback, f"{GREEK} 👍 ไทย"),
    "NFC": (lambda: normalised(normalizers.NFC()), unicodedata.normalize("NFD", GREEK)),
    "NFKC": (lambda: normalised(normalizers.NFKC()), "ﬁne ① ｆｕｌｌ … x²"),
    "white space": (lambda: normalised(normalizers.Replace(Regex(r"\s+"), " ")), "one\n\n  two\tthree\u00a0four"),
    "control characters": (lambda: normalised(normalizers.Replace("\x00", "")), "a\x00b"),
    "a text that writes the unknown token": (unigram, "the <unk> fox"),
    "special tokens in a text": (byte_tokenizer, "one<end>two"),
}  # fmt: skip
# The bytes that are lost, of all.
LOST = {
    "unknown letters": (unigram, f"fox {GREEK}", (60, 63)),
    "dropped letters": (dropping, "fox éé", (4, 7)),
    "marks": (lambda: normalised(normalizers.StripAccents()), "कु कि", (6, 12)),
    "capitals": (lambda: normalised(normalizers.Lowercase()), "Fox FOX", (4, 6)),
    "joiners": (lambda: normalised(normalizers.Replace("\u200d", "")), "क\u200dष", (3, 9)),
    "a replaced letter": (lambda: normalised(normalizers.Replace("ß", "ss")), "groß", (2, 5)),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT | LOST)
def test_lost_bytes_are_counted(case):
    """What only another form of the text has is not lost."""
    make, text, *counts = (KEPT | LOST)[case]
    found = lost_text([text], make())
    if case in KEPT:
        assert found.lost == 0
    else:
        assert [(found.lost, found.size)] == counts
        assert found.share == found.lost / found.size
        assert found.characters


def test_a_sample_ends_and_tokens_a_byte_are_counted():
    found = lost_text(iter([ENGLISH] * 1000), byte_tokenizer(), size=100)
    assert 100 <= found.size < 200
    assert lost_text([], byte_tokenizer()).share == 0
    counted = {"el": lost_text(["δύο τρία"], byte_tokenizer()), "en": lost_text(["a fox"], unigram())}
    counted["none"] = lost_text([], byte_tokenizer())
    assert [(one.tokens, one.bytes) for one in counted.values()] == [(15, 15), (6, 5), (0, 0)]
    assert token_line(counted) == ["tokens a byte: el 1.000, en 1.200"]
    assert token_line({}) == []


def test_more_than_two_percent_is_refused():
    check_lost({"el": lost_text(["a" * 98 + "é"], unigram("ae"))})
    lossy = {"en": lost_text(["ab"], unigram("ab")), "el": lost_text(["a" * 97 + "é"], unigram("ae"))}
    refused(check_lost, lossy, says=r"^el: the tokenizer loses 2\.0 % .*most often é.*--allow-lost-text")
    check_lost(lossy, allowed=True)


def test_text_and_pairs_know_what_is_lost_of_each_language():
    texts = {"en": [ENGLISH] * 9, "el": [GREEK] * 9}
    packed = pack_texts({code: Dataset.from_dict({"text": t}) for code, t in texts.items()}, unigram(), 8, 0)
    assert {code: found.share for code, found in packed.lost.items()} == {"en": 0, "el": 1}
    found = PairEncoder(unigram()).lost([SentencePair(ENGLISH, GREEK, "en", "el")])
    assert (found["en"].share, found["el"].share) == (0, 1)


@pytest.mark.parametrize("made", [nllb_tokenizer, mbart_tokenizer, mbart50_tokenizer, t5_tokenizer, byt5_tokenizer])
def test_translation_models_lose_what_their_tokenizers_do_not_know(made):
    tokenizer = made()
    encoder, before = PairEncoder(tokenizer), tokenizer("the sea").input_ids
    known = [SentencePair(*pair, "en", "es") for pair in zip(SENTENCES["en"], SENTENCES["es"], strict=True)]
    assert {code: found.share for code, found in encoder.lost(known).items()} == {"en": 0, "es": 0}
    foreign = encoder.lost([SentencePair("the sea", "море", "en", "es")])
    assert foreign["en"].share == 0
    assert (foreign["es"].share > 0.4) is (made is not byt5_tokenizer)
    assert tokenizer("the sea").input_ids == before


def test_scores_of_lost_text_are_marked_as_no_bound():
    stream = text_stream([f"{ENGLISH} {GREEK}"], unigram())
    assert 0.6 < stream.lost < 0.7
    both = {"en": LanguageScore(8.0, 3.0, 9, 9, 0.0), "el": LanguageScore(2.0, 0.4, 9, 9, stream.lost)}
    whole = {"en": LanguageScore(8.0, 3.0, 9, 9, 0.0), "el": LanguageScore(2.0, 0.8, 9, 9, 0.0)}
    result = Evaluation(["en"], ["el"], {"base": both, "after": whole})
    assert [row[1:] for row in result.rows()[1]] == [["3.000", "3.000", "+0.0 %"], ["0.400*", "0.800", "+100.0 %*"]]
    assert result.rows("perplexity")[1][1][1] == "2.000*"
    first, second, mark = result.notes()
    assert first == f"bytes that the tokenizer of base loses: en 0 %, el {100 * stream.lost:.1f} %"
    assert second == "bytes that the tokenizer of after loses: en 0 %, el 0 %"
    assert mark.startswith("scores with * are no bound")
    assert mark in result.markdown()
    assert "*" not in str(Evaluation(["en"], ["el"], {"base": whole}).rows())
    assert Evaluation(["en"], [], {"base": {"en": LanguageScore(8.0, 3.0, 9, 9)}}).notes() == []  # an earlier release's


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A base of English letters alone, and text."""
    folder = tmp_path_factory.mktemp("lossy")
    tokenizer = unigram(ENGLISH + "αβγ")
    tokenizer.save_pretrained(folder / "base")
    model = tiny_dense("qwen2", vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=1)
    model.save_pretrained(folder / "base")
    write_texts(folder / "en.jsonl", [ENGLISH] * 60)
    write_texts(folder / "el.jsonl", [f"{GREEK} {ENGLISH}"] * 60)
    write_texts(folder / "test.jsonl", [f"{ENGLISH} {GREEK}"] * 60)
    write_texts(folder / "english.jsonl", [f"{ENGLISH} {ENGLISH}"] * 3)
    expand_checkpoint(folder / "base", folder / "expanded", Plan("moe-lpr", [2, 1, 2], old=["en"], new=["el"]))
    return folder


def recipe(home, allowed=False, new="el.jsonl", test="test.jsonl"):
    """With text of these names in the folder, or of whole paths."""
    mapping = {
        "base": f"{home}/base", "output": f"{home}/run", "old": {"en": f"{home}/en.jsonl"},
        "new": {"el": str(home / new)}, "test": {"el": str(home / test)},
        "plan": {"method": "moe-lpr", "experts": 2}, "allow_lost_text": allowed,
        "post_pretrain": {"block_size": 16, "max_steps": 1}, "review": None,
    }  # fmt: skip
    return Recipe.of_text(json.dumps(mapping), "recipe.yaml")


def test_a_recipe_of_lost_text_is_refused_unless_it_allows_it(home):
    refused(validate_recipe, recipe(home), says=r"^new\.el: the tokenizer loses 63\.\d % of the text's bytes")
    lines = validate_recipe(recipe(home, True))
    (tokens,) = (line for line in lines if line.startswith("tokens a byte: "))
    assert re.fullmatch(r"tokens a byte: old\.en 0\.\d{3}, new\.el 0\.\d{3}, test\.el 0\.\d{3}", tokens), tokens
    shares = next(line for line in lines if line.startswith("bytes that the tokenizer loses"))
    assert "old.en 0 %, new.el 63." in shares
    assert any(line.startswith("warning: test.el: the tokenizer loses") for line in lines)


def test_validate_says_what_is_left_out_of_a_text(home, tmp_path):
    rows = [{"text": ENGLISH}] * 20 + [{"text": ENGLISH, "language": "grc"}] * 2 + [{"text": None}]
    (tmp_path / "el.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    (tmp_path / "README.txt").write_text("about")
    for offline in (False, True):
        lines = validate_recipe(recipe(home, new=tmp_path, test="english.jsonl"), offline)
        said = next(line for line in lines if line.startswith(f"new.el: {tmp_path}, 1 file(s); "))
        assert "files left out: README.txt (about the data, by its name); 20 documents kept" in said
        assert said.endswith("3 rows left out: 2 tagged 'grc', 1 without text")


def test_a_training_on_lost_text_is_refused_unless_allowed(home, capsys):
    texts, config = {"el": LanguageText("el", f"{home}/el.jsonl")}, PostPretrainConfig(block_size=16, max_steps=1)
    refused(train_stage, home / "expanded", home / "trained", texts, config, says=r"^el: the tokenizer loses 63\.")
    assert not (home / "trained").exists()
    train_stage(home / "expanded", home / "trained", texts, config, allow_lost_text=True)
    said = capsys.readouterr().out
    assert "bytes that the tokenizer loses: el 63." in said
    assert "warning: el: the tokenizer loses" in said


def test_the_first_file_of_a_folder_does_not_stand_for_the_others(home, tmp_path):
    write_texts(tmp_path / "a.jsonl", [ENGLISH * 60] * 200)
    write_texts(tmp_path / "b.jsonl", [GREEK * 60] * 50)
    refused(validate_recipe, recipe(home, new=tmp_path), says=r"new\.el: the tokenizer loses")
