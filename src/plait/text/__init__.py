"""Text in and out of token ids: tokenizers, chat templates, incremental decoding and stop strings. Torch-free."""
