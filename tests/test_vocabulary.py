"""A language's own tokens: learned, given at an expansion, trained, told, exported and taken out again."""

import json
import pickle
import shutil
from itertools import groupby, islice
from unittest.mock import patch

import pytest
import torch
from bpe import bpe_tokenizer
from conftest import byte_tokenizer, invoke, keywords, run_fresh, save_dense, tiny_dense, write_texts
from datasets import Dataset
from gated_models import GREEDY, all_go_to, gated_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from trl import SFTConfig
from typer.testing import CliRunner

from hf_moe_expand import (
    LayerMoEConfig,
    LayerMoEForCausalLM,
    MoESFTTrainer,
    Plan,
    PostPretrainConfig,
    PostPretrainTrainer,
    Recipe,
    average_checkpoints,
    average_experts,
    cli,
    expand_checkpoint,
    expand_model,
    grow_checkpoint,
    make_card,
    run_recipe,
    save_expansion,
    train_stage,
)
from hf_moe_expand.analysis.fertility import measure_fertility
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.checkpoint.graft import graft_delta
from hf_moe_expand.checkpoint.grow import leave_out_vocabulary
from hf_moe_expand.checkpoint.join import join_expansions
from hf_moe_expand.checkpoint.reader import CheckpointReader
from hf_moe_expand.checkpoint.tokenizer import load_tokenizer
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.data.merges import base_pieces, check_kind, grown_state, learn
from hf_moe_expand.data.packing import pack_texts
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.data.stream import TextStream
from hf_moe_expand.data.tokens import WITH_BASE, tokenizer_for
from hf_moe_expand.evaluation.perplexity import evaluate_model
from hf_moe_expand.evaluation.report import score_models
from hf_moe_expand.evaluation.settings import EvaluationSettings
from hf_moe_expand.inference.asking import Answering, ChatModel
from hf_moe_expand.report.inspection import inspect_checkpoint
from hf_moe_expand.stages.run import check_frozen
from hf_moe_expand.trainers.samplers import LanguageMix

V, SIZE = 257, 30
GREEK = ["Η Ελλάδα είναι ωραία και η θάλασσα είναι ωραία.", "Η θάλασσα και η Ελλάδα, ωραία είναι η θάλασσα!"] * 12
HUNGARIAN = ["Magyarország szép ország, és a magyar nyelv is szép nyelv.", "A szép nyelv, a magyar ország nyelve."] * 12
ENGLISH = ["Greece is beautiful, and so is the sea.", "The sea is in Greece, and Greece is beautiful."] * 12


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    held_out = {"el test": ["Η θάλασσα της Ελλάδας."], "en test": ["The beautiful sea of Greece."]}
    texts = {"el": GREEK, "hu": HUNGARIAN, "en": ENGLISH, **held_out}
    return {code: write_texts(folder / f"{code}.jsonl", of) for code, of in texts.items()}


