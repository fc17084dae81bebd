"""What a front hears of the prefixes an engine holds."""

from paceline.core.request import BlockKey
from paceline.kv.prefix import PrefixCache


def keys(*names: str) -> list[BlockKey]:
    return [BlockKey(name.encode(), name.encode()) for name in names]


def test_the_first_news_is_all_there_is_and_the_next_what_has_changed() -> None:
    cache = PrefixCache(10)
    cache.add([1, 2], keys("a", "b"))
    assert cache.take_news() == ([b"a", b"b"], [])
    cache.add([3, 4], keys("c", "a"))  # "a" stands under another block already
    cache.drop([2])
    assert cache.take_news() == ([b"c"], [b"b"])
    assert cache.take_news() == ([], [])


def test_what_came_and_went_between_two_news_is_told_as_it_is_now() -> None:
    cache = PrefixCache(10)
    cache.take_news()
    cache.add([1, 2], keys("a", "b"))
    cache.drop([1, 2])
    cache.add([3], keys("b"))
    assert cache.take_news() == ([b"b"], [b"a"])


def test_nothing_is_noted_until_somebody_asks() -> None:
    cache = PrefixCache(10)
    cache.add([1], keys("a"))
    assert cache._changed is None
