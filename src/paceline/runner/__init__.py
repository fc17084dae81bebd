"""Computing plans: rows, paged KV tensors, batches and sampling on a device."""
