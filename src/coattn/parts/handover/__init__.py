"""How a step hands work to the CPU: at once, by a thread, or by the mailboxes of a captured step."""
