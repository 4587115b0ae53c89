"""OpenAI-compatible HTTP in front of the engine process. Nothing here imports torch."""
