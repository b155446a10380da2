"""Tasks with answers: prompts made beforehand into a file, then many rows that share each prompt's KV."""
