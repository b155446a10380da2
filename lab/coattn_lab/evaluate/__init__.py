"""How much a method costs in quality: perplexity and fidelity to full attention."""
