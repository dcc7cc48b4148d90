"""RouterLossMixin: adds the routers' losses to any Trainer of the ecosystem.

The model's forward pass knows nothing of these losses. The mixin records the routing while the trainer's own
`compute_loss` runs, adds the losses, and logs each part.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .losses import OLD, classifier_loss, expert_selections, language_prior_routing_loss, load_balance_loss

_NEEDS_LANGUAGES = (
    "The language-prior and classifier losses need language_classes (for each language id 0 = old, 1 = new) and "
    "batches with language_ids, the language id of each token."
)


@dataclass(frozen=True)
class RouterLossWeights:
    """`L = L_NTP + balance * L_balance + language_prior * L_LPR + classifier * L_CLS`
    (alpha, beta and gamma of MoE-LPR and LayerMoE)."""

    balance: float = 0.0
    language_prior: float = 0.0
    classifier: float = 0.0


@dataclass
class _Tokens:
    """Masks of one batch, flattened to `[T]`, and the counts that the losses are divided by."""

    counted_T: torch.Tensor
    old_T: torch.Tensor
    tagged_T: torch.Tensor
    class_T: torch.Tensor

    def counts(self) -> torch.Tensor:
        return torch.stack([mask.sum() for mask in (self.counted_T, self.old_T, self.tagged_T)]).double()


class RouterLossMixin:
    """Put in front of a Trainer class: `class MyTrainer(RouterLossMixin, Trainer)`.

    A batch may carry `language_ids` `[batch, sequence]`, the language of each token, negative where unknown.

    Language-prior and classifier losses are means over the tokens of the whole optimizer step: invariant to how it is
    split into micro-batches and ranks, and to padding. The balance loss is not linear in the tokens: it balances
    each micro-batch (over all ranks), and an optimizer step is the mean of its micro-batches weighted by tokens.

    Args:
        router_losses: weights of the losses.
        language_classes: for each language id its class: 0 for an old language, 1 for a new one.

    Raises:
        ValueError: reentrant gradient checkpointing or label smoothing is on, or a loss that needs `language_classes`
            is on without them.
    """

    def __init__(
        self,
        *args: Any,
        router_losses: RouterLossWeights | None = None,
        language_classes: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.router_losses = router_losses or RouterLossWeights()
        self._language_classes = torch.tensor(language_classes) if language_classes is not None else None
        self._step_counts: torch.Tensor | None = None  # tokens, old tokens, tagged tokens of the whole step
        self._sums: dict[str, dict[str, torch.Tensor]] = {"train": {}, "eval": {}}
        self._check_arguments()

    def create_accelerator_and_postprocess(self) -> None:
        training: Any = self.args  # type: ignore[attr-defined]
        if training.ddp_find_unused_parameters is None:
            # DDP looks for unused parameters in the graph of the model's output, which the router losses are no part
            # of. There are none: idle experts run on empty batches, and every loss is added, if with weight 0.
            training.ddp_find_unused_parameters = False
        super().create_accelerator_and_postprocess()  # type: ignore[misc]

    def _check_arguments(self) -> None:
        training: Any = self.args  # type: ignore[attr-defined]
        if training.activation_checkpointing and (training.activation_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(
                "Reentrant gradient checkpointing silently drops the gradient of the router losses: set "
                'activation_checkpointing_kwargs={"use_reentrant": False}.'
            )
        if training.label_smoothing_factor:
            raise ValueError(
                "label_smoothing_factor is not supported: Trainer smooths the unshifted labels of models that it does "
                "not know by name. Set it to 0."
            )
        if self._needs_languages and self._language_classes is None:
            raise ValueError(_NEEDS_LANGUAGES)

    @property
    def _needs_languages(self) -> bool:
        return bool(self.router_losses.language_prior or self.router_losses.classifier)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        if "language_ids" not in self._signature_columns:  # type: ignore[attr-defined]
            self._signature_columns: list = [*self._signature_columns, "language_ids"]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple:
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        counts = torch.zeros(3, dtype=torch.double, device=device)
        for batch in batches:
            counts += self._tokens(batch).counts().to(device)
        self._step_counts = self.accelerator.reduce(counts, "sum").clamp(min=1)  # type: ignore[attr-defined]
        return batches, num_items

    def compute_loss(
        self, model: Any, inputs: dict, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = dict(inputs)
        tokens = self._tokens(inputs)
        inputs.pop("language_ids", None)
        labels = inputs.get("labels")
        expanded = self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]
        with expanded.capture_routing() as routing:
            loss, outputs = super().compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
            )
        if not len(routing):
            raise ValueError("No layer of the model is expanded: there is no router to train.")
        self._check_gradients(model, routing)
        mode = "train" if model.training else "eval"
        if labels is not None:
            self._record_next_token_loss(mode, loss, labels, num_items_in_batch)
        total = loss + self._router_loss(mode, routing, tokens, self._step_scale(model, num_items_in_batch))
        return (total, outputs) if return_outputs else total

    def _tokens(self, inputs: dict) -> _Tokens:
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
    def _check_gradients(model: Any, routing: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        routers_train = any(p.requires_grad for name, p in model.named_parameters() if name.endswith("router.weight"))
        if routers_train and not any(layer.router_logits.requires_grad for layer in routing):
            raise ValueError(
                "The router logits carry no gradient although the routers train. Reentrant gradient checkpointing does "
                'this: set activation_checkpointing_kwargs={"use_reentrant": False}.'
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

    def _trainer_divides(self, num_items_in_batch: Any) -> bool:
        # The rule in Trainer.training_step.
        scaled = self.loss_is_scaled_for_ga  # type: ignore[attr-defined]
        if scaled is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None  # type: ignore[attr-defined]
            scaled = counted or self.compute_loss_func is not None  # type: ignore[attr-defined]
        return not scaled

    def _router_loss(self, mode: str, routing: Any, tokens: _Tokens, scale: float | None) -> torch.Tensor:
        weights, layers = self.router_losses, len(routing)
        selections = [expert_selections(r.router_logits, r.top_k, tokens.counted_T) for r in routing]
        local = tokens.counts().float()
        if scale is None:
            here, step, selections_all, scale = local.clamp(min=1), local.clamp(min=1), selections, 1.0
        else:
            flat = self.accelerator.reduce(torch.cat([local, *selections]), "sum")  # type: ignore[attr-defined]
            here = flat[:3].clamp(min=1)
            selections_all = list(flat[3:].split([len(s) for s in selections]))
            step = self._step_counts.to(here)  # type: ignore[union-attr]
        total = selections[0].new_zeros(())
        classified = sum(r.classifier_logits is not None for r in routing)
        for r, own, everyones in zip(routing, selections, selections_all, strict=True):
            logits = r.router_logits
            balance = load_balance_loss(logits, r.top_k, tokens.counted_T, everyones, here[0])
            prior = language_prior_routing_loss(logits, tokens.old_T, step[1])
            total = total + weights.balance * balance * (here[0] / step[0]) / layers
            total = total + weights.language_prior * prior / layers
            self._record(mode, "balance_loss", balance * here[0] / layers, local[0] / layers)
            self._record(mode, "language_prior_loss", prior * step[1], local[1])
            self._record_routing(mode, logits, own, tokens, local)
            if r.classifier_logits is not None:
                loss = classifier_loss(r.classifier_logits, tokens.class_T, tokens.tagged_T, step[2])
                total = total + weights.classifier * loss / classified
                if not weights.classifier:
                    continue
                right = (r.classifier_logits.argmax(-1) == tokens.class_T)[tokens.tagged_T].sum()
                self._record(mode, "classifier_loss", loss * step[2], local[2])
                self._record(mode, "classifier_accuracy", right, local[2])
        return total * scale

    # --- logging: every figure is a ratio of two sums, so that steps and ranks add up -----------------------------

    def _record(self, mode: str, name: str, numerator: torch.Tensor, denominator: torch.Tensor) -> None:
        pair = torch.stack([numerator.detach().double(), denominator.detach().double()])
        sums = self._sums[mode]
        sums[name] = sums[name] + pair if name in sums else pair

    def _record_routing(
        self, mode: str, logits_TN: torch.Tensor, selections_N: torch.Tensor, tokens: _Tokens, local: torch.Tensor
    ) -> None:
        home_T = logits_TN.detach().softmax(-1)[:, 0]
        self._record(mode, "expert_0_score_old", home_T[tokens.old_T].sum(), local[1])
        self._record(mode, "expert_0_score_new", home_T[tokens.tagged_T & ~tokens.old_T].sum(), local[2] - local[1])
        for expert, count in enumerate(selections_N):
            self._record(mode, f"expert_{expert}_share", count, selections_N.sum())

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
