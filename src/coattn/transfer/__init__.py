"""Prompts that another process reads: `coattn serve --role prefill` and `--role decode`.

layout      where K, V, queries and logits of a prompt lie in one piece of memory, and whether both sides fit
address     tcp:// and shm:// addresses
channel     frames over a socket: who may talk, what was said, unchanged
lease       how long the other side may still be believed to be there, and what else ends a wait for it
transport   how the bytes cross: over the socket, or in memory that both processes map
job         one prompt on its way: each layer is sent while the next ones compute
prefill     reads prompts for other processes, one after the other
link        one connection: owns the memory, asks, and checks what comes
decode      chooses who reads a prompt; if no process can, reads it here
"""
