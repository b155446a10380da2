"""Every import of Transformers: architectures, the attention hook, the cache, loading."""
