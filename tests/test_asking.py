"""Models that are asked, beside their base: the template, equal answers; and text that the base writes as old text."""

import json
import shutil
from collections import Counter

import pytest
import torch
from conftest import CHAT, byte_tokenizer, invoke, load, move, refused, save_dense, write_texts
from gated_models import gated_model
from typer.testing import CliRunner

from hf_moe_expand import Plan, cli, expand_checkpoint, run_recipe
from hf_moe_expand.checkpoint.records import History
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.evaluation import chat, report
from hf_moe_expand.evaluation.chat import QUESTIONS, ChatCheck, begin_samples, check_chat, continue_samples
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.hub.card import make_card
from hf_moe_expand.inference.asking import Answering, ChatModel
from hf_moe_expand.inference.models import load_for_inference
from hf_moe_expand.inference.sampling import write_documents, writer_of
from hf_moe_expand.inference.writing import SampleSettings
from hf_moe_expand.report.inspection import inspect_checkpoint
from hf_moe_expand.report.page import make_page
from hf_moe_expand.runs.recipe import Recipe

SHORT = Answering(max_new_tokens=6)
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 256}


@pytest.fixture(scope="module")
def home(base, tmp_path_factory):
    """A base without a chat template and one with it; expansions: `el` of the former, `same` of the latter, and `other`
    like `same`, whose new experts changed; text."""
    home = tmp_path_factory.mktemp("asking")
    shutil.copytree(base, home / "plain")
    shutil.copytree(base, home / "base")
    byte_tokenizer(CHAT).save_pretrained(home / "base")
    expand_checkpoint(base, home / "el", Plan("layer-moe", [3, 1, 2], [2], old=["en"], new=["el"]))
    move(home / "el", seed=0)
    expand_checkpoint(home / "base", home / "same", Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"]))
    move(home / "same", home / "other", seed=3)
    write_texts(home / "el.jsonl", [f"η γάτα {number} κάθεται" for number in range(30)])
    write_texts(home / "en.jsonl", [f"the cat sat {number} the cat sat" for number in range(30)])
    return home


@pytest.fixture(scope="module")
def loaded(home):
    return load_for_inference(home / "base")


def generated(folder, text, **options):
    inputs = byte_tokenizer()(text, return_tensors="pt", return_token_type_ids=False)
    written = load(folder).generate(**inputs, **GREEDY, **options)
    return byte_tokenizer().decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_answers_are_those_of_generate(base, home):
    asked = ChatModel.load(home / "el")
    assert asked.answer("the cat", SHORT) == generated(home / "el", "the cat")
    said = asked.answer("the cat", SHORT, "en")
    assert said == generated(home / "el", "the cat", languages="en") == generated(base, "the cat")
    assert said != asked.answer("the cat", SHORT, "el")
    assert asked.base_inside().answer("the cat", SHORT) == said


def test_a_chat_is_judged_by_its_newest_message_alone_in_the_template():
    model, tokenizer = gated_model(exclusive=True, max_position_embeddings=512), byte_tokenizer(CHAT)
    asked, differing = ChatModel(model, tokenizer, "gated"), 0

    def ids(messages):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]

    for number in range(24):
        newest = "".join(chr(33 + (7 * number * n + number) % 90) for n in range(20))
        messages = [{"role": "user", "content": "One."}, {"role": "assistant", "content": "Two."}]
        messages += [{"role": "user", "content": newest}]
        prompt = ids(messages)
        written = [model.generate(prompt, languages=code, **GREEDY)[0, prompt.shape[1] :] for code in ("en", "el")]
        told = [tokenizer.decode(one, skip_special_tokens=True) for one in written]
        judged = int(model.judge(ids(messages[-1:])))
        assert asked.reply(messages, SHORT) == told[judged]
        differing += told[judged] != told[int(model.judge(prompt))]
    assert differing


def test_the_checkpoints_own_generation_settings_do_not_count(home):
    """But for the tokens that end a text; beams could not stream."""
    asked = ChatModel.load(home / "el")
    plain = asked.answer("the cat", SHORT)
    asked.model.generation_config.update(repetition_penalty=9.0, num_beams=3, min_new_tokens=2)
    assert asked.answer("the cat", SHORT) == plain
    asked.model.generation_config.eos_token_id = byte_tokenizer()(plain[0]).input_ids[0]
    assert asked.answer("the cat", SHORT) == plain[0]


