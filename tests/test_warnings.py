"""What pytest makes of warnings: ours are errors, also those of a thread or of an object that is collected."""

import gc
import threading
import warnings

import pytest

from coattn import units


def warn(module: str) -> None:
    warnings.warn_explicit("something is odd", UserWarning, "file.py", 1, module=module)


def test_a_warning_of_ours_is_an_error() -> None:
    for module in ("coattn", units.__name__, "coattn.cache.blocks"):
        with pytest.raises(UserWarning, match="something is odd"):
            warn(module)


def test_those_of_others_are_not() -> None:
    warn("torch.nn.modules")
    warn("transformers")


class Odd:
    """Raises where nobody can catch it."""

    def __del__(self) -> None:
        raise ValueError("nobody hears this")


@pytest.mark.xfail(strict=True, raises=pytest.PytestUnraisableExceptionWarning)
def test_an_error_while_an_object_is_collected_is_one() -> None:
    Odd()
    gc.collect()


def fail() -> None:
    raise ValueError("nobody waits for this thread")


@pytest.mark.xfail(strict=True, raises=pytest.PytestUnhandledThreadExceptionWarning)
def test_an_error_in_a_thread_is_one() -> None:
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
