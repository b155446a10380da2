"""`coattn chat`: a conversation in the terminal, with an engine in this process or a server elsewhere."""
