"""What clients send, after OpenAI's published shapes and the fields that vLLM's clients know."""
