"""`coattn`, and `python -m coattn`."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # an interrupt before `main` would end in a traceback: little is imported before it
    from types import FrameType


def interrupt(_number: int, frame: FrameType | None) -> None:
    """What Ctrl-C does: while something is imported it ends the process in one word, since a library could make another
    exception of it, and what is half imported cannot be used; otherwise KeyboardInterrupt."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            stop()
        frame = frame.f_back
    raise KeyboardInterrupt


def stop() -> None:
    """Ends the process; a line that says how far something is goes, and the cursor comes back."""
    os.write(2, b"\r\x1b[2K\x1b[?25hstopped.\n" if os.isatty(2) else b"stopped.\n")
    os._exit(130)


def main() -> None:
    """Runs the command line. Ctrl-C ends it in one word, also while something is still being imported."""
    if "OMP_WAIT_POLICY" not in os.environ:  # PyTorch's threads that wait would keep their cores for milliseconds
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        import signal

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, interrupt)
        from coattn.cli.main import main as run
    except KeyboardInterrupt:
        stop()
    run()


if __name__ == "__main__":
    main()
