"""Languages as modules of their own: fine-tunes of one base in one model, against each fine-tune and the base alone."""

import copy
import json

import pytest
import torch
from conftest import byte_tokenizer, invoke, load, refused, tiny_dense
from gated_models import GREEDY, tokens
from peft import IA3Config, LoraConfig, OFTConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoTokenizer, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

import hf_moe_expand as moe
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.checkpoint.promises import tiny_twin
from hf_moe_expand.inference.asking import ChatModel
from hf_moe_expand.modeling import routing_control
from hf_moe_expand.modeling.language_modules import _Sum
from hf_moe_expand.modeling.routing import TokenClasses
from hf_moe_expand.modeling.updates import LoraUpdate

IDS = tokens(2, 12)
# Tied; tied with positions, biases and Conv1D; untied; positions that are no token's; scaled embeddings; buffers that
# the backbone computes; maps in lists, and a bias of the head.
BACKBONES = ("qwen2", "gpt2", "gpt_neox", "opt", "gemma", "falcon_h1", "ctrl")
MIXTURES = ("mixtral",)
TWINS = ("falcon_h1", "ctrl", "opt")


def fine_tune(base, seed, size=0.1):
    """A model of which every parameter differs from the base's."""
    tuned, draw = copy.deepcopy(base), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in tuned.parameters():
            weight += size * weight.std().nan_to_num(0.1).clamp(min=0.02) * torch.randn(weight.shape, generator=draw)
    return tuned.eval()


@torch.no_grad()
def logits(model, **more):
    return model(IDS, **more).logits


def close(ours, theirs, size=1e-5):
    assert (ours - theirs).abs().max() <= size * theirs.abs().max()


