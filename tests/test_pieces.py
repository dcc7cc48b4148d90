"""The loss in pieces: the loss, its gradients and the trained parameters are those of the whole batch's logits."""

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_dense
from one_step import build, rows, train

from hf_moe_expand import DistillationLoss, Plan, expand_model
from hf_moe_expand.trainers import pieces as module
from hf_moe_expand.trainers.pieces import LogitsInPieces

IDS, _ = rows()
TOKENS = 5  # of a piece; no divisor of anything here


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(module, "PIECE", TOKENS * 257 + 200)
    monkeypatch.setattr(module, "LARGE", 90 * 257)


@pytest.fixture
def widest(monkeypatch):
    """The most tokens of which logits were computed at once, since the batch became large."""
    found = []
    own = LogitsInPieces.logits

    def logits(self, hidden, *others):
        found.append(hidden.shape[:-1].numel())
        return own(self, hidden, *others)

    monkeypatch.setattr(LogitsInPieces, "logits", logits)
    return found


def made(backbone, **sizes):
    """An expanded model whose experts differ."""
    model = expand_model(tiny_dense(backbone, **sizes), Plan("moe-lpr", [3, 1, 2], old=["en"], new=["el"]))
    torch.manual_seed(1)
    with torch.no_grad():
        for ffn in model.expanded_ffns().values():
            for parameter in ffn.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def compare(folder, make, monkeypatch, widest, **options):
    logs, in_pieces = {}, {}
    whole = train(folder / "whole", model=make(), logs=logs, **options)
    assert not widest
    monkeypatch.setattr(module, "PIECE", TOKENS * 257 + 200)
    monkeypatch.setattr(module, "LARGE", 40 * 257)
    cut = train(folder / "cut", model=make(), logs=in_pieces, **options)
    assert 1 <= max(widest[1:]) <= TOKENS < widest[0] == 8  # the first are those by which the head was found
    for name in ("loss", "next_token_loss", "grad_norm"):
        assert in_pieces[name] == pytest.approx(logs[name], rel=2e-5), name
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=2e-4, atol=2e-5, msg=name)
    return logs


def test_a_step_is_that_of_the_whole_logits(backbone, tmp_path, monkeypatch, widest):
    compare(tmp_path, lambda: made(backbone), monkeypatch, widest, stage="post", everything=True)


@pytest.mark.parametrize(
    "options",
    [
        {"stage": "post"},
        {"batch": 4, "steps": 2, "padded": True},
        {"checkpointing": True, "stage": "post", "everything": True},
    ],
    ids=str,
)
def test_stages_padding_and_accumulation(options, tmp_path, monkeypatch, widest):
    compare(tmp_path, build, monkeypatch, widest, **options)


@pytest.mark.parametrize("options", [{}, {"batch": 4, "steps": 2, "padded": True}, {"everything": True}], ids=str)
def test_self_distillation_in_pieces(options, tmp_path, monkeypatch, widest):
    losses = [DistillationLoss(2.0)]
    logs = compare(tmp_path, lambda: made("qwen2"), monkeypatch, widest, losses=losses, **options)
    assert logs["distillation_loss"] > 0.01


@pytest.mark.parametrize(
    ("backbone", "sizes"), [("gemma3_text", {"final_logit_softcapping": 0.7}), ("granite", {"logits_scaling": 3.0})]
)
def test_capped_and_scaled_logits(tmp_path, monkeypatch, widest, backbone, sizes):
    """Small caps change every logit."""
    assert backbone == "granite" or made(backbone, **sizes)(IDS).logits.abs().max() < 0.7
    compare(tmp_path, lambda: made(backbone, **sizes), monkeypatch, widest, stage="post", everything=True)


def test_the_definition(small_pieces):
    model = build().train()
    labels = torch.where(torch.arange(12) % 4 == 1, -100, IDS)
    found = LogitsInPieces.of(model)
    assert found.size() == TOKENS
    assert model.training
    with found.head_inputs() as kept:
        outputs = model(input_ids=IDS, use_cache=False)
    assert outputs.logits.shape == (8, 1, 257)
    loss = found.next_token_loss(kept[0], labels)
    gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    logits = model(input_ids=IDS, use_cache=False).logits
    assert logits.shape == (8, 12, 257)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(expected, model(input_ids=IDS, labels=labels).loss)
    torch.testing.assert_close(
        found.next_token_loss(kept[0], labels, 1000) * 1000 / (labels[:, 1:] != -100).sum(), expected
    )
    others = torch.autograd.grad(expected, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    for one, other in zip(gradients, others, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    nothing = torch.full_like(IDS, -100)
    assert found.next_token_loss(kept[0], nothing, 5) == 0


def test_other_logits_and_other_losses_are_left_alone(small_pieces, tmp_path, widest):
    def shifted():
        model = made("qwen2")
        bend = torch.linspace(-1, 1, 257)

        def bent(module, args, output):
            output.logits = output.logits + bend

        model.register_forward_hook(bent)
        return model

    assert LogitsInPieces.of(shifted()) is None
    train(tmp_path, model=shifted(), stage="post")
    assert set(widest) == {8}  # nothing but what found it
    other = build()
    other.loss_function = lambda **_: torch.tensor(0.0)
    assert LogitsInPieces.of(other) is None


def test_a_loss_that_reads_logits_finds_them_all(small_pieces, tmp_path):
    from test_own_loss import Flatness
    from test_own_loss import made as with_other_experts

    logs, whole = {}, {}
    train(tmp_path / "a", model=with_other_experts(), logs=logs, losses=[Flatness(0.5)])
    assert logs["flatness_loss"] > 0
    module.LARGE = build().get_output_embeddings().weight.shape[0] * IDS.numel()
    train(tmp_path / "b", model=with_other_experts(), logs=whole, losses=[Flatness(0.5)])
    assert logs["flatness_loss"] == whole["flatness_loss"]