def test_the_template_wraps_the_conversation_and_drawn_answers_depend_on_the_seed_alone(home):
    chat = ChatModel.load(home / "other")
    talk = [{"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yes"), ("user", "so"))]
    said = chat.reply(talk, Answering(max_new_tokens=6, system="be brief"))
    assert said == chat.answer("<s>be brief<u>hi<a>yes<u>so<a>", SHORT)
    assert chat.reply(talk[:1], SHORT) == chat.answer("<u>hi<a>", SHORT)
    one, same, other = (Answering(max_new_tokens=12, temperature=1.0, top_p=0.9, seed=seed) for seed in (3, 3, 4))
    assert chat.answer("a", one) == chat.answer("a", same) != chat.answer("a", other)


def test_what_cannot_be_asked_is_refused(base, home, tmp_path):
    asked = ChatModel.load(home / "el")
    talk = [{"role": "user", "content": "hi"}]
    refused(asked.reply, talk, SHORT, says="has no chat template, so it cannot chat")
    refused(asked.answer, "hi", SHORT, "xx", says="does not know 'xx'; it knows en, el")
    refused(asked.answer, "x" * 64, SHORT, says="takes 64 positions")
    refused(asked.answer, "hi", Answering(system="be brief"), says="A system message belongs to a chat")
    refused(asked.answer, "", SHORT, says="The prompt is empty")
    refused(ChatModel.load(base).base_inside, says="is a dense model, which has no base inside")
    expand_checkpoint(base, tmp_path / "dmoe", Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]]))
    refused(ChatModel.load(tmp_path / "dmoe").base_inside, says="its base is not inside")


def chatted(*command, **given):
    return CliRunner().invoke(cli.app, ["chat", *map(str, command)], **given)


def test_a_prompt_is_answered_once_beside_the_base_inside(base, home):
    short = ("--max-new-tokens", 6)
    plain = ChatModel.load(base).answer("the cat", SHORT)  # no template: it goes on from the prompt
    found = chatted(home / "el", "--prompt", "the cat", "--languages", "en", "--base", "inside", *short)
    assert found.stdout == f"el:\n{plain}\nel: base inside:\n{plain}\n"
    chat = ChatModel.load(home / "other")
    for more, prompt in (((), "<u>hi<a>"), (("--plain",), "hi")):
        said = chatted(home / "other", "--prompt", "hi", *more, *short).stdout
        assert said.strip() == chat.answer(prompt, SHORT).strip()
    refused(invoke, "chat", home / "other", "--plain", says="--plain belongs to --prompt")


def test_chat_on_the_command_line(home):
    lines = "hi\nand\n/new\nhi\n/languages en\n/new\nhi\n/exit\nnever\n"
    said = chatted(home / "other", "--base", "inside", "--max-new-tokens", 4, "--languages", "el", input=lines).stdout
    assert "never" not in said
    turns = said.split("> hi\n")[1:]
    assert len(turns) == 3
    assert turns[0].split("> and")[0] == turns[1].split("> /languages")[0]
    replies = turns[2].split("> /exit")[0].split("other: base inside:\n")
    assert replies[0].removeprefix("other:\n") == replies[1]  # in an old language


def test_what_cannot_be_sent_is_said(home, tmp_path):
    found = chatted(home / "other", input=b"hi\ncaf\xe9\nmore\n")
    assert isinstance(found.exception, InputError)
    assert str(found.exception).startswith("The input: 'utf-8' codec can't decode byte 0xe9")
    # A language that no model knows is refused before one is loaded.
    (tmp_path / "el").mkdir()
    shutil.copy(home / "el" / "config.json", tmp_path / "el")
    for models in ([tmp_path / "el"], [home / "el", "--base", tmp_path / "el"]):
        refused(invoke, "chat", *models, "--prompt", "a", "--languages", "de", says=r"el: .*'de'")
    dense = save_dense(tmp_path / "dense")
    refused(invoke, "chat", dense, "--prompt", "a", "--languages", "de", says="dense: is a dense model, which knows no")
    (dense / "generation_config.json").write_text('{"eos_token_id": "x"}')
    refused(invoke, "chat", dense, "--prompt", "a", says="eos_token_id is 'x': must be a token's number")


