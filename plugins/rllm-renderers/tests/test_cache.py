from __future__ import annotations

import pickle
import random
from threading import Thread

from rllm_renderers.cache import BoundedCache


def test_the_least_recently_used_goes_first():
    cache = BoundedCache(10)
    for key in "abc":
        cache.put(key, key.upper(), 3)
    assert cache.get("a") == "A"
    cache.put("d", "D", 3)
    assert [cache.get(key) for key in "abcd"] == ["A", None, "C", "D"]


def test_weights_are_what_is_bounded():
    cache = BoundedCache(10)
    cache.put("small", 1, 2)
    cache.put("large", 2, 9)
    assert (cache.get("small"), cache.get("large")) == (None, 2)
    cache.put("too large", 3, 11)
    assert (cache.get("too large"), cache.get("large"), len(cache)) == (None, 2, 1)


def test_replacing_an_entry_frees_its_weight():
    cache = BoundedCache(10)
    for _ in range(5):
        cache.put("a", 1, 6)
    cache.put("b", 2, 4)
    assert (cache.get("a"), cache.get("b")) == (1, 2)


def test_a_pickled_cache_comes_back_empty():
    cache = BoundedCache(10)
    cache.put("a", 1, 1)
    again = pickle.loads(pickle.dumps(cache))  # noqa: S301
    assert (again.max_weight, len(again)) == (10, 0)
    again.put("a", 1, 1)
    assert again.get("a") == 1


def test_threads_never_see_another_keys_value():
    cache, wrong = BoundedCache(50), []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(3000):
            key = rng.randrange(40)
            found = cache.get(key)
            if found is None:
                cache.put(key, key * key, rng.randint(1, 5))
            elif found != key * key:
                wrong.append(key)

    threads = [Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 10 <= len(cache) <= 50