def stored(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A base, and a fine-tune of it for each of two languages."""
    home = tmp_path_factory.mktemp("languages")
    base = tiny_dense("llama").eval()
    for name, model in (("base", base), ("el", fine_tune(base, 1)), ("hu", fine_tune(base, 2))):
        model.save_pretrained(home / name)
    moe.expand_tuned(home / "base", {"el": home / "el", "hu": home / "hu"}, home / "both", ["en"])
    return home


@pytest.mark.parametrize("name", BACKBONES + MIXTURES)
def test_told_it_is_each_fine_tune_and_else_the_base(name, tmp_path):
    base = (tiny_twin(CONFIG_MAPPING[name]()) if name in TWINS else tiny_dense(name)).eval()
    tuned = {code: fine_tune(base, seed) for seed, code in enumerate(("el", "hu"))}
    for code, model in (("base", base), *tuned.items()):
        model.save_pretrained(tmp_path / code)
    moe.expand_tuned(tmp_path / "base", {code: tmp_path / code for code in tuned}, tmp_path / "model", ["en"])
    model = load(tmp_path / "model")
    assert torch.equal(logits(model), logits(base))
    assert torch.equal(logits(model, languages="en"), logits(base))
    for code, one in tuned.items():
        close(logits(model, languages=code), logits(one))
        export_dense(tmp_path / "model", tmp_path / f"{code}-again", language=code)
        if name not in MIXTURES:  # whose parts come out as one tensor
            again, first = stored(tmp_path / f"{code}-again"), stored(tmp_path / code)
            assert again.keys() == first.keys()
            assert all(torch.equal(again[key], first[key]) for key in first)
        close(logits(load(tmp_path / f"{code}-again")), logits(one))
    if name == "falcon_h1":  # whose blocks with a state take texts of one language at a time
        with pytest.raises(ValueError, match="is no map of single tokens"):
            logits(model, languages=["en", "hu"])
        return
    mixed = logits(model, languages=["en", "hu"])
    if name not in MIXTURES:  # which run an expert's tokens together: their number changes the rounding
        assert torch.equal(mixed[0], logits(base)[0])
    close(mixed[0], logits(base)[0])
    close(mixed[1], logits(tuned["hu"])[1])
    answers = model.generate(IDS, languages=["en", "hu"], **GREEDY)
    for row, one in enumerate((base, tuned["hu"])):
        assert torch.equal(answers[row], one.generate(IDS, **GREEDY)[row])


def test_a_text_that_nobody_tells_is_the_bases_and_that_is_said_once(home, caplog):
    model = load(home / "both")
    routing_control.logger.warning_once.cache_clear()
    routing_control.logger.propagate = True
    byte_tokenizer().save_pretrained(home / "both")
    moe.load_for_inference(home / "both")
    with model.use_expert(0):
        logits(model)
    assert not caplog.records
    for _ in range(2):
        assert torch.equal(logits(model), logits(load(home / "base")))
    routing_control.logger.propagate = False
    assert sum("Nobody tells the language" in record.message for record in caplog.records) == 1
    with model.use_expert(2):
        assert torch.equal(logits(model), logits(load(home / "hu")))
    with model.use_expansion(1), pytest.raises(ValueError, match="no expert"), model.use_expert(9):
        logits(model)


@pytest.mark.parametrize("layer", [nn.Linear(5, 7), Conv1D(7, 5)], ids=["linear", "conv1d"])
def test_the_weight_and_bias_that_a_library_reads_are_those_of_the_sum(layer):
    update = LoraUpdate(layer, "map", 3, 2.5, bias=True)
    for weight in (*layer.parameters(), *update.parameters()):
        nn.init.normal_(weight)
    both, x = _Sum(layer, update), torch.randn(4, 5)
    weight = both.weight.T if isinstance(layer, Conv1D) else both.weight
    torch.testing.assert_close(nn.functional.linear(x, weight, both.bias), both(x))


def test_tokens_that_no_batch_holds_have_the_class_beside_them(home):
    """Virtual ones stand before a row in training, and in inference a pass reads the last of what a cache holds."""
    model, classes = load(home / "both"), TokenClasses(torch.tensor([0, 1, 2, 0]), [0, 1, 2])
    outer = model.model.adapters
    for training, there, found in (
        (True, 3, [[0, 0, 1], [2, 2, 0]]),
        (False, 3, [[0, 1, 1], [2, 0, 0]]),
        (False, 1, [[1], [0]]),
    ):
        model.train(training)
        with model.routing_control.asking(token_classes=classes):
            assert outer.classes_at(torch.zeros(2, there, 8)).squeeze(-1).tolist() == found


def test_only_what_changed_is_stored_and_held(home, tmp_path):
    tuned = load(home / "base")
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight += 0.01
        tuned.model.norm.weight += 0.1
    tuned.save_pretrained(tmp_path / "tuned")
    moe.expand_tuned(home / "base", {"el": tmp_path / "tuned"}, tmp_path / "model")
    own = stored(tmp_path / "model").keys() - stored(home / "base").keys()
    assert own == {
        "model.adapters.experts.1.norm_own.weight", "model.layers.1.adapters.experts.1.mlp_up_proj_own.weight"
    }  # fmt: skip
    model = load(tmp_path / "model")
    close(logits(model, languages="el"), logits(tuned))
    extra = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in tuned.parameters())
    assert extra == tuned.model.layers[1].mlp.up_proj.weight.numel() + tuned.model.norm.weight.numel()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text"])  # the last scales its embeddings
def test_a_rank_keeps_the_best_update_and_a_weight_scales_the_difference(name, tmp_path):
    base = tiny_dense(name).eval()
    tuned = fine_tune(base, 3)
    for code, model in (("base", base), ("el", tuned)):
        model.save_pretrained(tmp_path / code)
    expected = copy.deepcopy(tuned)
    maps = {id(module.weight) for module in base.modules() if getattr(module, "weight", None) is not None
            and module.weight.dim() == 2 and not (name == "gpt2" and module is base.transformer.wpe)}  # fmt: skip
    with torch.no_grad():
        for ours, theirs in zip(base.parameters(), expected.parameters(), strict=True):
            change = 0.6 * (theirs - ours).double()
            if id(ours) in maps:
                U, S, V = torch.linalg.svd(change, full_matrices=False)
                change = U[:, :3] * S[:3] @ V[:3]
            theirs.copy_(ours + change)
    moe.expand_tuned(tmp_path / "base", {"el": tmp_path / "el"}, tmp_path / "model", rank=3, weight=0.6)
    found = load(tmp_path / "model")
    if name == "llama":
        close(logits(found, languages="el"), logits(expected), 1e-4)
    close(logits(found, languages=["el", "el"]), logits(found, languages="el"))
    export_dense(tmp_path / "model", tmp_path / "again", language="el")
    close(logits(load(tmp_path / "again")), logits(found, languages="el"), 1e-4)
    moe.expand_tuned(tmp_path / "base", {"el": tmp_path / "el"}, tmp_path / "half", weight=0.5)
    half = load(tmp_path / "half")
    export_dense(tmp_path / "half", tmp_path / "mean", language="el")
    for key, value in stored(tmp_path / "mean").items():
        torch.testing.assert_close(value, (stored(tmp_path / "base")[key] + stored(tmp_path / "el")[key]) / 2)
    close(logits(half, languages="el"), logits(load(tmp_path / "mean")))


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_low_rank_language_leaves_as_an_adapter_of_peft(is_tied, home, tmp_path):
    base = tiny_dense("llama", tie_word_embeddings=is_tied)
    for name, model in (("base", base), ("el", fine_tune(base, 1))):
        model.save_pretrained(tmp_path / name)
    moe.expand_tuned(tmp_path / "base", {"el": tmp_path / "el"}, tmp_path / "model", rank=4)
    moe.export_peft(tmp_path / "model", tmp_path / "lora")
    adapted = PeftModel.from_pretrained(base, tmp_path / "lora").eval()
    close(logits(adapted), logits(load(tmp_path / "model"), languages="el"))
    refused(moe.export_peft, home / "both", tmp_path / "out", says="whole modules of their own")


def test_joined_and_grown_they_are_the_same_model(home, tmp_path):
    for code in ("el", "hu"):
        moe.expand_tuned(home / "base", {code: home / code}, tmp_path / code, ["en"])
    moe.join_expansions([tmp_path / "el", tmp_path / "hu"], tmp_path / "joined")
    moe.expand_tuned(tmp_path / "el", {"hu": home / "hu"}, tmp_path / "grown")
    for name in ("joined", "grown"):
        found, both = stored(tmp_path / name), stored(home / "both")
        assert found.keys() == both.keys()
        assert all(torch.equal(found[key], both[key]) for key in both)
    made = moe.expand_tuned(load(home / "base"), {"el": load(home / "el"), "hu": load(home / "hu")}, None, ["en"])
    made.save_pretrained(tmp_path / "memory")
    assert all(torch.equal(value, both[key]) for key, value in stored(tmp_path / "memory").items())


def test_a_packed_rows_last_logits_are_those_of_its_last_text(home):
    model = load(home / "both")
    ids, classes = IDS.view(1, -1), TokenClasses(torch.tensor([1] * 12 + [2] * 12), [1, 2])
    with torch.no_grad(), model.routing_control.asking(token_classes=classes):
        whole = model(ids, use_cache=False).logits
        for kept in (1, 5, 13):
            close(model(ids, use_cache=False, logits_to_keep=kept).logits, whole[:, -kept:])


def test_embeddings_are_the_classs_inside(home):
    model = load(home / "both")
    own = load(home / "hu")
    with model.use_languages("hu"):
        assert torch.equal(model.get_input_embeddings().weight, own.get_input_embeddings().weight)
        assert torch.equal(model.get_output_embeddings().weight, own.get_output_embeddings().weight)
    assert torch.equal(model.get_input_embeddings().weight, load(home / "base").get_input_embeddings().weight)
    with model.use_languages(["en", "hu"]), pytest.raises(ValueError, match=r"what reads lm_head\.weight itself"):
        _ = model.get_output_embeddings().weight
    assert model.resize_token_embeddings(257).weight.shape[0] == 257
    refused(model.resize_token_embeddings, 300, says="have embeddings or heads of their own", raises=ValueError)


MAPS = ["q_proj", "down_proj"]
# A plain LoRA on whole modules and on updates is the matrix's.
WRAPPERS = {
    "dora": LoraConfig(r=2, target_modules=MAPS, init_lora_weights=False, use_dora=True),
    "saved": LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=["up_proj"]),
    "ia3": IA3Config(target_modules=MAPS, feedforward_modules=["down_proj"], init_ia3_weights=False),
    "oft": OFTConfig(r=0, oft_block_size=8, target_modules=MAPS, init_weights=False),
}


@pytest.mark.parametrize("config", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("rank", [None, 4])
def test_what_peft_wraps_around_a_map_is_the_bases_and_merging_keeps_it(config, rank, home, tmp_path):
    moe.expand_tuned(home / "base", {"el": home / "el"}, tmp_path / "model", ["en"], rank=rank)
    torch.manual_seed(0)
    model = get_peft_model(load(tmp_path / "model"), copy.deepcopy(config)).eval()
    for name, weight in model.named_parameters():
        if "modules_to_save" in name:
            weight.data += 0.1
    found = [logits(model, languages=code) for code in ("el", "en")]
    assert not torch.allclose(found[1], logits(load(home / "base")), atol=1e-3)
    if rank is None:
        assert torch.equal(found[0], logits(load(home / "el")))
    merged = model.merge_and_unload()
    for one, asked in zip(found, ({"languages": "el"}, {"languages": "en"}), strict=True):
        close(logits(merged, **asked), one, 1e-4)


def test_tensor_parallelism_splits_whole_modules_as_theirs(home, tmp_path):
    plan = load(home / "both")._tp_plan
    own = {rule: style for rule, style in plan.items() if "adapters" in rule}
    assert own["model.layers.*.adapters.experts.*.self_attn_q_proj_own"] == plan["model.layers.*.self_attn.q_proj"]
    assert own["model.layers.*.adapters.experts.*.mlp_down_proj_own"] == plan["model.layers.*.mlp.down_proj"]
    moe.expand_tuned(home / "base", {"el": home / "el"}, tmp_path / "model", rank=2)
    assert load(tmp_path / "model")._tp_plan == {}


def test_the_history_names_each_source(home, tmp_path):
    (tmp_path / "tuned").mkdir()
    load(home / "el").save_pretrained(tmp_path / "tuned")
    (tmp_path / "tuned" / "README.md").write_text("---\nlicense: apache-2.0\n---\nA model.\n")
    moe.expand_tuned(home / "base", {"el": tmp_path / "tuned"}, tmp_path / "model", weight=0.5)
    (record,) = json.loads((tmp_path / "model" / "config.json").read_text())["expansions"]
    (stage,) = record["stages"]
    assert stage["settings"] == {
        "model": "tuned", "revision": None, "license": "apache-2.0", "rank": None, "weight": 0.5
    }  # fmt: skip
    assert "tuned, model tuned, weight 0.5\n" in invoke("inspect", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["expansions"][0]["stages"] = [{"stage": "average-experts", "settings": {"weight": 0.6}}]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert "average-experts\n" in invoke("inspect", tmp_path / "model")


def test_each_language_ends_at_its_own_token_and_has_its_own_template(home, tmp_path):
    base, own = load(home / "base"), load(home / "el")
    own.generation_config.eos_token_id, own.generation_config.pad_token_id = 7, 0
    base.generation_config.eos_token_id, base.generation_config.pad_token_id = 8, 0
    for name, model in (("base", base), ("el", own)):
        model.save_pretrained(tmp_path / name)
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = f"{name}: {{{{ messages[0].content }}}}"
        tokenizer.save_pretrained(tmp_path / name)
    moe.expand_tuned(tmp_path / "base", {"el": tmp_path / "el"}, tmp_path / "model", ["en"])
    model = load(tmp_path / "model")

    def ends(one, **more):
        """The tokens that a model writes, each the likelier the later, where 7 and 8 are likeliest at last."""
        one = copy.deepcopy(one)

        def rising(ids, scores):
            scores[:, 7:9] = -1e9
            if ids.shape[1] >= 15:
                scores[:, 7] = 1e9
            if ids.shape[1] >= 16:
                scores[:, 8] = 2e9
            return scores

        with torch.no_grad():
            return one.generate(IDS, do_sample=False, max_new_tokens=8, logits_processor=[rising], **more)

    told = ends(model, languages=["en", "el"])
    assert (told[0] == 8).sum() == 1
    assert (told[0, 12:] == 7).sum() == 1  # which ends no English text
    assert told[1, 15] == 7
    assert not told[1, 16:].any()
    assert torch.equal(ends(model, languages="el"), ends(own))
    assert torch.equal(ends(model, languages="en"), ends(base))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    talk = [{"role": "user", "content": "a"}]
    chat = ChatModel(model, tokenizer, "model")
    for code, said in (("el", "el: a"), (None, "base: a"), ("en", "base: a")):
        assert tokenizer.apply_chat_template(talk, tokenize=False, **chat._template(code)) == said
    export_dense(tmp_path / "model", tmp_path / "again", language="el")
    assert GenerationConfig.from_pretrained(tmp_path / "again").eos_token_id == 7
    assert (tmp_path / "again" / "chat_template.jinja").read_text() == "el: {{ messages[0].content }}"


def changed(home, tmp_path, **fields):
    """A fine-tune with other fields in its configuration."""
    load(home / "el").save_pretrained(tmp_path / "tuned")
    config = json.loads((tmp_path / "tuned" / "config.json").read_text())
    (tmp_path / "tuned" / "config.json").write_text(json.dumps({**config, **fields}))
    return tmp_path / "tuned"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters is .* in base"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps is 0.001, but 1e-06 in base"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but 'silu' in base"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantised"),
    ],
)
def test_a_fine_tune_that_computes_otherwise_is_refused(fields, said, home, tmp_path):
    refused(moe.expand_tuned, home / "base", {"el": changed(home, tmp_path, **fields)}, tmp_path / "out", says=said)
    assert not (tmp_path / "out").exists()


def test_what_is_no_fine_tune_of_the_base_is_refused(home, tmp_path):
    def no(says, tuned, **more):
        refused(moe.expand_tuned, home / "base", {"el": tuned}, tmp_path / "out", says=says, **more)
        assert not (tmp_path / "out").exists()

    no("is base itself: none of its tensors differs", home / "base")
    tiny_dense("llama", seed=9).save_pretrained(tmp_path / "other")
    no(r"is no fine-tune of base: its matrices differ from it by 1\d\d% of their size", tmp_path / "other")
    tiny_dense("qwen2").save_pretrained(tmp_path / "qwen2")
    no("model_type is 'qwen2', but 'llama' in base", tmp_path / "qwen2")
    load(home / "el").to(torch.bfloat16).save_pretrained(tmp_path / "half")
    no(r"is BF16, but F32 in base: give --dtype float32 \(dtype=\)", tmp_path / "half")
    moe.expand_tuned(home / "base", {"el": tmp_path / "half"}, tmp_path / "converted", dtype="float32")
    close(logits(load(tmp_path / "converted"), languages="el"), logits(load(tmp_path / "half").float()))
    no(r"rank is 99: must be at most \d+, the narrowest side of model", home / "el", rank=99)
    no("weight: Input should be less than or equal to 2", home / "el", weight=3.0)
    no("dtype is bfloat16, but no tensor of base is", home / "el", dtype="bfloat16")
    no("tuned", 3)
    tied = load(home / "el")
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    tied.save_pretrained(tmp_path / "tied")
    no("tie_word_embeddings is True, but False in base", tmp_path / "tied")
    broken = load(home / "el")
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight[3, 5] = float("nan")
    broken.save_pretrained(tmp_path / "broken")
    for rank in (None, 4):
        no("tensor 'model.layers.1.mlp.down_proj.weight', or the base's, has values", tmp_path / "broken", rank=rank)
    refused(moe.expand_tuned, home / "both", {"el": home / "el"}, tmp_path / "out", says="given as an old and as a new")
    refused(moe.expand_tuned, home / "base", {}, tmp_path / "out", says="tuned is empty")
    model = load(home / "both")
    refused(moe.expand_tuned, model, {"tr": home / "el"}, says="give loaded models for a loaded base")


def test_another_vocabulary_is_refused_by_the_first_token_that_differs(home, tmp_path):
    for name in ("base", "el"):
        load(home / name).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    file = tmp_path / "el" / "tokenizer.json"
    fields = json.loads(file.read_text())
    vocabulary = fields["model"]["vocab"]
    token = next(token for token, number in vocabulary.items() if number == 40)
    vocabulary["other"] = vocabulary.pop(token)
    file.write_text(json.dumps(fields))
    given = (tmp_path / "base", {"el": tmp_path / "el"}, tmp_path / "out")
    refused(moe.expand_tuned, *given, says="token 40 is 'other', but ")


def test_a_tokenizer_without_the_end_token_that_its_class_adds(tmp_path):
    base = tiny_dense("qwen2")
    for name, model in (("base", base), ("el", fine_tune(base, 1))):
        model.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    file, settings = (tmp_path / "base" / name for name in ("tokenizer.json", "tokenizer_config.json"))
    fields = json.loads(file.read_text()) | {"added_tokens": []}
    del fields["model"]["vocab"]["<end>"]
    file.write_text(json.dumps(fields))
    settings.write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    AutoTokenizer.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "el")  # with the token
    assert b"<|endoftext|>" in (tmp_path / "el" / file.name).read_bytes()
    for name in ("told", "untold"):
        moe.expand_tuned(tmp_path / "base", {"el": tmp_path / "el"}, tmp_path / name)
        assert (tmp_path / name / file.name).read_bytes() == file.read_bytes()
        settings.unlink(missing_ok=True)
    AutoTokenizer.from_pretrained(tmp_path / "told").save_pretrained(tmp_path / "told")
    moe.expand_tuned(tmp_path / "told", {"tr": tmp_path / "el"}, tmp_path / "more")


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({"modules": "all"}, {"self_attn_q_proj_own", "mlp_up_proj_own"}),
        ({"modules": "attention", "rank": 2}, {"self_attn_q_proj_update"}),
        ({"rank": 2}, {"mlp_up_proj_update"}),
        ({"modules": "q_proj"}, {"self_attn_q_proj_own"}),
    ],
)
def test_a_plan_says_what_a_language_has_of_its_own(given, own, home, tmp_path):
    plan = moe.Plan("exclusive", [2] * 3, old=["en"], new=["el"], exclusive=True, **given)
    plan.save(tmp_path / "plan.json")
    plan = moe.Plan.load(tmp_path / "plan.json")
    moe.expand_checkpoint(home / "base", tmp_path / "model", plan)
    model = load(tmp_path / "model")
    inside = {name.split(".")[6] for name in model.state_dict() if ".adapters." in name}
    ends = ("q_proj_own", "up_proj_own", "q_proj_update", "up_proj_update")
    assert {name for name in inside if name.endswith(ends)} == own
    assert torch.equal(logits(model, languages="el"), logits(load(home / "base")))
    in_memory = moe.expand_model(load(home / "base"), plan)
    assert list(in_memory.state_dict()) == list(model.state_dict())
    refused(moe.Plan, "moe-lpr", [2] * 3, says="are for a plan with exclusive alone", **given)
    if plan.rank:
        (entry,) = moe.expand_model(load(home / "base"), plan, lora_alpha=6).config.parts["languages"]
        assert {tuple(update) for update in entry["maps"].values()} == {(2, 3.0)}


def test_a_whole_fine_tune_and_an_adapter_of_peft_are_languages_of_one_model(home, tmp_path):
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(load(home / "base"), lora).eval()
    adapted.save_pretrained(tmp_path / "lora-tr")
    models = {"el": home / "el", "tr": tmp_path / "lora-tr"}
    moe.expand_tuned(home / "base", models, tmp_path / "model", ["en"])
    model = load(tmp_path / "model")
    close(logits(model, languages="el"), logits(load(home / "el")))
    close(logits(model, languages="tr"), logits(adapted))
    for codes in (["el", "tr"], ["en", "tr"]):
        mixed = logits(model, languages=codes)
        for row, code in enumerate(codes):
            close(mixed[row], logits(model, languages=code)[row])
    assert torch.equal(logits(model, languages=["en", "tr"])[0], logits(load(home / "base"))[0])
    moe.export_peft(tmp_path / "model", tmp_path / "again", language="tr")
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    own = load_file(tmp_path / "lora-tr" / "adapter_model.safetensors")
    assert all(torch.equal(again[key], value) for key, value in own.items())