def plan(files, *codes, **changes):
    vocabulary = {code: {"text": str(files[code]), "size": SIZE} for code in codes}
    fields = {"old": ["en"], "new": ["el", "hu"], "exclusive": True, **changes}
    return Plan("moe-lpr", [2, 2, 2], vocabulary=vocabulary, **fields)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_dense(tmp_path_factory.mktemp("base") / "dense", "llama", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def expanded(base, files, tmp_path_factory):
    out = tmp_path_factory.mktemp("expanded") / "model"
    expand_checkpoint(base, out, plan(files, "el", "hu"))
    return out


# --- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("size", [257, 280])
def test_learned_tokens_go_on_from_the_bases_and_lose_nothing(rule, size):
    tokenizer = bpe_tokenizer(rule, size)
    own = learn(tokenizer, GREEK, 20, "el")
    ids = {token: 1000 + number for number, token in enumerate(own.tokens)}
    assert len(ids) == 20
    assert not {*ids} & {*tokenizer.get_vocab()}
    grown = Tokenizer.from_str(json.dumps(grown_state(tokenizer._tokenizer, own.merges, ids)))
    for text in [*GREEK[:2], *ENGLISH[:2]]:
        of_base, of_own = tokenizer(text).input_ids, grown.encode(text).ids
        assert grown.decode(of_own) == tokenizer.decode(of_base) == text
        assert len(of_own) <= len(of_base)
        # Each own token stands for tokens of the base.
        pieces = dict(zip(ids.values(), base_pieces(tokenizer, ids), strict=True))
        spelled = [piece for number in of_own for piece in pieces.get(number, [number])]
        assert tokenizer.decode(spelled) == text
    size, of_both = sum(len(text.encode()) for text in GREEK), (tokenizer._tokenizer, grown)
    counted = [sum(len(one.encode(text).ids) for text in GREEK) / size for one in of_both]
    assert own.tokens_per_byte == tuple(round(rate, 4) for rate in counted)
    assert counted[1] < counted[0]
    assert own == learn(tokenizer, GREEK, 20, "el")


def test_merges_stand_after_all_of_the_bases_and_in_the_order_of_how_often_they_occur():
    tokenizer = byte_tokenizer()
    assert learn(tokenizer, ["abc", "abc", "ab"], 2, "el").merges == [("a", "b"), ("ab", "c")]
    state = grown_state(bpe_tokenizer()._tokenizer, [("e", "l")], {"el": 257})
    assert state["model"]["merges"] == [["a", "l"], ["e", "l"]]


def test_too_little_text_says_what_it_bears():
    with pytest.raises(InputError, match=r"'el': its text gives (\d+) tokens of its own.*, but 5,000 were") as caught:
        learn(byte_tokenizer(), GREEK, 5000, "el")
    bears = int(str(caught.value).split(" gives ")[1].split()[0])
    assert len(learn(byte_tokenizer(), GREEK, bears, "el").tokens) == bears


def wrapped(model, **parts):
    tokenizer = Tokenizer(model)
    for name, value in parts.items():
        setattr(tokenizer, name, value)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BYTES = {"pre_tokenizer": pre_tokenizers.ByteLevel(), "decoder": decoders.ByteLevel()}
NFC_AND_LOWER = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
KINDS = [
    (wrapped(models.Unigram([("a", -1.0), ("b", -2.0)])), "a unigram model, of SentencePiece"),
    (wrapped(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")), "a WordPiece model"),
    (wrapped(models.WordLevel({"a": 0}, unk_token="a")), "a WordLevel model"),
    (wrapped(models.BPE({"a": 0}, [], byte_fallback=True)), "a BPE of characters"),
    (wrapped(models.BPE({"a": 0}, []), pre_tokenizer=pre_tokenizers.Metaspace()), "a BPE of characters"),
    (wrapped(models.BPE({"a": 0}, []), normalizer=normalizers.Lowercase(), **BYTES), r"changes the text .*\(Lowercase"),
    (wrapped(models.BPE({"a": 0}, []), normalizer=NFC_AND_LOWER, **BYTES), r"changes the text .*\(Lowercase"),
    (wrapped(models.BPE({"a": 0}, [], dropout=0.5), **BYTES), "a dropout"),
    (wrapped(models.BPE({"a": 0}, [], end_of_word_suffix="</w>"), **BYTES), "an? end_of_word_suffix"),
    (object(), "no tokenizer.json"),
]


@pytest.mark.parametrize(("tokenizer", "said"), KINDS, ids=[said for _, said in KINDS])
def test_tokenizers_of_another_kind_are_named(tokenizer, said):
    with pytest.raises(InputError, match=f"BASE: .*{said}.*leave the vocabulary out"):
        check_kind(tokenizer, "BASE")


def test_nfc_alone_may_stand_before_the_merges():
    tokenizer = wrapped(models.BPE(byte_tokenizer().get_vocab(), []), normalizer=normalizers.NFC(), **BYTES)
    check_kind(tokenizer, "BASE")
    composed, apart = "é" * 30, "é" * 30
    assert learn(tokenizer, [apart], 2, "fr").tokens == learn(tokenizer, [composed], 2, "fr").tokens


# --- the plan ---------------------------------------------------------------------------------------------------------

ONE = {"el": {"text": "el.jsonl", "size": 10}}
BAD_PLANS = [
    ({"old": ["en"], "new": ["hu"]}, "el is not a new language: only a new one (hu)"),
    ({"old": ["el"], "new": ["hu"]}, "el is an old language, whose text keeps the base's tokens"),
    ({}, "el is not a new language: only a new one (the plan names none)"),
    ({"new": ["el"], "grows_from": [2, 2, 2]}, "only the first expansion"),
    ({"new": ["el"], "encoder_layers": 1}, "an encoder-decoder's sentence"),
    ({"groups": [["en"], ["el"]], "method": "dmoe"}, "in a DMoE no language can be told"),
    ({"new": ["el"], "vocabulary": {"el": {"text": "x", "size": 0}}}, "size is 0: must be at least 1"),
    ({"new": ["el"], "vocabulary": {"el": {"size": 5}}}, "text"),
]


@pytest.mark.parametrize(("fields", "said"), BAD_PLANS, ids=[said for _, said in BAD_PLANS])
def test_plans_that_give_none_are_refused(fields, said):
    with pytest.raises(InputError) as caught:
        Plan(fields.pop("method", "x"), [2, 2, 2], **{"vocabulary": ONE, **fields})
    assert said in str(caught.value)


def test_a_plan_file_keeps_them(tmp_path):
    made = Plan("x", [2, 2, 2], new=["el"], vocabulary=ONE)
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    Plan("x", [2, 2, 2]).save(tmp_path / "none.json")
    assert "vocabulary" not in json.loads((tmp_path / "none.json").read_text())


# --- the expansion ----------------------------------------------------------------------------------------------------


def test_the_checkpoint_has_the_bases_tokenizer_and_one_for_each_language(base, expanded):
    of_base, now = AutoTokenizer.from_pretrained(base), AutoTokenizer.from_pretrained(expanded)
    own = {code: AutoTokenizer.from_pretrained(expanded, subfolder=f"vocabulary/{code}") for code in ("el", "hu")}
    for text in [*GREEK[:2], *HUNGARIAN[:2], *ENGLISH[:2]]:
        ids = of_base(text).input_ids
        assert now(text).input_ids == ids
        for code, tokenizer in own.items():
            mine = tokenizer(text).input_ids
            # One decoder: each language's tokenizer writes the others' tokens too.
            assert all(other.decode(mine) == text for other in own.values())
            assert (max(mine) >= V and len(mine) < len(ids)) or text not in {"el": GREEK, "hu": HUNGARIAN}[code]
    config = json.loads((expanded / "config.json").read_text())
    assert config["vocab_size"] == V
    assert sum(config["vocabularies"].values()) == len(own["el"]) - len(of_base)
    assert own["el"].eos_token == of_base.eos_token


def test_rows_begin_as_the_mean_of_the_bases_pieces(base, expanded):
    reader, dense = CheckpointReader(expanded), AutoModelForCausalLM.from_pretrained(base)
    tokenizer, own = AutoTokenizer.from_pretrained(base), AutoTokenizer.from_pretrained(expanded / "vocabulary/hu")
    ids = {token: number for token, number in own.get_vocab().items() if number >= V}
    assert sorted(ids.values()) == [*range(V, V + len(ids))]
    for key, matrix in (("embedding", dense.get_input_embeddings()), ("head", dense.get_output_embeddings())):
        rows = reader.tensor(f"vocabulary.{key}.weight")
        for (_, number), pieces in zip(ids.items(), base_pieces(tokenizer, ids), strict=True):
            assert torch.allclose(rows[number - V], matrix.weight[pieces].mean(0), atol=1e-6)


def test_a_loaded_model_gets_the_same(base, files, expanded, tmp_path):
    dense = AutoModelForCausalLM.from_pretrained(base)
    model = expand_model(dense, plan(files, "el", "hu"), processing_class=AutoTokenizer.from_pretrained(base))
    model.save_pretrained(tmp_path / "saved")
    assert compare_checkpoints(expanded, tmp_path / "saved").same
    for file in (expanded / "vocabulary").rglob("*.json"):
        assert (tmp_path / "saved" / file.relative_to(expanded)).read_bytes() == file.read_bytes()
    loaded = AutoModelForCausalLM.from_pretrained(expanded)
    for one in (model, loaded):
        assert (
            one.tokenizer_of("el")(GREEK[0]).input_ids
            == AutoTokenizer.from_pretrained(expanded / "vocabulary/el")(GREEK[0]).input_ids
        )
    assert len(loaded.tokenizer_of("en")) == V
    with pytest.raises(ValueError, match="does not know 'fr'"):
        loaded.tokenizer_of("fr")
    with pytest.raises(InputError, match="pass it as processing_class"):
        expand_model(dense, plan(files, "el"))


def test_it_loads_and_saves_with_transformers_alone(expanded, tmp_path):
    program = (
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()\n"
        "ids = model.tokenizer_of('el')(sys.argv[3], return_tensors='pt').input_ids\n"
        "model.save_pretrained(sys.argv[2])\n"
        "print('found', int(ids.max()), float(model(ids, labels=ids, languages='el').loss))"
    )
    said = run_fresh(program, str(expanded), str(tmp_path / "again"), GREEK[0])
    last, loss = said.partition("found ")[2].split()[:2]
    assert int(last) >= V
    assert float(loss) < 20
    assert compare_checkpoints(expanded, tmp_path / "again").same
    assert (tmp_path / "again/vocabulary/el/tokenizer.json").is_file()


def test_bad_input_of_the_command_is_said_in_a_line(base, files, tmp_path):
    plan(files).save(tmp_path / "plan.json")
    (tmp_path / "empty.jsonl").write_text("")
    cases = [
        (["--vocabulary", f"en={files['en']}"], "en is an old language"),
        (["--vocabulary", f"fr={files['en']}"], "fr is not a new language"),
        (["--vocabulary", f"el={files['el']}", "--vocabulary-size", "9000"], "vocabulary.el: Language 'el': its text"),
        (["--vocabulary", f"el={tmp_path / 'none.jsonl'}"], "no such file"),
        (["--vocabulary", f"el={tmp_path / 'empty.jsonl'}"], "empty"),
        (["--vocabulary", "el"], "is not LANGUAGE=FILE"),
        (["--vocabulary-size", "20"], "belongs to --vocabulary"),
        (["--vocabulary", f"el={files['el']}", "--vocabulary-size", "0"], "must be at least 1"),
    ]
    for options, said in cases:
        result = CliRunner().invoke(
            cli.app, [*map(str, ["expand", base, tmp_path / "x", "--plan"]), str(tmp_path / "plan.json"), *options]
        )
        assert said in str(result.exception), (options, result.exception)
        assert not (tmp_path / "x").exists()


def test_the_command_gives_tokens_and_says_what_they_save(base, files, tmp_path):
    plan(files).save(tmp_path / "plan.json")
    options = ["--vocabulary", f"el={files['el']}", "--vocabulary-size", SIZE]
    said = invoke("expand", base, tmp_path / "out", "--plan", tmp_path / "plan.json", *options)
    assert f"el: {SIZE} tokens of its own" in said
    invoke("expand", base, tmp_path / "out", "--plan", tmp_path / "plan.json", *options, "--overwrite")
    said = invoke("inspect", tmp_path / "out")
    assert f"tokens of el        {SIZE} of its own" in said
    assert str(files["el"]) not in said
    assert str(files["el"]) not in (tmp_path / "out" / "config.json").read_text()
    said = invoke(
        "analyze", "fertility", tmp_path / "out", "--data", f"el={files['el']}", "--data", f"en={files['en']}"
    )
    assert "el, own tokens" in said
    assert "en, own tokens" not in said


def test_the_card_and_inspect_show_tokens_a_byte(expanded):
    card = make_card(expanded).text
    assert f"| tokens of el | {SIZE} of its own" in card
    assert 'tokenizer_of("el")' in card
    assert [*inspect_checkpoint(expanded).own_tokens] == ["el", "hu"]
    tokenizer = load_tokenizer(expanded, expanded)
    found = measure_fertility(tokenizer, {"el": GREEK, "en": ENGLISH}).languages
    assert found["el, own tokens"].per_byte < 0.6 * found["el"].per_byte
    assert "en, own tokens" not in found


# --- training ---------------------------------------------------------------------------------------------------------


def test_text_is_read_in_own_tokens_and_a_share_of_it_in_the_bases(expanded):
    tokenizer = load_tokenizer(expanded, expanded)
    texts = {code: Dataset.from_dict({"text": of * 5}) for code, of in (("en", ENGLISH), ("el", GREEK))}
    packed = pack_texts(texts, tokenizer, 16, seed=0)
    own = {code: tokenizer_for(tokenizer, code) for code in texts}
    assert own["en"] is tokenizer
    whole = {code: sum(len(tokenizer(text).input_ids) + 1 for text in of["text"]) for code, of in texts.items()}
    assert packed.tokens["en"] == whole["en"]
    mine = sum(len(own["el"](text).input_ids) + 1 for text in texts["el"]["text"])
    assert mine < packed.tokens["el"] < mine + 3 * whole["el"] / WITH_BASE
    ids = {language: set() for language in (0, 1)}
    for row in packed.dataset:
        for token, language in zip(row["input_ids"], row["language_ids"], strict=True):
            ids[language].add(token)
    assert max(ids[0]) < V <= max(ids[1])


def test_text_that_streams_is_read_so_too(expanded, files):
    tokenizer = load_tokenizer(expanded, expanded)
    texts = {code: LanguageText(code, str(files[code])) for code in ("en", "el")}
    stream = TextStream(texts, tokenizer, 16, 0, ["en", "el"])
    stream.begin(LanguageMix([1, 1]), 2)
    own = tokenizer_for(tokenizer, "el")
    whole = {tuple(own(text).input_ids) for text in GREEK} | {tuple(tokenizer(text).input_ids) for text in GREEK}
    ids = {0: [], 1: []}
    for batch in islice(stream, 60):
        for row, language in zip(batch["input_ids"].tolist(), batch["language_ids"].tolist(), strict=True):
            ids[language[0]] += row
    assert max(ids[0]) < V <= max(ids[1])
    read = [tuple(document) for end, document in groupby(ids[1], tokenizer.eos_token_id.__eq__) if not end]
    assert {*read[1:-1]} <= whole
    with_base = [max(document) < V for document in read[1:-1]]
    assert sum(with_base) / len(with_base) == pytest.approx(1 / WITH_BASE, abs=0.1)


@pytest.mark.parametrize("exclusive", [True, False])
def test_stage_1_trains_the_rows_and_leaves_the_base(base, files, exclusive, tmp_path):
    expand_checkpoint(base, tmp_path / "0", plan(files, "el", "hu", exclusive=exclusive))
    data = {code: LanguageText(code, str(files[code])) for code in ("el", "hu", "en")}
    stage = PostPretrainConfig(max_steps=3, block_size=32, learning_rate=1e-2, replay=True, warmup_steps=0)
    train_stage(tmp_path / "0", tmp_path / "1", data, stage)
    changed = compare_checkpoints(tmp_path / "0", tmp_path / "1").changed
    assert {"vocabulary.embedding.weight", "vocabulary.head.weight"} <= {*changed}
    assert all(".experts.1." in name or "router" in name or name.startswith("vocabulary") for name in changed)
    check_frozen(tmp_path / "0", tmp_path / "1", "post-pretrain")
    assert (tmp_path / "1/vocabulary/el/tokenizer.json").read_bytes() == (
        tmp_path / "0/vocabulary/el/tokenizer.json"
    ).read_bytes()


def test_a_trainer_knows_the_models_own_tokenizers(base, files, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = expand_model(
        AutoModelForCausalLM.from_pretrained(base), plan(files, "el", new=["el"]), processing_class=tokenizer
    )
    config = PostPretrainConfig(
        str(tmp_path), max_steps=2, block_size=32, validation={"texts": {"el": str(files["el"])}}
    )
    rows = Dataset.from_dict({"text": GREEK})
    trainer = PostPretrainTrainer(model, config, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
    assert max(max(row["input_ids"]) for row in trainer.packed.dataset) >= V
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 10


def test_told_and_untold_scores_are_of_the_same_bytes(expanded):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(expanded), load_tokenizer(expanded, expanded)
    for most in (None, 100):
        untold = evaluate_model(model, tokenizer, {"el": GREEK}, 32, max_tokens=most)["el"]
        told = evaluate_model(model, tokenizer, {"el": GREEK}, 32, max_tokens=most, told=True)["el"]
        assert told.bytes == untold.bytes
        assert told.tokens < untold.tokens


# --- asking -----------------------------------------------------------------------------------------------------------


def test_prompts_are_read_and_answers_written_in_own_tokens(expanded):
    asked = ChatModel.load(expanded)
    seen = []
    generate = asked.model.generate
    asked.model.generate = lambda **given: seen.append(given["input_ids"]) or generate(**given)
    how = Answering(max_new_tokens=8)
    for language in ("el", "en", None):
        asked.answer(GREEK[0][:20], how, language)
    assert seen[0].max() >= V > max(seen[1].max(), seen[2].max())
    asked.model.generate = lambda input_ids, **_: torch.cat([input_ids, torch.tensor([[V, V + SIZE, 5]])], 1)
    own = tokenizer_for(asked.tokenizer, "el")
    assert asked.answer("a", how, "en").text == own.decode([V, V + SIZE, 5])
    inside = asked.base_inside()
    inside.model.generate = generate
    assert inside.answer(GREEK[0][:20], how, "el").text


def test_a_prompt_that_nobody_told_is_read_in_the_tokens_that_the_gate_decides(files, base, tmp_path):
    expand_checkpoint(base, tmp_path / "model", plan(files, "el", new=["el"]))
    model = gated_model("llama", exclusive=True, fields={"vocabularies": {"el": SIZE}})
    asked = ChatModel(model, load_tokenizer(tmp_path / "model", tmp_path / "model"), "model")
    seen, generate = [], model.generate
    model.generate = lambda **given: seen.append(given["input_ids"].max()) or generate(**given)
    for number in (0, 1):
        all_go_to(model, number)
        asked.answer(GREEK[0][:20], Answering(max_new_tokens=4))
    assert seen[0] < V <= seen[1]


def test_too_long_a_prompt_is_said_before_its_language_is_judged(files, tmp_path):
    """Positions that are learned end before it."""
    expand_checkpoint(save_dense(tmp_path / "base", "gpt2"), tmp_path / "model", plan(files, "el", new=["el"]))
    tokenizer = load_tokenizer(tmp_path / "model", tmp_path / "model")
    for one in (tokenizer, tokenizer_for(tokenizer, "el")):
        one.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    asked = ChatModel(gated_model("gpt2", exclusive=True, fields={"vocabularies": {"el": SIZE}}), tokenizer, "model")
    for chat in (False, True):
        with pytest.raises(InputError, match="the prompt has 3,000 tokens, but the model takes"):
            asked.answer("x" * 3000, Answering(chat=chat))


@pytest.mark.parametrize("kind", [{}, {"expert_kind": "adapter", "lora_rank": 2, "lora_alpha": 2}])
def test_a_prompt_in_the_bases_tokens_that_nobody_told_is_answered_in_these(kind, files, base, tmp_path):
    expand_checkpoint(base, tmp_path / "model", plan(files, "el", new=["el"]), **kind)
    config = LayerMoEConfig.from_pretrained(tmp_path / "model")
    config.language_gate = {"layer": 1, "languages": [["en"], ["el"]], "window": 5, "bound": 2.0}
    model = LayerMoEForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        for rows in model.vocabulary.parameters():
            rows.mul_(10)
    all_go_to(model, 1)
    ids = torch.randint(0, 250, (3, 9), generator=torch.Generator().manual_seed(0))
    own = torch.cat([ids[:, :-1], torch.full((3, 1), V + 3)], 1)
    answers = [model.generate(prompt, **GREEDY)[:, 9:] for prompt in (ids, own)]
    told = model.generate(ids, languages=["en", "el", None], **GREEDY)[:, 9:]
    assert answers[0].max() < V <= answers[1].max()
    assert told[[0, 2]].max() < V <= told[1].max()
    for code in ("en", "el"):  # one language for all
        of_all = model.generate(ids, languages=code, **GREEDY)
        assert torch.equal(of_all, model.generate(ids, languages=[code] * 3, **GREEDY))


def test_scores_of_an_answer_and_prompt_lookup_know_the_own_tokens(expanded):
    model = AutoModelForCausalLM.from_pretrained(expanded).eval()
    for rows in model.vocabulary.parameters():
        rows.data.mul_(10)
    ids = torch.tensor([[V + 1, 5, V + 2, V + 1, 5]])
    options = {"languages": "el", "max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, num_beams=3, return_dict_in_generate=True, output_scores=True, **options)
    scores = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    assert scores.sum().item() == pytest.approx(6 * out.sequences_scores.item(), abs=1e-3)
    plain = model.generate(ids, **options)
    assert plain[:, 5:].max() >= V
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=2, **options), plain)


def test_logits_of_chosen_places_are_refused(expanded):
    model = AutoModelForCausalLM.from_pretrained(expanded)
    with pytest.raises(ValueError, match=r"logits_to_keep: .* give a number of last tokens, not indices"):
        model(torch.tensor([[1, 2, 3]]), logits_to_keep=torch.tensor([0, 2]))
    assert model(torch.tensor([[1, 2, 3]]), logits_to_keep=2).logits.shape[1] == 2


def test_tokenizers_are_found_where_the_model_was_loaded(expanded, tmp_path):
    shutil.copytree(expanded, tmp_path / "outer" / "inner")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "outer", subfolder="inner", revision="main")
    assert len(model.tokenizer_of("el")) == model.config.num_tokens
    with patch.object(AutoTokenizer, "from_pretrained") as asked:
        model.tokenizer_of("hu")
    assert asked.call_args.kwargs["revision"] == "main"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "outer", subfolder="inner")
    model.hub_options["token"] = "hf_secret"
    assert b"hf_secret" not in pickle.dumps(model)
    shutil.rmtree(tmp_path / "outer")
    with pytest.raises(OSError, match="outer"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_inspection_counts_the_rows_as_added(base, expanded):
    found = inspect_checkpoint(expanded)
    assert found.base == AutoModelForCausalLM.from_pretrained(base).num_parameters()


def test_scores_are_compared_with_the_first_models_own(expanded, base, tmp_path):
    settings = EvaluationSettings(block_size=32, batch_size=4, max_tokens=100)
    sources = {"el": LanguageText("el", str(write_texts(tmp_path / "el.jsonl", GREEK)))}
    for names in (["model", "dense"], ["dense", "model"]):
        models = {name: (str({"model": expanded, "dense": base}[name]), None) for name in names}
        found = list(score_models(models, sources, [["en"], ["el"]], settings).models)
        assert [found[0], found[-1]] == names


@pytest.mark.filterwarnings(r"ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_trls_trainer_refuses_a_languages_own_tokenizer(expanded, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(expanded)
    given = {"train_dataset": Dataset.from_dict({"text": GREEK}), "args": SFTConfig(str(tmp_path), use_cpu=True)}
    with pytest.raises(InputError, match="own tokenizer, whose further tokens TRL's loss leaves out"):
        MoESFTTrainer(model, processing_class=model.tokenizer_of("el"), **given)
    # No batch has such tokens: rows that trained without a gradient would stop several ranks.
    assert not any(
        p.requires_grad
        for p in MoESFTTrainer(model, processing_class=byte_tokenizer(), **given).model.vocabulary.parameters()
    )


# --- surgery ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", ["llama", "qwen2", "gpt2", "gptj"])
@pytest.mark.parametrize("code", ["el", "hu"])
@torch.no_grad()
def test_a_language_is_exported_with_its_tokens(backbone, code, files, tmp_path):
    dense = save_dense(tmp_path / "dense", backbone)
    expand_checkpoint(dense, tmp_path / "model", plan(files, "el", "hu"))
    export_dense(tmp_path / "model", tmp_path / "out", language=code)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model, own = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("out", "model"))
    text = {"el": GREEK, "hu": HUNGARIAN}[code][0]
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids.tolist() == [own.tokenizer_of(code)(text).input_ids]
    assert ids.max() >= V
    assert torch.allclose(model(ids).logits, own(ids, languages=code).logits, atol=1e-5)
    assert model.config.vocab_size == own.config.num_tokens == model.get_input_embeddings().weight.shape[0]
    export_dense(tmp_path / "model", tmp_path / "en", language="en")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "en").config.vocab_size == V


def test_what_is_not_made_of_them_in_this_version_is_refused_with_what_to_do(base, files, expanded, tmp_path):
    out, more = tmp_path / "out", Plan("moe-lpr", [3, 3, 3], new=["tr"], grows_from=[2, 2, 2], exclusive=True)
    attempts = [
        lambda: grow_checkpoint(expanded, out, more),
        lambda: join_expansions([expanded, expanded], out),
        lambda: graft_delta(expanded, out, base, base),
    ]
    for attempt in attempts:
        with pytest.raises(InputError, match=r"el, hu has tokens of its own.* --without-vocabulary"):
            attempt()
    expand_checkpoint(base, tmp_path / "routed", plan(files, "el", exclusive=False))
    with pytest.raises(InputError, match="export --language"):
        export_dense(tmp_path / "routed", out)
    assert not out.exists()


def test_shrink_takes_them_out(base, files, expanded, tmp_path):
    invoke("shrink", expanded, tmp_path / "out", "--without-vocabulary")
    expand_checkpoint(base, tmp_path / "never", plan(files))
    assert compare_checkpoints(tmp_path / "never", tmp_path / "out").same
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "never"))
    for config in (ours, theirs):
        del config["expansions"][0]["parameters"]
    assert ours == theirs
    assert not (tmp_path / "out" / "vocabulary").exists()
    with pytest.raises(InputError, match="no language has tokens"):
        leave_out_vocabulary(tmp_path / "out", tmp_path / "again")
    with pytest.raises(InputError, match="Give one of"):
        invoke("shrink", expanded, tmp_path / "x", "--without-vocabulary", "--to", "1")


