"""When each piece of a layer's work runs."""
