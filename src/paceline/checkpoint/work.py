"""What a token and a step of a model cost, counted from the shape its checkpoint declares."""

from __future__ import annotations

from paceline.checkpoint.spec import ModelSpec
from paceline.costs.work import ModelWork


def model_work(spec: ModelSpec, *, weight_bytes: int, kv_token_bytes: float) -> ModelWork:
    """`weight_bytes` are those of all tensors as they are kept."""
    num_layer = sum(_layer_parameters(spec, layer) for layer in range(spec.num_layers))
    num_head = spec.vocab_size * spec.hidden_size
    step_bytes = None
    if spec.experts is None:
        # Only a few rows of the embedding are read; where it is not the output matrix too, it is left out.
        unread = 0.0 if spec.tied_embeddings else num_head / (num_layer + 2 * num_head)
        step_bytes = weight_bytes * (1.0 - unread)
    return ModelWork(
        token_flops=2.0 * num_layer,
        product_flops=4.0 * spec.num_layers * spec.num_heads * spec.head_dim,
        logit_flops=2.0 * num_head,
        kv_token_bytes=kv_token_bytes,
        step_bytes=step_bytes,
    )


def _layer_parameters(spec: ModelSpec, layer: int) -> int:
    """Weights that a token is multiplied with in one layer."""
    attention = spec.hidden_size * spec.head_dim * 2 * (spec.num_heads + spec.num_kv_heads)
    if spec.experts is not None and spec.has_experts(layer):
        experts = spec.experts
        chosen = experts.per_token * 3 * spec.hidden_size * experts.intermediate_size
        return attention + chosen + spec.hidden_size * experts.num_experts
    return attention + 3 * spec.hidden_size * spec.intermediate_size
