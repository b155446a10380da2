"""GGUF files as models: their metadata, their tokenizer, and their conversion to a Transformers folder."""
