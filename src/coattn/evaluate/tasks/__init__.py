"""Tasks with answers over long prompts: made beforehand into a file, then run under many rows that share each prompt's KV."""