def test_an_unknown_command_is_not_sent(home):
    for line, is_sent in (("/foo", False), ("/help me", False), ("/etc/x ?", True)):
        found = chatted(home / "other", "--max-new-tokens", 2, input=f"{line}\n")
        assert ("unknown command; known: /new, /languages el, /exit." in found.stderr) != is_sent
        assert (found.stdout == f"> {line}\n> \n") != is_sent
        assert found.exit_code == 0


ASKED = ["What is water?", "Who are you?"]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(chat, "_TOKENS", 6)


def test_a_model_answers_as_its_base_before_training_and_told_its_language(home):
    base, same, other = (str(home / name) for name in ("base", "same", "other"))
    found = check_chat(base, same, "en", ASKED)
    assert found.base == found.result == found.told
    assert found.equal == 1.0
    found = check_chat(base, other, "en", ASKED)
    assert found.told == found.base != found.result
    assert found.equal == sum(a == b for a, b in zip(found.base, found.result, strict=True)) / 2 < 1
    assert check_chat(base, base, "en", ASKED).told is None
    assert check_chat(base, other, "de", ASKED).told is None


def test_a_base_without_a_template_cannot_be_asked(home, tmp_path, monkeypatch):
    assert check_chat(str(home / "plain"), str(home / "other"), "en", ASKED) is None
    assert check_chat(str(home / "base"), str(home / "plain"), "en", ASKED) is None
    monkeypatch.setattr(report, "score_models", None)  # nothing is scored
    command = ("evaluate", home / "plain", home / "other", "--questions", "en", "--out", tmp_path / "e.json")
    refused(invoke, *command, says="has no chat template")


def test_scores_are_kept_where_a_question_fails(home, tmp_path):
    asked = write_texts(tmp_path / "asked.jsonl", ["long " * 400])
    command = ("evaluate", home / "base", home / "other", "--data", f"en={home / 'en.jsonl'}", "--questions")
    refused(invoke, *command, f"en={asked}", "--block-size", 32, "--out", tmp_path / "e.json", says="the prompt has")
    assert Evaluation.from_json(tmp_path / "e.json").models["base"]["en"].bits_per_byte > 0


def test_evaluate_asks_from_a_file_or_the_ten_of_ours(home, tmp_path):
    out, asked = tmp_path / "e.json", write_texts(tmp_path / "asked.jsonl", ASKED)
    said = invoke("evaluate", home / "base", home / "other", "--questions", f"en={asked}", "--out", out)
    kept = json.loads(out.read_text())
    assert kept["chats"][0]["questions"] == ASKED
    assert kept["equal_answers"] == {"en": Evaluation.from_json(out).chats[0].equal}
    assert ASKED[1] in said
    assert "chat in en: 0% of the answers are the base's own" in said
    invoke("evaluate", home / "base", home / "same", "--questions", "en", "--out", out, "--overwrite")
    assert Evaluation.from_json(out).chats[0].questions == list(QUESTIONS["en"])
    assert json.loads(out.read_text())["equal_answers"] == {"en": 1.0}
    for models, code, said in ((["base", "same"], "fr", "questions in en"), (["base"], "en", "give the base")):
        command = ("evaluate", *[home / name for name in models], "--questions", code, "--out", tmp_path / "f")
        refused(invoke, *command, says=said)


def texts(loaded, documents=6, tokens=12, **options):
    settings = SampleSettings(documents=documents, tokens=tokens, **options)
    return [row["text"] for row in write_documents(*loaded, settings)]


def test_as_many_documents_as_asked_for_and_the_same_with_the_same_seed(loaded, home):
    found = texts(loaded, batch_size=4)
    assert len(found) == 6
    assert all(text.strip() for text in found)
    assert found == texts(loaded, batch_size=4) != texts(loaded, batch_size=4, seed=1)
    assert texts(load_for_inference(home / "other")) == texts(loaded)  # the base inside writes
    # Prompts are taken in turn, and begin the documents.
    rows = list(write_documents(*loaded, SampleSettings(documents=7, tokens=8, prompts=["The city", "In 1990"])))
    assert Counter(row["prompt"] for row in rows) == {"The city": 4, "In 1990": 3}
    assert all(row["text"].startswith(row["prompt"]) for row in rows)


