"""RouterLossMixin: adds the routers' losses to any Trainer of the ecosystem.

The model's forward pass knows nothing of these losses. The mixin records the routing while the trainer's own
`compute_loss` runs, adds the losses, and logs each part.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import TrainingArguments

from .losses import (
    OLD,
    classifier_loss,
    expert_selections,
    gate_budget_loss,
    language_importance,
    language_prior_routing_loss,
    load_balance_loss,
    localized_balance_loss,
)

_NEEDS_LANGUAGES = (
    "The language-prior, classifier, group and localized balance losses need language_classes (for each language id "
    "its class: 0 = old and 1 = new, or its language group) and batches with language_ids, the language id of each "
    "token."
)

# The later name came with transformers 5.23; an earlier one has the older alone.
CHECKPOINTING_NAMES = ("activation_checkpointing", "gradient_checkpointing")
CHECKPOINTING = next(name for name in CHECKPOINTING_NAMES if name in TrainingArguments.__dataclass_fields__)


@dataclass(frozen=True)
class RouterLossWeights:
    """`L = L_NTP + balance * L_balance + language_prior * L_LPR + classifier * L_CLS + group * L_group + budget * L_CMR
    + localized_balance * L_lbc` (alpha, beta and gamma of MoE-LPR and LayerMoE; lambda of DMoE; Elbayad et al.'s, with
    its b in `gate_budget`; LoRAMoE's, with its delta in `localized_delta`)."""

    balance: float = 0.0
    language_prior: float = 0.0
    classifier: float = 0.0
    group: float = 0.0
    budget: float = 0.0
    gate_budget: float = 0.8
    localized_balance: float = 0.0
    localized_delta: float = 0.1


@dataclass
class _Tokens:
    """Masks of one batch, flattened to `[T]`, and the counts that the losses are divided by."""

    counted_T: torch.Tensor
    old_T: torch.Tensor
    tagged_T: torch.Tensor
    class_T: torch.Tensor

    def counts(self) -> torch.Tensor:
        return torch.stack([mask.sum() for mask in (self.counted_T, self.old_T, self.tagged_T)]).double()


class _FirstPass(dict):
    """Routing of the forward pass that the loss comes from: a later one without gradients (that of DPO's reference
    model, where it is the same model without its adapter) does not replace it."""

    def __setitem__(self, layer: int, routing: Any) -> None:
        if torch.is_grad_enabled() or layer not in self:
            super().__setitem__(layer, routing)


def _without_virtual_tokens(layer: Any, input_ids: torch.Tensor) -> Any:
    """Prompt tuning puts tokens of its own in front of each sequence: no text, so no router loss counts them."""
    batch, length = input_ids.shape
    if layer.router_logits.shape[0] == batch * length:
        return layer

    def text_only(logits: torch.Tensor | None) -> torch.Tensor | None:
        return None if logits is None else logits.unflatten(0, (batch, -1))[:, -length:].flatten(0, 1)

    return replace(
        layer, router_logits=text_only(layer.router_logits), classifier_logits=text_only(layer.classifier_logits)
    )


def _fetch_experts_together(model: Any) -> None:
    """Makes ZeRO-3 fetch an expanded FFN in one piece: a rank that fetched only the experts its tokens chose would wait
    for ever for ranks whose tokens chose others."""
    from deepspeed.utils import set_z3_leaf_module

    for ffn in model.expanded_ffns().values():
        set_z3_leaf_module(ffn, True)
    # DeepSpeed ends such a piece's backward pass when the gradient of its input is there. With frozen embeddings the
    # first one's input would have none.
    model.enable_input_require_grads()


class RouterLossMixin:
    """Put in front of a Trainer class: `class MyTrainer(RouterLossMixin, Trainer)`.

    A batch may carry `language_ids` `[batch, sequence]`, the language of each token, negative where unknown.

    Language-prior and classifier losses are means over the tokens of the whole optimizer step: invariant to how it is
    split into micro-batches and ranks, and to padding. The balance loss is not linear in the tokens: it balances
    each micro-batch (over all ranks), and an optimizer step is the mean of its micro-batches weighted by tokens.

    Args:
        router_losses: weights of the losses.
        language_classes: for each language id its class: 0 for an old language, 1 for a new one; with the group loss,
            its language group.

    Raises:
        ValueError: reentrant gradient checkpointing or label smoothing is on, a loss that needs `language_classes` is
            on without them, or tied embeddings would train under transformers' own FSDP.
    """

    def __init__(
        self,
        *args: Any,
        router_losses: RouterLossWeights | None = None,
        language_classes: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        # First, because a Trainer may prepare its data set while it is built.
        self.router_losses = router_losses or RouterLossWeights()
        self._language_classes = torch.tensor(language_classes) if language_classes is not None else None
        self._step_counts: torch.Tensor | None = None  # tokens, old tokens, tagged tokens of the whole step
        self._sums: dict[str, dict[str, torch.Tensor]] = {"train": {}, "eval": {}}
        super().__init__(*args, **kwargs)
        self._check_arguments()

    def create_accelerator_and_postprocess(self) -> None:
        training: Any = self.args  # type: ignore[attr-defined]
        if training.ddp_find_unused_parameters is None:
            # DDP looks for unused parameters in the graph of the model's output, which the router losses are no part
            # of. There are none: idle experts run on empty batches, and every loss is added, if with weight 0.
            training.ddp_find_unused_parameters = False
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self.is_deepspeed_enabled and self.accelerator.state.deepspeed_plugin.hf_ds_config.is_zero3():  # type: ignore[attr-defined]
            _fetch_experts_together(self.model)  # type: ignore[attr-defined]

    def _check_arguments(self) -> None:
        training: Any = self.args  # type: ignore[attr-defined]
        options = getattr(training, f"{CHECKPOINTING}_kwargs") or {}
        if getattr(training, CHECKPOINTING) and options.get("use_reentrant"):
            raise ValueError(
                "Reentrant gradient checkpointing silently drops the gradient of the router losses: set "
                f'{CHECKPOINTING}_kwargs={{"use_reentrant": False}}.'
            )
        if training.label_smoothing_factor:
            raise ValueError(
                "label_smoothing_factor is not supported: Trainer smooths the unshifted labels of models that it does "
                "not know by name. Set it to 0."
            )
        if self._needs_languages and self._language_classes is None:
            raise ValueError(_NEEDS_LANGUAGES)
        self._check_tied_embeddings()

    def _check_tied_embeddings(self) -> None:
        model: Any = self.accelerator.unwrap_model(self.model)  # type: ignore[attr-defined]
        if not getattr(model, "is_distributed_loading_by_transformers", False):
            return
        tied_and_trained = model.all_tied_weights_keys and model.get_input_embeddings().weight.requires_grad
        split = model.config.distributed_config
        replicas = getattr(split, "dp_size", split.fsdp_size)  # `dp_size` came with transformers 5.23
        if replicas > 1 and tied_and_trained:
            raise ValueError(
                "The embeddings train and are tied to the head, which under transformers' own FSDP "
                "(DistributedConfig(fsdp_size=...)) goes on with their old values after the first step. Let accelerate "
                "split the model (fsdp2.yaml), or keep the embeddings frozen."
            )

    @property
    def _needs_languages(self) -> bool:
        weights = self.router_losses
        return bool(weights.language_prior or weights.classifier or weights.group or weights.localized_balance)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        if "language_ids" not in self._signature_columns:  # type: ignore[attr-defined]
            self._signature_columns: list = [*self._signature_columns, "language_ids"]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple:
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        counts = torch.zeros(3, dtype=torch.double, device=device)
        for batch in batches:
            counts += self._tokens(batch).counts().to(device)
        self._step_counts = self._sum_over_ranks(counts).clamp(min=1)
        return batches, num_items

    def compute_loss(
        self, model: Any, inputs: dict, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = dict(inputs)
        tokens = self._tokens(inputs)
        inputs.pop("language_ids", None)
        labels = inputs.get("labels")
        expanded = self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]
        with expanded.capture_routing() as captured:
            captured.layers = _FirstPass()
            result = super().compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        loss, outputs = result if return_outputs else (result, None)
        if not len(captured):
            raise ValueError("No layer of the model is expanded: there is no router to train.")
        routing = [_without_virtual_tokens(layer, inputs["input_ids"]) for layer in captured]
        self._check_gradients(model, expanded, routing)
        mode = "train" if model.training else "eval"
        if labels is not None:
            self._record_next_token_loss(mode, loss, labels, num_items_in_batch)
        total = loss + self._router_loss(mode, routing, tokens, self._step_scale(model, num_items_in_batch))
        return (total, outputs) if return_outputs else total

    def _tokens(self, inputs: dict) -> _Tokens:
        if "input_ids" not in inputs:
            raise ValueError(
                f"{type(self).__name__}'s batches hold no input_ids, whose tokens the router losses count: this "
                "trainer takes expanded models, but not RouterLossMixin."
            )
        attention = inputs.get("attention_mask")
        counted = (torch.ones_like(inputs["input_ids"]) if attention is None else attention).bool().flatten()
        ids = inputs.get("language_ids")
        if ids is None or self._language_classes is None:
            if self._needs_languages:
                raise ValueError(_NEEDS_LANGUAGES)
            nothing = torch.zeros_like(counted)
            return _Tokens(counted, nothing, nothing, nothing.long())
        ids = ids.flatten().long()
        tagged = counted & (ids >= 0)
        classes = self._language_classes.to(ids.device)[ids.clamp(min=0)]
        return _Tokens(counted, tagged & (classes == OLD), tagged, classes)

    @staticmethod
    def _check_gradients(model: Any, expanded: Any, routing: list) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        # PEFT wraps a router that it trains: the parameter's name ends otherwise, its module is where it was.
        routers_train = any(
            parameter.requires_grad
            for ffn in expanded.expanded_ffns().values()
            for parameter in ffn.router.parameters()
        )
        if routers_train and not any(layer.router_logits.requires_grad for layer in routing):
            raise ValueError(
                "The router logits carry no gradient although the routers train. Reentrant gradient checkpointing does "
                f'this: set {CHECKPOINTING}_kwargs={{"use_reentrant": False}}.'
            )

    def _step_scale(self, model: Any, num_items_in_batch: Any) -> float | None:
        """What turns this rank's share of a step's mean into what the trainer expects; None in evaluation."""
        if not model.training or self._step_counts is None:
            return None
        # Gradients are averaged over ranks, so each rank's share counts once for each rank.
        scale = float(self.accelerator.num_processes // self.get_tp_size())  # type: ignore[attr-defined]
        if self._trainer_divides(num_items_in_batch):
            scale *= self.current_gradient_accumulation_steps  # type: ignore[attr-defined]
        return scale

    def _sum_over_ranks(self, counts: torch.Tensor) -> torch.Tensor:
        # The ranks of a tensor-parallel group hold the same batch: it counts once.
        return self.accelerator.reduce(counts, "sum") / self.get_tp_size()  # type: ignore[attr-defined]

    def _trainer_divides(self, num_items_in_batch: Any) -> bool:
        # The rule in Trainer.training_step.
        scaled = self.loss_is_scaled_for_ga  # type: ignore[attr-defined]
        if scaled is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None  # type: ignore[attr-defined]
            scaled = counted or self.compute_loss_func is not None  # type: ignore[attr-defined]
        return not scaled

    def _router_loss(self, mode: str, routing: Any, tokens: _Tokens, scale: float | None) -> torch.Tensor:
        weights, layers = self.router_losses, len(routing)
        selections = [expert_selections(r.routed_logits, r.top_k, tokens.counted_T) for r in routing]
        local = tokens.counts().float()
        all_ranks = scale is not None
        if scale is None:
            here, step, selections_all, scale = local.clamp(min=1), local.clamp(min=1), selections, 1.0
        else:
            flat = self._sum_over_ranks(torch.cat([local, *selections]))
            here = flat[:3].clamp(min=1)
            selections_all = list(flat[3:].split([len(s) for s in selections]))
            step = self._step_counts.to(here)  # type: ignore[union-attr]
        total = selections[0].new_zeros(())
        classified = sum(r.classifier_logits is not None for r in routing)
        for r, own, everyones in zip(routing, selections, selections_all, strict=True):
            logits = r.router_logits
            balance = load_balance_loss(r.routed_logits, r.top_k, tokens.counted_T, everyones, here[0])
            prior = language_prior_routing_loss(logits, tokens.old_T, step[1])
            total = total + weights.balance * balance * (here[0] / step[0]) / layers
            total = total + weights.language_prior * prior / layers
            self._record(mode, "balance_loss", balance * here[0] / layers, local[0] / layers)
            self._record(mode, "language_prior_loss", prior * step[1], local[1])
            self._record_shares(mode, own, int(r.conditional))
            if r.conditional:
                budget = gate_budget_loss(logits, weights.gate_budget, tokens.counted_T, step[0])
                total = total + weights.budget * budget / layers
                self._record(mode, "budget_loss", budget * step[0], local[0])
                open_T = 1 - logits.detach().softmax(-1)[:, 0]
                self._record(mode, "gate", open_T[tokens.counted_T].sum(), local[0])
            if weights.localized_balance:
                localized = self._localized_balance(logits, tokens, all_ranks)
                total = total + weights.localized_balance * localized * (here[0] / step[0]) / layers
                self._record(mode, "localized_balance_loss", localized * here[0] / layers, local[0] / layers)
            if weights.group:
                loss = classifier_loss(logits, tokens.class_T, tokens.tagged_T, step[2])
                total = total + weights.group * loss / layers
                right = (logits.argmax(-1) == tokens.class_T)[tokens.tagged_T].sum()
                self._record(mode, "group_loss", loss * step[2], local[2])
                self._record(mode, "group_accuracy", right, local[2])
            else:
                self._record_home_scores(mode, logits, tokens, local)
            if r.classifier_logits is not None:
                loss = classifier_loss(r.classifier_logits, tokens.class_T, tokens.tagged_T, step[2])
                total = total + weights.classifier * loss / classified
                if not weights.classifier:
                    continue
                right = (r.classifier_logits.argmax(-1) == tokens.class_T)[tokens.tagged_T].sum()
                self._record(mode, "classifier_loss", loss * step[2], local[2])
                self._record(mode, "classifier_accuracy", right, local[2])
        return total * scale

    def _localized_balance(self, logits_TN: torch.Tensor, tokens: _Tokens, all_ranks: bool) -> torch.Tensor:
        old_T, new_T = tokens.old_T, tokens.tagged_T & ~tokens.old_T
        delta = self.router_losses.localized_delta
        if not all_ranks:
            return localized_balance_loss(logits_TN, old_T, new_T, delta)
        importance_2N = language_importance(logits_TN.detach(), old_T, new_T)
        counts_21 = torch.stack([old_T.sum(), new_T.sum()]).to(importance_2N).unsqueeze(-1)
        sums = self._sum_over_ranks(torch.cat([counts_21, importance_2N], -1))
        return localized_balance_loss(logits_TN, old_T, new_T, delta, sums[:, 1:], sums[:, 0])

    # --- logging: every figure is a ratio of two sums, so that steps and ranks add up -----------------------------

    def _record(self, mode: str, name: str, numerator: torch.Tensor, denominator: torch.Tensor) -> None:
        pair = torch.stack([numerator.detach().double(), denominator.detach().double()])
        sums = self._sums[mode]
        sums[name] = sums[name] + pair if name in sums else pair

    def _record_shares(self, mode: str, selections_N: torch.Tensor, first: int) -> None:
        for expert, count in enumerate(selections_N, start=first):
            self._record(mode, f"expert_{expert}_share", count, selections_N.sum())

    def _record_home_scores(self, mode: str, logits_TN: torch.Tensor, tokens: _Tokens, local: torch.Tensor) -> None:
        home_T = logits_TN.detach().softmax(-1)[:, 0]
        self._record(mode, "expert_0_score_old", home_T[tokens.old_T].sum(), local[1])
        self._record(mode, "expert_0_score_new", home_T[tokens.tagged_T & ~tokens.old_T].sum(), local[2] - local[1])

    def _record_next_token_loss(self, mode: str, loss: torch.Tensor, labels: torch.Tensor, num_items: Any) -> None:
        targets = labels[..., 1:].ne(-100).sum()
        if mode == "train" and not self._trainer_divides(num_items) and num_items is not None:
            averaged = self.args.average_tokens_across_devices  # type: ignore[attr-defined]
            ranks = self.accelerator.num_processes // self.get_tp_size() if averaged else 1  # type: ignore[attr-defined]
            self._record(mode, "next_token_loss", loss / ranks * num_items, targets)
        else:
            self._record(mode, "next_token_loss", loss * targets, targets)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        mode = "eval" if any(name.startswith("eval_") for name in logs) else "train"
        prefix = "eval_" if mode == "eval" else ""
        logs.update({prefix + name: value for name, value in self._ratios(mode)})
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _ratios(self, mode: str) -> Iterator[tuple[str, float]]:
        sums, self._sums[mode] = self._sums[mode], {}
        if not sums:
            return
        summed = defaultdict(float)
        table = self.accelerator.reduce(torch.stack(list(sums.values())), "sum").tolist()  # type: ignore[attr-defined]
        for name, (numerator, denominator) in zip(sums, table, strict=True):
            if denominator:
                summed[name] = numerator / denominator
        yield from ((name, round(value, 6)) for name, value in summed.items())
