"""Triton kernels, one operation per file: the kernel, a thin wrapper, and a plain torch reference beside it.

They know tensors and nothing else: no rows of requests, no scheduler, no model. Wrappers allocate nothing unless
they say so and read nothing back, so that every one of them can be captured in a CUDA graph. Importing this package
needs no Triton; importing one of its modules does.

Shapes: keys and values of one layer are [blocks, kv_heads, BLOCK_SIZE, head_dim]; offsets into them are 64-bit.
Counts are never compile-time constants: a batch of another size must not compile anything.
"""

BLOCK_SIZE = 64  # token slots per block of keys and values: one tile of every attention kernel