def test_first_tokens_follow_the_models_distribution(loaded):
    """Of many documents of one token, each byte comes as often as the model says, words that are none aside."""
    model, tokenizer = loaded
    with torch.no_grad():
        logits = model(torch.tensor([[tokenizer.eos_token_id]])).logits[0, -1]
    spoken = [i for i in range(256) if tokenizer.decode([i]).strip()]
    ascii_ids = [i for i in spoken if tokenizer(tokenizer.decode([i])).input_ids == [i]]
    for temperature in (1.0, 0.3):
        scores = (logits / temperature).softmax(-1)
        counted = Counter(texts(loaded, documents=2000, tokens=1, batch_size=500, temperature=temperature))
        for i in sorted(ascii_ids, key=lambda i: -scores[i])[:5]:
            p = float(scores[i] / scores[spoken].sum())
            spread = 5 * (p * (1 - p) / 2000) ** 0.5
            assert counted[tokenizer.decode([i])] / 2000 == pytest.approx(p, abs=spread)
    assert {*texts(loaded, tokens=1, top_p=1e-6)} == {tokenizer.decode(logits.argmax())}


def test_the_file_says_where_it_comes_from(home, tmp_path):
    out = tmp_path / "en.jsonl"
    options = ("--language", "en", "--documents", "8", "--tokens", "20", "--seed", "3", "--temperature", "0.9")
    said = invoke("sample", home / "base", *options, "--prompt", "a b", "--out", out)
    assert f"wrote {out}: 8 documents" in said
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    made = {(row["language"], row["written_by"], row["seed"], row["temperature"]) for row in rows}
    assert made == {("en", "base", 3, 0.9)}
    assert rows[0]["versions"].keys() == {"hf_moe_expand", "transformers", "torch"}