def test_averages_leave_the_rows_of_one_and_refuse_other_tokens(base, files, expanded, tmp_path):
    average_experts(expanded, tmp_path / "half", 0.5)
    assert compare_checkpoints(expanded, tmp_path / "half").same  # copies of expert 0 still
    average_checkpoints([expanded, expanded], tmp_path / "mean")
    assert compare_checkpoints(expanded, tmp_path / "mean").same
    assert (tmp_path / "mean/vocabulary/el").is_dir()
    swapped = {"el": files["hu"], "hu": files["el"]}
    expand_checkpoint(base, tmp_path / "other", plan({**files, **swapped}, "el", "hu"))
    with pytest.raises(InputError, match=r"own tokens of el are others|vocabularies is"):
        average_checkpoints([expanded, tmp_path / "other"], tmp_path / "x")


def test_an_expansion_alone_holds_them(base, expanded, tmp_path):
    save_expansion(expanded, tmp_path / "only", base)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "only", base_model=base)
    assert torch.equal(
        model.vocabulary.embedding.weight, CheckpointReader(expanded).tensor("vocabulary.embedding.weight")
    )
    assert (
        model.tokenizer_of("el")(GREEK[0]).input_ids
        == AutoTokenizer.from_pretrained(expanded / "vocabulary/el")(GREEK[0]).input_ids
    )


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda folder: (folder / "vocabulary/el/tokenizer.json").write_text("{"), "vocabulary/el"),
        (lambda folder: (folder / "vocabulary/el/tokenizer.json").unlink(), "vocabulary/el"),
        (lambda folder: byte_tokenizer().save_pretrained(folder / "vocabulary/el"), None),
    ],
)
def test_a_broken_tokenizer_is_named(expanded, break_it, said, tmp_path):
    invoke("merge", "average", expanded, "--out", tmp_path / "copy")
    break_it(tmp_path / "copy")
    if said is None:
        load_tokenizer(tmp_path / "copy", "MODEL")
        return
    with pytest.raises(InputError, match=said):
        load_tokenizer(tmp_path / "copy", "MODEL")


