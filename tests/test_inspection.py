"""What `inspect` says of a checkpoint: every line, of facts that are written down here."""

from hf_moe_expand.checkpoint.facts import JoinedPack
from hf_moe_expand.checkpoint.records import ExpansionRecord, StageRecord
from hf_moe_expand.modeling.language_gate import GateRule
from hf_moe_expand.report.inspection import Inspection

PLAIN = {
    "backbone": "qwen2", "top_k": 2, "layers": [(2, False, 5), (1, False, 3), (3, True, 9)], "total": 3000,
    "active": 2500, "base": 1000, "trainable": {"review": 30},
}  # fmt: skip
FIRST = ExpansionRecord(method="moe-lpr", old_languages=["en"], new_languages=["el"], base_model="tiny")


def test_a_plain_model():
    review = StageRecord(stage="review", steps=1200, seed=3, tokens={"en": 9000}, tokens_seen=4000)
    expansion = FIRST.model_copy(update={"stages": [StageRecord(stage="graft"), review]})
    assert Inspection(**PLAIN, expansions=[expansion]).lines() == [
        "backbone            qwen2, 3 layers",
        "experts per layer   2 1 3 (total 6, top-2)",
        "classifier layers   2",
        "parameters          3,000 (3.00 x the base model's 1,000)",
        "active for a token  2,500",
        "trained in review           30 (1.00 %)",
        "expansion 1         moe-lpr on tiny: old en; new el",
        "  graft",
        "  review, 1,200 steps, seed 3, 4,000 tokens seen of 9,000 at hand",
    ]


def test_everything_that_there_can_be():
    shares = {"el": {"end": 0.914}, "hu": {"end": 1.0}}
    before = StageRecord(stage="gates", settings={"shares": {"el": {"end": 0.1}}, "home": {}})
    fitted = StageRecord(stage="gates", settings={"shares": shares, "home": {"en": 0.004}})
    parts = {"method": "own", "stages": [StageRecord(stage="review")]}
    expansions = [
        ExpansionRecord(old_languages=["en", "hu"], new_languages=["el"], pack="greek", **parts),
        ExpansionRecord(old_languages=["und", "el", "tr"], new_languages=["hu"], pack="magyar", **parts),
        ExpansionRecord(
            method="own", old_languages=["en", "el"], new_languages=["tr"],
            stages=[StageRecord(stage="review"), before, fitted],
        ),
    ]  # fmt: skip
    facts = PLAIN | {"layers": [(2, True, 5), (1, False, 3), (3, True, 9)]}
    model = Inspection(
        **facts, expansions=expansions, experts="updates of rank 8", mixtures=[1, 2], leftovers=["A folder is left."],
        encoder_layers=1,
        gate=GateRule(1, [["en", "zxx", "de"], ["el"], ["hu"]]), exclusive=True,
        packs=[JoinedPack("greek", ["el"], 2, "FFNs"), JoinedPack("magyar", ["und"], 1, "FFNs")],
    )  # fmt: skip
    assert model.lines() == [
        "backbone            qwen2, 1 encoder and 2 decoder layers",
        "experts per layer   encoder 2, decoder 1 3 (total 6, exclusive)",
        "new experts         updates of rank 8",
        "pack 1              greek: el; FFNs, 2 expansions",
        "pack 2              magyar: und (undetermined); FFNs",
        "mixtures before     layers decoder.0, decoder.1; not expanded: decoder.0",
        "language gate       in layer 1: 2 languages stay home, as does what it does not know; new: el, hu",
        "  to new experts    el 91 %, hu 100 %, en 0 % of the texts",
        "parameters          3,000 (3.00 x the base model's 1,000)",
        "active for a token  2,500",
        "trained in review           30 (1.00 %)",
        "expansion 1         pack greek: own on None: old en; new el",
        "  review",
        "expansion 2         pack magyar: own on None: old und (undetermined), tr; new hu",
        "  review",
        "expansion 3         own on None: old en, el; new tr",
        "  review",
        "  gates",
        "  gates",
        "left over           A folder is left.",
    ]


def mixtures_of(*mixtures, counts=(1, 1)):
    layers = [(count, False, 1) for count in counts]
    facts = {**PLAIN, "layers": layers, "trainable": {}}
    lines = Inspection(**facts, expansions=[], mixtures=mixtures).lines()
    return [line.split(maxsplit=2)[2] for line in lines if line.startswith(("mixtures", "classifier"))]


def test_mixtures_before():
    assert mixtures_of(0, 1) == ["all layers, not expanded", "none"]
    assert mixtures_of(0, 1, counts=(2, 2)) == ["all layers", "none"]
    assert mixtures_of(1, counts=(2, 2)) == ["layers 1", "none"]
