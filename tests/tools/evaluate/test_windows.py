import pytest
import torch

from coattn.errors import InputError
from coattn.tools.evaluate.windows import choose


def test_one_window_is_the_beginning_of_the_text() -> None:
    windows = choose(500, decode=16, length=100)
    assert (windows.starts, windows.prefill, windows.length) == ((0,), 84, 100)
    assert choose(500, decode=16, prefill=84) == windows


def test_a_stride_covers_the_text_at_several_depths() -> None:
    windows = choose(100, decode=4, prefill=16, stride=30)
    assert windows.starts == (0, 30, 60)
    assert windows.of(torch.arange(100))[:, 0].tolist() == [0, 30, 60]
    assert windows.of(torch.arange(100))[:, -1].tolist() == [19, 49, 79]
    assert choose(100, decode=4, prefill=16, stride=30, start=5).starts == (5, 35, 65)
    assert choose(100, decode=4, prefill=16, stride=30, length=50).starts == (0, 30)
    assert choose(20, decode=4, prefill=16, stride=1).starts == (0,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decode": 4, "length": 200}, "only 100 tokens"),
        ({"decode": 50, "length": 50}, "--decode is 50"),
        ({"decode": 4, "length": 50, "start": 48}, "--start is 48 and --decode is 4, but --length is 50"),
        ({"decode": 4, "prefill": 97}, "ends after 101"),
        ({"decode": 4, "length": 50, "stride": 10}, "--stride needs --prefill"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        choose(100, **options)
