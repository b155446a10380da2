"""SnapKV: what a prompt's last queries weighed most, and all that came later."""
