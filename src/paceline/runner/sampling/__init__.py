"""Choosing the next token of many rows: rules over logits, truncation, the draw, and log-probabilities.

The definitions are in docs/reference/sampling.md. They are stated over one row's logits, so that a row gets
the same token alone, in any batch, in any row, and on any device that follows them.
"""
