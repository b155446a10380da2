"""`coattn`, and `python -m coattn`."""

import os


def stop(*_: object) -> None:
    """Ends the process in one word: what is being imported could make something else of an exception."""
    os.write(2, b"stopped.\n")
    os._exit(130)


def main() -> None:
    """Runs the command line. Ctrl-C ends it in one word, also while it is still being imported."""
    try:
        import signal

        before = signal.getsignal(signal.SIGINT)
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, stop)
        from coattn.cli.main import main as run

        signal.signal(signal.SIGINT, before)
    except KeyboardInterrupt:
        stop()
    run()


if __name__ == "__main__":
    main()
