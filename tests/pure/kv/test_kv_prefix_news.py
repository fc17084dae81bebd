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


def test_what_came_and_went_between_two_news_is_none() -> None:
    cache = PrefixCache(10)
    cache.add([4], keys("c"))
    cache.take_news()
    cache.add([1, 2], keys("a", "b"))
    cache.drop([1, 2, 4])
    cache.add([3, 5], keys("b", "c"))
    assert cache.take_news() == ([b"b"], []), "a was never told of, and c never taken back"


def test_long_news_are_told_in_parts_that_say_the_same() -> None:
    cache = PrefixCache(40)
    cache.add(range(1, 10), keys(*"abcdefghi"))
    assert cache.take_news(0) == ([], [])
    told: set[bytes] = set()
    for turn in range(9):
        cache.drop([turn + 1])
        cache.add([turn + 20], keys(f"new {turn}"))
        news = cache.take_news(3)
        assert len(news.stored) + len(news.evicted) <= 3
        assert told.isdisjoint(news.stored) and told.issuperset(news.evicted)
        told = told.union(news.stored).difference(news.evicted)
    while cache.has_news:
        news = cache.take_news(3)
        told = told.union(news.stored).difference(news.evicted)
    assert told == set(cache.by_name) and len(told) == 9


def test_nothing_is_noted_until_somebody_asks() -> None:
    cache = PrefixCache(10)
    cache.add([1], keys("a"))
    assert cache._changed is None
