"""What a method needs to know of a model beforehand, from a text that the model reads."""
