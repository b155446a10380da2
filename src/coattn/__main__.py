"""`coattn`, and `python -m coattn`."""

import sys


def main() -> None:
    """Runs the command line. Ctrl-C ends it in one word, also while it is still being imported."""
    try:
        from coattn.cli.main import main as run
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
