"""RouterLossMixin: adds the routers' losses to any Trainer of the ecosystem.

The model's forward pass does not compute these losses. The mixin records the routing while the trainer's own
`compute_loss` runs, adds the losses, and logs each part.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from transformers import TrainingArguments

from ..core.errors import InputError
from ..core.schema import checked
from ..modeling.expanded_ffn import ExpandedFFN, ExpandedLayer
from ..modeling.part_joined import joins_packs
from ..modeling.routing import TokenClasses
from .encoder_decoder import (
    LANGUAGE_COLUMNS,
    TOKEN_COLUMNS,
    by_stack,
    sides,
    target_loss,
    with_decoder_inputs,
    without_rows,
)
from .evaluation import EvaluationMixin
from .freezing import check_is_expanded, freeze_fitted
from .log_lines import LogLines, took_away_usual
from .losses import (
    LOGGED,
    OLD,
    LayerLoss,
    LossBatch,
    RouterLoss,
    TokenCounts,
    TokenMasks,
    checked_losses,
    expert_selections,
)
from .publishing import PublishingMixin
from .routing_capture import FirstPass, Metrics, record_routing, without_virtual_tokens
from .watching import WatchingMixin

# transformers 5.23 introduced the later name; earlier versions have only the older one.
CHECKPOINTING_NAMES = ("activation_checkpointing", "gradient_checkpointing")
CHECKPOINTING = next(name for name in CHECKPOINTING_NAMES if name in TrainingArguments.__dataclass_fields__)
NOT_REENTRANT = (
    "reentrant gradient checkpointing silently drops the gradient of the router losses: use_reentrant=False."
)
FULL_EVALUATION = "it rounds the weights of the model that is then saved, those of the base too"


def classes_matter(config: Any) -> bool:
    """Whether a row's language says which experts it takes."""
    return bool(getattr(config, "exclusive_experts", False))


def check_arguments(args: Any, is_encoder_decoder: bool) -> None:
    """Refuses training arguments that would drop a gradient, or move or round weights without a word."""
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name, False):
            raise InputError(f"{name}: {FULL_EVALUATION}. Leave it out; `bf16: true` evaluates under autocast.")
    if (getattr(args, f"{CHECKPOINTING}_kwargs") or {}).get("use_reentrant"):
        raise InputError(f"{CHECKPOINTING}_kwargs: {NOT_REENTRANT}")
    if args.label_smoothing_factor and not is_encoder_decoder:
        raise InputError("label_smoothing_factor: Trainer smooths the unshifted labels of a decoder. Set it to 0.")


