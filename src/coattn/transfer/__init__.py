"""Prompts that another process reads: `coattn serve --role prefill` and `--role decode`.

layout      where K, V, queries and logits of a prompt lie in one piece of memory, the same on both sides
address     tcp://, shm:// and nixl:// addresses
channel     frames over a socket: who may talk, what was said, unchanged
lease       how long the other side may still be believed to be there
transport   what the ways of the bytes have in common; shm, tcp and nixl are the ways
prefill     reads prompts and sends each layer while the next ones compute
decode      owns the memory, asks, checks, and reads a prompt itself where nobody else does
"""
