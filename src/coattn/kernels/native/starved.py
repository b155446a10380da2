"""Telling workers that are lost from workers that get no processor time."""

import threading
import time
from pathlib import Path

TASKS = Path("/proc/self/task")
HARDLY = 0.1
"""Share of the time that a thread has at least, even one that spins beside many others."""


def starved(seconds: float) -> bool:
    """Watches this process's threads for so long: whether one was ready to run all the time and hardly ran.

    A lost worker sleeps or spins; one on a machine that is busy with other work waits for its turn. False where the
    system does not tell.
    """
    before = _threads()
    time.sleep(seconds)
    after = _threads()
    after.pop(str(threading.get_native_id()), None)  # whoever asks is running
    return any(
        name in before and ready and before[name][0] and ran - before[name][1] < HARDLY * 1e9 * seconds
        for name, (ready, ran) in after.items()
    )


def _threads() -> dict[str, tuple[bool, int]]:
    """By thread: whether it is running or ready to, and for how many nanoseconds it has run."""
    threads = {}
    try:
        for task in TASKS.iterdir():
            try:
                # the name may hold spaces and brackets; the state follows the last one
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                threads[task.name] = state == "R", int((task / "schedstat").read_text().split()[0])
            except (OSError, ValueError, IndexError):
                continue  # it has ended meanwhile
    except OSError:
        return {}
    return threads