# --- a run ------------------------------------------------------------------------------------------------------------


def recipe(base, files, output, **changes):
    given = {
        "base": str(base), "output": str(output), "old": {"en": str(files["en"])}, "new": {"el": str(files["el"])},
        "test": {code: str(files[f"{code} test"]) for code in ("en", "el")}, "vocabulary": {"size": SIZE},
        "plan": {"method": "moe-lpr", "experts": 2, "exclusive": True},
        "post_pretrain": keywords(PostPretrainConfig, max_steps=2, block_size=32),
        "evaluation": {"block_size": 32}, **changes,
    }  # fmt: skip
    return Recipe(**given)


def test_a_recipe_gives_them_and_scores_both_ways(base, files, tmp_path):
    final = run_recipe(recipe(base, files, tmp_path / "run"))
    found = json.loads((tmp_path / "run/evaluation.json").read_text())["models"]
    names = [*found]
    assert names[-1].endswith("post-pretrained")
    assert names[-2] == f"{names[-1]}, told"
    assert [*found[names[-2]]] == ["el"]
    assert found[names[-2]]["el"]["bytes"] == found[names[-1]]["el"]["bytes"]
    assert json.loads((final / "config.json").read_text())["vocabularies"] == {"el": SIZE}
    assert str(files["el"]) not in (tmp_path / "run/plan.json").read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"graft": {"instruct": "x"}}, "not grafted"),
        ({"plan": {"method": "dmoe", "groups": 2}}, "no language of a DMoE can be told"),
        ({"vocabulary": {"size": 0}}, "size is 0"),
        ({"vocabulary": {"sise": 3}}, "unknown key"),
    ],
)
def test_recipes_that_cannot_give_them_are_refused(base, files, changes, said, tmp_path):
    if "dmoe" in str(changes):
        changes |= {"post_pretrain": keywords(PostPretrainConfig)}
    with pytest.raises(InputError, match=said):
        recipe(base, files, tmp_path, **changes)


def test_tied_bases_have_one_matrix(files, tmp_path):
    dense = tiny_dense("llama", tie_word_embeddings=True)
    model = expand_model(dense, plan(files, "el"), processing_class=byte_tokenizer())
    assert [key for key in model.state_dict() if key.startswith("vocabulary")] == ["vocabulary.embedding.weight"]


def test_added_tokens_keep_their_numbers(files, tmp_path):
    tokenizer = bpe_tokenizer("qwen2")  # whose end-of-text token stands beside the model's vocabulary
    model = expand_model(tiny_dense("llama"), plan(files, "el"), processing_class=tokenizer)
    own = model.tokenizer_of("el")
    assert own.get_vocab().items() >= tokenizer.get_vocab().items()
    assert own("al<end>al").input_ids == tokenizer("al<end>al").input_ids == [255, 256, 255]
