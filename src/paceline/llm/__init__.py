"""The engine in the caller's process: `LLM` for batches, `AsyncLLM` for streams, and what both make of text."""
