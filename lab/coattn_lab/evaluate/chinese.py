"""Chinese text as words, as the published scores count it."""

from __future__ import annotations

import logging
import string

from coattn.errors import UnsupportedError

PUNCTUATION = frozenset(
    string.punctuation
    + "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: E501, RUF001
)


def words(text: str) -> list[str]:
    """The words of a text. Cost: the first call reads the dictionary, about a second."""
    try:
        import jieba  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise UnsupportedError(
            "Scoring Chinese datasets needs the package jieba, which is not installed.",
            "Run `pip install jieba`, or name the datasets you want with --tasks.",
        ) from None
    jieba.setLogLevel(logging.WARNING)
    return [str(word) for word in jieba.cut(text, cut_all=False)]


def normalise(word: str) -> str:
    """Lower case, without punctuation and white space."""
    return "".join("".join(char for char in word.lower() if char not in PUNCTUATION).split())
