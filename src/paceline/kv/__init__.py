"""The paged KV cache as integers: blocks, reference counts, block tables, prefixes, swaps. No tensors here."""