def test_a_recipe_keeps_what_the_base_writes(home, tmp_path):
    out, run = tmp_path / "und.jsonl", tmp_path / "run"
    invoke("sample", home / "base", "--documents", "12", "--tokens", "40", "--out", out)
    training = {"block_size": 32, "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    held_out = {code: str(write_texts(tmp_path / f"{code}.jsonl", ["η γάτα"] * 60)) for code in ("en", "el")}
    recipe = Recipe(
        base=str(home / "base"), output=str(run), old={"und": str(out)}, new={"el": str(home / "el.jsonl")},
        test=held_out, plan={"method": "moe-lpr", "experts": 2}, post_pretrain=training,
        review={"distillation_coef": 1.0, **training},
    )  # fmt: skip
    final = run_recipe(recipe, lambda line: None)
    history = History.of(json.loads((final / "config.json").read_text("utf-8")))
    review = history.last.stages[-1]
    assert (history.last.old_languages, history.classes) == (["und"], {"und": 0, "el": 1})
    assert (review.documents["und"], review.written_by) == (12, {"und": "base"})
    assert history.last.stages[0].written_by is None
    # Reports name it, and no language `und` among the scores or in the card's metadata.
    said, card = "12 documents of und that base wrote", make_card(final)
    assert all(said in text for text in ("\n".join(inspect_checkpoint(final).lines()), str(card), make_page(run)))
    assert card.data.language == ["el"]
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert (evaluation["old"], evaluation["new"]) == (["en"], ["el"])


def test_text_counts_as_written_only_if_a_model_wrote_every_row_of_it(tmp_path):
    own, other = '{"text": "a", "written_by": "base"}\n', '{"text": "a", "written_by": "another"}\n'
    files = {
        "own": own * 2, "two": own + other, "mixed": own + '{"text": "b"}', "plain": '{"text": "b"}\n' + own,
        "odd": '{"text": "a", "written_by": ["base"]}', "no-rows": own + "[1]", "torn": own + "{",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / f"{name}.jsonl").write_text(content)
    found = [writer_of(LanguageText("en", str(tmp_path / f"{name}.jsonl"))) for name in (*files, "missing")]
    assert found == ["base", *[None] * 7]
    (tmp_path / "lines.txt").write_text("a\n", "utf-8")
    for source in (str(tmp_path / "lines.txt"), "hub:some/dataset"):
        assert writer_of(LanguageText("en", source)) is None


def test_refusals(loaded, monkeypatch):
    said = "tokens is 64, and a prompt has up to 1, but the model takes 64 positions: lower tokens"
    refused(texts, loaded, tokens=64, says=said)
    ends = lambda input_ids, **_: torch.cat([input_ids, torch.full_like(input_ids[:, :1], 256)], 1)  # noqa: E731
    monkeypatch.setattr(loaded[0], "generate", ends)
    refused(texts, loaded, says="The model writes nothing but ends of text")


def test_a_base_that_was_trained_neither_writes_nor_teaches(home, tmp_path):
    config = {"block_size": 16, "everything": True, "max_steps": 1, "per_device_train_batch_size": 2}
    (tmp_path / "all.json").write_text(json.dumps(config))
    text = ("--data", f"el={home / 'el.jsonl'}")
    invoke("train", "post-pretrain", home / "other", tmp_path / "all", *text, "--config", tmp_path / "all.json")
    said = "is not the base any more, since `everything` trained it: give the base"
    refused(texts, load_for_inference(tmp_path / "all"), says=said)
    (tmp_path / "review.json").write_text(json.dumps({"block_size": 16, "distillation_coef": 1.0}))
    text = (*text, "--data", f"en={home / 'en.jsonl'}", "--config", tmp_path / "review.json")
    refused(invoke, "train", "review", tmp_path / "all", tmp_path / "out", *text, says="distillation_coef: expert 0")


def test_an_evaluation_keeps_what_each_decoder_writes(tmp_path):
    for code, text in (("en", "A short text. "), ("el", "Ένα κείμενο. ")):
        write_texts(tmp_path / f"{code}.jsonl", [text * 6])
    models = [save_dense(tmp_path / "one"), save_dense(tmp_path / "two", seed=1)]
    data = [f"--data={code}={tmp_path / code}.jsonl" for code in ("en", "el")]
    invoke("evaluate", *models, *data, "--old", "en", "--new", "el", "--out", tmp_path / "e.json")
    samples = {sample["language"]: sample for sample in json.loads((tmp_path / "e.json").read_text())["samples"]}
    assert list(samples) == ["en", "el"]
    prompt = samples["en"]["prompt"]
    assert prompt == "A short text. A short text. A short"
    expected = {m.name: ChatModel.load(m).answer(prompt, Answering(max_new_tokens=24)).split() for m in models}
    assert {name: text.split() for name, text in samples["en"]["continued"].items()} == expected
    header, rows = Evaluation.from_json(tmp_path / "e.json").sample_rows()
    assert header == ["language", "held-out text begins", "one", "two"]
    assert rows[0] == ["en", prompt, *samples["en"]["continued"].values()]


def test_the_first_language_of_each_group_with_text_begins_a_sample(base):
    german = "eins zwei drei vier fünf sechs sieben acht"
    texts = {"de": [german], "el": ["  ένα\nδύο "], "hu": ["egy"], "zh": ["字" * 90]}
    found = begin_samples(texts, (["en", "de"], ["el", "hu"]))
    first = [("de", german.removesuffix(" acht")), ("el", "ένα δύο")]
    assert [(sample.language, sample.prompt) for sample in found] == first
    chinese = begin_samples(texts, ([], ["zh"]))
    assert [sample.prompt for sample in chinese] == ["字" * 40]
    assert begin_samples({"en": [" "], "el": []}, (["en"], ["el"])) == []
    continue_samples(chinese, ChatModel.load(base))  # 120 bytes, each a token; the model takes 64
    assert chinese[0].continued == {}


def test_the_page_shows_the_answers_side_by_side(tmp_path):
    (tmp_path / "run").mkdir()
    check = ChatCheck("en", ["Who?", "What?"], ["I.", "<b>it</b>"], ["I.", "that"], ["I.", "<b>it</b>"])
    Evaluation(["en"], ["el"], chats=[check]).to_json(tmp_path / "run" / "evaluation.json")
    page = make_page(tmp_path / "run")
    assert "In en, 50 % of the result’s answers are the base’s own" in page
    assert '<th scope="col">told en</th>' in page
    assert "<td>&lt;b&gt;it&lt;/b&gt;</td>" in page
    assert "<b>it</b>" not in page