class RouterLossMixin(WatchingMixin, EvaluationMixin, PublishingMixin):
    """Put in front of a Trainer class: `class MyTrainer(RouterLossMixin, Trainer)`.

    A batch may carry `language_ids` `[batch, sequence]`, the language of each token, negative where unknown. For an
    encoder-decoder these are the source's, and `decoder_language_ids` `[batch, target]` the target's; a token of the
    decoder counts where it has a label. Its loss is then the mean over the target's tokens of the whole step.

    A loss that is a mean over tokens is the mean over the whole optimizer step: it depends neither on the division into
    micro-batches and ranks nor on padding. The balance losses are not linear in the tokens: they balance each
    micro-batch (over all ranks), and an optimizer step is the mean of its micro-batches weighted by tokens.

    Args:
        router_losses: `L = L_NTP + sum of coef * loss`, such as `[BalanceLoss(0.01), LanguagePriorLoss(0.1)]`. By
            default balance, language-prior and budget loss are logged and none is added.
        language_classes: the class of each language id: 0, old; 1, new; with the group loss, its language group.

    Raises:
        InputError: the losses, the arguments or the classes are wrong, or would not do what they say; or no trained
            parameter has a gradient in the first 20 steps.
    """

    compute_loss_func: Any
    _is_encoder_decoder = False  # whether the model is an encoder-decoder, with tokens of a source and of a target

    @checked
    def __init__(
        self,
        *args: Any,
        router_losses: Any = None,
        language_classes: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        # Set first, because a Trainer may prepare its data set in its constructor.
        self.router_losses = LOGGED if router_losses is None else checked_losses(router_losses)
        self._language_classes = torch.tensor(language_classes) if language_classes is not None else None
        self._step_counts: torch.Tensor | None = None  # tokens, old tokens, tagged tokens of the whole step
        self._router_metrics = Metrics()
        super().__init__(*args, **kwargs)
        freeze_fitted(self._expanded)
        self._shown = self.shown(took_away_usual(self))
        self.add_callback(self._shown)
        config = getattr(self._expanded, "config", None)
        self._is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        if self._is_encoder_decoder and self.compute_loss_func is None:
            self.compute_loss_func = partial(target_loss, label_smoothing=self.args.label_smoothing_factor)
        self._check_arguments()

    def shown(self, shows: bool) -> LogLines:
        """The callback that shows the training, in place of the library's unless another one shows it."""
        return LogLines(shows)

    def create_accelerator_and_postprocess(self) -> None:
        if self.args.ddp_find_unused_parameters is None:
            # DDP looks for unused parameters in the graph of the model's output, which excludes the router losses. No
            # parameter is unused: idle experts run on empty batches, and all routing enters the loss, even 0 times.
            self.args.ddp_find_unused_parameters = False
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled and self.accelerator.state.deepspeed_plugin.hf_ds_config.is_zero3():
            _fetch_experts_together(self.model)

    def _check_arguments(self) -> None:
        check_arguments(self.args, self._is_encoder_decoder)
        wrong = [loss for loss in self._active_losses() if not loss.for_encoder_decoders]
        if wrong and self._is_encoder_decoder:
            raise InputError(f"The {wrong[0].name} loss is for decoders, and the model is an encoder-decoder.")
        if getattr(self.args, "router_aux_loss_coef", None):
            raise InputError(
                "router_aux_loss_coef weighs the auxiliary loss of a mixture's own routers, which is off in an "
                "expanded model. Leave it out; router_losses are for the new routers."
            )
        if self._needs_languages and self._language_classes is None:
            raise self._without_languages()
        self._check_classes([] if self._language_classes is None else self._language_classes.tolist())
        if self.router_losses:
            check_is_expanded(self._expanded)
        _check_tied_embeddings(self._expanded)

    @property
    def _expanded(self) -> Any:
        """The model itself, without its wrappers for training."""
        return self.accelerator.unwrap_model(self.model)

    def _check_classes(self, classes: Iterable[int]) -> None:
        """Refuses a class of languages that the model does not have: its tokens would take no expert."""
        config = self._expanded.config
        if not (counts := getattr(config, "num_experts_per_layer", None)):
            return  # no expanded model
        has_groups = hasattr(config, "language_groups") or any(loss.needs_groups for loss in self._active_losses())
        last = max(counts) - 1 if has_groups else 1 + len(config.earlier_experts_per_layer or ())
        if wrong := [one for one in classes if not 0 <= one <= last]:
            raise InputError(f"language_classes has the class {wrong[-1]}, but the model has 0 to {last}.")

    @property
    def _needs_languages(self) -> bool:
        return any(loss.needs_languages for loss in self._active_losses())

    def _active_losses(self) -> list[RouterLoss]:
        """The losses that are added, not only logged."""
        return [loss for loss in self.router_losses if loss.coef]

    def _who_needs_languages(self) -> str:
        names = [loss.name for loss in self._active_losses() if loss.needs_languages]
        return f"Losses that need languages: {', '.join(names)}."

    def _without_languages(self) -> InputError:
        columns = " and ".join(LANGUAGE_COLUMNS[: 1 + self._is_encoder_decoder])
        return InputError(
            f"The losses need language_classes (for each language id its class) and batches with {columns}, the "
            f"language id of each token. {self._who_needs_languages()}"
        )

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns = LANGUAGE_COLUMNS[: 1 + self._is_encoder_decoder]
        self._signature_columns: list = list(dict.fromkeys([*self._signature_columns, *columns]))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple:
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = torch.zeros(1 + self._is_encoder_decoder, 2 + self._languages(), dtype=torch.double, device=device)
        for batch in batches:
            counts += self._counts(batch).to(device)
        self._count_step(self._sum_over_ranks(counts))
        return batches, num_items

    def _languages(self) -> int:
        """The number of language ids."""
        return 0 if self._language_classes is None else len(self._language_classes)

    def _counts(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """`[1, 2 + languages]` of a decoder's batch, `[2, ...]` of an encoder-decoder's: rows, tokens of no known
        language, and those of each language id; padding excluded."""
        languages, counts = self._languages(), []
        for counted, ids in self._sides(inputs):
            ids = torch.full_like(counted, -1, dtype=torch.long) if ids is None else ids.long()
            place = ids.where((ids >= 0) & (ids < languages), -1).flatten() + 2
            of_side = torch.zeros(2 + languages, dtype=torch.double, device=counted.device)
            of_side[0] = len(counted)
            counts.append(of_side.scatter_add(0, place, counted.flatten().double()))
        return torch.stack(counts)

    def _count_step(self, counts: torch.Tensor) -> None:
        """Keeps the counts of an optimizer step, over all its micro-batches and ranks: all tokens, those of old
        languages, those of a known language."""
        tokens = counts[:, 1:]
        known = torch.zeros_like(tokens[0]) if self._language_classes is None else torch.ones_like(tokens[0])
        known[0] = 0
        old = known.clone()
        if self._language_classes is not None:
            old[1:] = (self._language_classes == OLD).to(old)
        sums = [tokens.sum(-1), (tokens * old).sum(-1), (tokens * known).sum(-1)]
        self._step_counts = torch.stack(sums, -1).clamp(min=1)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self.accelerator.distributed_type.startswith("MULTI_"):
            # After `evaluate` accelerate takes the model as prepared, without DDP: each rank would train by itself.
            self.model._is_accelerate_prepared = False
        try:
            return super().train(*args, **kwargs)
        finally:
            self._shown.close()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self._shown.end_evaluation()

    def training_step(self, model: Any, inputs: dict, num_items_in_batch: Any = None) -> torch.Tensor:
        # To the end of the backward pass, in which checkpointing runs the forward pass again.
        with self.asking(inputs, as_in_training=True):
            loss = super().training_step(model, inputs, num_items_in_batch)
        self.after_backward(loss)
        return loss

    @contextmanager
    def asking(self, inputs: Mapping[str, Any], as_in_training: bool = False) -> Iterator[None]:
        """Inside, the model, and a reference model beside it (DPO's), routes as a step on these inputs needs it."""
        models = (one for one in (self.model, getattr(self, "ref_model", None)) if one is not None)
        found = (getattr(self.accelerator.unwrap_model(one), "routing_control", None) for one in models)
        with ExitStack() as stack:
            if controls := [control for control in found if control is not None]:
                classes = self._token_classes(inputs)
                for control in controls:
                    stack.enter_context(control.asking(token_classes=classes, as_in_training=as_in_training))
            yield

    def after_backward(self, loss: torch.Tensor) -> None:
        """Called after the backward pass of each micro-batch, with its loss."""

    def compute_loss(
        self, model: Any, inputs: dict, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        rows = None if model.training else self._rows_that_count(inputs)
        tokens = self._tokens(inputs if rows is None else without_rows(inputs, rows))
        inputs = {name: value for name, value in inputs.items() if name not in LANGUAGE_COLUMNS}
        expanded = self.accelerator.unwrap_model(model)
        if not hasattr(expanded, "capture_routing"):  # a dense model, which has no router
            return self._text_loss(model, inputs, return_outputs, num_items_in_batch, logs=not model.training)
        if self._is_encoder_decoder:
            inputs = with_decoder_inputs(expanded, inputs)
        own_inputs = dict(inputs)  # the trainer may change its inputs
        wants_outputs = return_outputs or any(loss.needs_outputs for loss in self.router_losses)
        with expanded.capture_routing() as captured:
            captured.layers = FirstPass()
            result = self._text_loss(model, inputs, wants_outputs, num_items_in_batch)
        loss, outputs = result if wants_outputs else (result, None)
        self._check_outputs(model, outputs)
        stacks = []
        for layers, side in zip(by_stack(expanded.config, captured.layers), TOKEN_COLUMNS, strict=False):
            stacks.append([without_virtual_tokens(layer, own_inputs[side]) for layer in layers])
        self._check_gradients(model, expanded, [layer for layers in stacks for layer in layers])
        mode = "train" if model.training else "eval"
        scale = self._step_scale(model, num_items_in_batch)
        of_the_model = {"model": expanded, "inputs": own_inputs, "outputs": outputs}
        total = loss
        for stack, routing in enumerate(stacks):
            if routing or not any(stacks):
                batch = self._loss_batch(mode, stacks, stack, tokens[stack], scale is not None, **of_the_model)
                record_routing(batch, expert_0_is_old=not any(loss.needs_groups for loss in self._active_losses()))
                total = total + self._router_loss(batch, stack, model.training) * (1.0 if scale is None else scale)
        return (total, outputs) if return_outputs else total

    def _text_loss(
        self, model: Any, inputs: dict, return_outputs: bool, num_items_in_batch: Any, logs: bool = True
    ) -> Any:
        """The trainer's own loss, recorded; 0 where nothing is predicted, of which the library's mean is no number."""
        labels, count = inputs.get("labels"), num_items_in_batch
        targets = None if labels is None else self._targets(labels)
        if count is not None:
            count = (targets if targets is not None and not model.training else torch.as_tensor(count)).clamp(min=1)
        result = self.next_token_loss(model, inputs, return_outputs, count)
        loss, outputs = result if return_outputs else (result, None)
        if targets is not None and not model.training:
            loss = loss.where(targets > 0, 0.0)
            self._record_loss("next_token", loss.detach() * targets, targets)
        if targets is not None and logs:
            nats = loss * targets
            if model.training and not self._trainer_divides(count) and count is not None:
                averaged = self.args.average_tokens_across_devices
                ranks = self.accelerator.num_processes // self.get_tp_size() if averaged else 1
                nats = loss / ranks * count
            self._router_metrics.record("train" if model.training else "eval", "next_token_loss", nats, targets)
        return (loss, outputs) if return_outputs else loss

    def next_token_loss(self, model: Any, inputs: dict, return_outputs: bool, num_items_in_batch: Any) -> Any:
        """The trainer's own loss, without the routers'."""
        return super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)

    def _token_classes(self, inputs: Mapping[str, Any]) -> TokenClasses | None:
        """For exclusive experts, the class of each token by its row's language, and those that occur; None if no token
        of the batch has a known language: the newest expansion's experts run then."""
        config = self._expanded.config
        if not classes_matter(config):
            return None
        tokens = None if self._language_classes is None else self._tokens(inputs)[0]
        is_known = tokens is not None and bool(tokens.tagged_T.any())
        if not is_known and joins_packs(config) and (self.model.training or not config.declares("judges")):
            raise InputError(
                "The model joins packs, and a row's language says whose experts it takes: give a column `language`, or "
                "language_classes and batches with `language_ids`."
            )
        if tokens is None:
            return None
        newest = torch.full_like(tokens.class_T, len(config.earlier_experts_per_layer or ()) + 1)
        # Padding and tokens without a language are the newest expansion's.
        class_T = torch.where(tokens.tagged_T, tokens.class_T, newest)
        return TokenClasses(class_T.to(self.args.device), class_T.unique().tolist())

    def _tokens(self, inputs: Mapping[str, Any]) -> list[TokenMasks]:
        """The masks of a decoder's tokens, or of an encoder's and of a decoder's."""
        return [self._masks(counted.flatten(), ids) for counted, ids in self._sides(inputs)]

    def _sides(self, inputs: Mapping[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        if "input_ids" not in inputs:
            raise InputError(
                f"{type(self).__name__}'s batches hold no input_ids, whose tokens the router losses count: this "
                "trainer takes expanded models, but not RouterLossMixin."
            )
        return sides(inputs, self._is_encoder_decoder)

    def _masks(self, counted: torch.Tensor, ids: torch.Tensor | None) -> TokenMasks:
        if ids is None or self._language_classes is None:
            if self._needs_languages:
                raise self._without_languages()
            nothing = torch.zeros_like(counted)
            return TokenMasks(counted, nothing, nothing, nothing.long())
        ids = ids.flatten().long()
        tagged = counted & (ids >= 0)
        self._language_classes = self._language_classes.to(ids.device)  # once: a copy lets the host wait
        classes = self._language_classes[ids.clamp(min=0)]
        return TokenMasks(counted, tagged & (classes == OLD), tagged, classes)

    def _check_outputs(self, model: Any, outputs: Any) -> None:
        """Refuses logits without gradient for a loss that reads them, as TRL's Trainers return."""
        readers = [loss.name for loss in self._active_losses() if loss.needs_outputs]
        logits = getattr(outputs, "logits", None)
        if readers and model.training and logits is not None and torch.is_grad_enabled() and not logits.requires_grad:
            raise InputError(
                f"The {readers[0]} loss reads logits, but {type(self).__name__} returns them without gradient: leave "
                "it out, or train with MoESFTTrainer or a stage's Trainer."
            )

    @staticmethod
    def _check_gradients(model: Any, expanded: Any, routing: list) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        # PEFT wraps a router that it trains: the parameter's name then has another ending, in the same module.
        routers = [ffn.router for ffn in expanded.expanded_ffns().values() if ffn.router is not None]
        routers_train = any(parameter.requires_grad for router in routers for parameter in router.parameters())
        if routers_train and not any(layer.router_logits.requires_grad for layer in routing):
            raise InputError(f"The router logits carry no gradient although the routers train: {NOT_REENTRANT}")

    def _step_scale(self, model: Any, num_items_in_batch: Any) -> float | None:
        """The factor from this rank's share of a step's mean to the trainer's expected loss; None in evaluation."""
        if not model.training or self._step_counts is None:
            return None
        # Gradients are averaged over ranks, so each rank's share counts once for each rank.
        scale = float(self.accelerator.num_processes // self.get_tp_size())
        if self._trainer_divides(num_items_in_batch):
            scale *= self.current_gradient_accumulation_steps
        return scale

    def _sum_over_ranks(self, counts: torch.Tensor) -> torch.Tensor:
        # The ranks of a tensor-parallel group hold the same batch, which counts once.
        return self.accelerator.reduce(counts, "sum") / self.get_tp_size()

    def _trainer_divides(self, num_items_in_batch: Any) -> bool:
        # The rule in Trainer.training_step.
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = counted or self.compute_loss_func is not None
        return not scaled

    def _loss_batch(
        self, mode: str, stacks: list, stack: int, tokens: TokenMasks, in_step: bool, **of_the_model: Any
    ) -> LossBatch:
        routing = stacks[stack]
        others = [layer for number, layers in enumerate(stacks) if number != stack for layer in layers]
        selections = [expert_selections(r.routed_logits, r.top_k, tokens.counted_T) for r in routing]
        counts = tokens.counts().float()
        if in_step:
            flat = self._sum_over_ranks(torch.cat([counts, *selections]))
            micro_batch, step = flat[:3].clamp(min=1), self._step_counts[stack].to(flat)  # type: ignore[index]
            selections = list(flat[3:].split([len(s) for s in selections]))
        else:
            micro_batch = step = counts.clamp(min=1)
        return LossBatch(
            routing, tokens, TokenCounts(*counts), TokenCounts(*micro_batch), TokenCounts(*step), selections,
            self._sum_over_ranks if in_step else torch.clone, partial(self._router_metrics.record, mode),
            **of_the_model, others=others,
        )  # fmt: skip

    def _router_loss(self, batch: LossBatch, stack: int = 0, training: bool = True) -> torch.Tensor:
        # Routers and classifiers that no loss reads stay in the graph, so that all ranks have the same graph.
        logits = [
            tensor for r in batch.routing for tensor in (r.router_logits, r.classifier_logits) if tensor is not None
        ]
        total = 0.0 * torch.stack([tensor.sum() for tensor in logits]).sum() if logits else torch.zeros(())
        for loss in self.router_losses:
            if logits or not isinstance(loss, LayerLoss):
                share = loss.weighted(batch)
                total = total + share
                if not training:
                    count = getattr(batch.local, loss.over)
                    self._record_loss(f"{loss.name} {stack}", share.detach() * count, count)
        return total

    def prediction_step(self, model: Any, inputs: dict, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        if self._generates(prediction_loss_only):
            inputs = {name: value for name, value in inputs.items() if name not in LANGUAGE_COLUMNS}
        with RouterLossMixin.asking(self, inputs):  # without what a subclass asks of a training step
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        # Of one of several sets the prefix has the set's name, too.
        ends = (name.removesuffix("runtime") for name in logs if name.endswith("_runtime") and name != "train_runtime")
        prefix = next(ends, "eval_" if any(name.startswith("eval_") for name in logs) else "")
        mode = "eval" if prefix else "train"
        ratios = self._router_metrics.ratios(mode, self._sum_over_all)
        logs.update({prefix + name: round(value, 6) + 0.0 for name, value in ratios})  # no -0
        super().log(logs, *args, **kwargs)


def _fetch_experts_together(model: Any) -> None:
    """Makes ZeRO-3 fetch an expanded FFN, or a layer with experts beside its FFN, in one piece: a rank that fetched
    only its tokens' experts would wait for ever for ranks whose tokens chose other experts."""
    from deepspeed.utils import set_z3_leaf_module

    def is_piece(module: Any) -> bool:
        beside = (child for child in module.children() if isinstance(child, ExpandedLayer))
        return isinstance(module, ExpandedFFN) or any(not isinstance(child, ExpandedFFN) for child in beside)

    pieces = [module for module in model.modules() if is_piece(module)]
    if not pieces:  # a dense model
        return
    for piece in pieces:
        set_z3_leaf_module(piece, True)
    # DeepSpeed ends the backward pass of such a piece when it has the gradient of the piece's input. With frozen
    # embeddings the first piece's input would have no gradient.
    model.enable_input_require_grads()


def _check_tied_embeddings(model: Any) -> None:
    """Refuses tied embeddings that would train under transformers' own FSDP."""
    if not getattr(model, "is_distributed_loading_by_transformers", False):
        return
    tied_and_trained = model.all_tied_weights_keys and model.get_input_embeddings().weight.requires_grad
    split = model.config.distributed_config
    replicas = getattr(split, "dp_size", split.fsdp_size)  # `dp_size` came with transformers 5.23
    if replicas > 1 and tied_and_trained:
        raise InputError(
            "The embeddings train and are tied to the head, which under transformers' own FSDP keeps their old values "
            "after the first step. Let accelerate split the model (fsdp2.yaml), or freeze the embeddings."
        )
