"""Text on both sides of tokens: tokenizers, incremental decoding, stop strings, chat templates. No torch."""
