"""The small random model as a folder, for commands that take one."""

from pathlib import Path

from tests.engine.small import small, tokenizer


def save_model(folder: Path) -> str:
    """512 positions, one token a byte, a chat template. What it answers has no meaning."""
    small().cpu().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def model_and_text(path: Path) -> Path:
    """A folder with the small random model, and `text.txt` in it."""
    save_model(path)
    (path / "text.txt").write_text("".join(f"{i * i % 97} and so on. " for i in range(60)))
    return path
