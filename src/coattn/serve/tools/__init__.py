"""Functions that a model may call: how its family writes a call, what it may write, and how it is read.

family    the forms of Hermes and Qwen, Llama 3, Mistral      grammar   what may be written, for llguidance
use       what a request says of tools                        parser    text in, message and chunks out
custom    tools that are no functions
"""
