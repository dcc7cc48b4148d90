"""Prepares and checks models that are split over ranks for training."""

from typing import Any


def fetch_experts_together(model: Any) -> None:
    """Makes ZeRO-3 fetch an expanded FFN in one piece: a rank that fetched only its tokens' experts would wait for ever
    for ranks whose tokens chose other experts."""
    from deepspeed.utils import set_z3_leaf_module

    for ffn in model.expanded_ffns().values():
        set_z3_leaf_module(ffn, True)
    # DeepSpeed ends the backward pass of such a piece when it has the gradient of the piece's input. With frozen
    # embeddings the first piece's input would have no gradient.
    model.enable_input_require_grads()


def check_tied_embeddings(model: Any) -> None:
    """Refuses tied embeddings that would train under transformers' own FSDP.

    Raises:
        ValueError: the embeddings are tied and train.
    """
    if not getattr(model, "is_distributed_loading_by_transformers", False):
        return
    tied_and_trained = model.all_tied_weights_keys and model.get_input_embeddings().weight.requires_grad
    split = model.config.distributed_config
    replicas = getattr(split, "dp_size", split.fsdp_size)  # `dp_size` came with transformers 5.23
    if replicas > 1 and tied_and_trained:
        raise ValueError(
            "The embeddings train and are tied to the head, which under transformers' own FSDP "
            "(DistributedConfig(fsdp_size=...)) keeps their old values after the first step. Let accelerate split the "
            "model (fsdp2.yaml), or freeze the embeddings."
        )
