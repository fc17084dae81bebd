"""What every test run shares: Hypothesis profiles, interrupts that arrive, and which tests stay on one worker.

The default profile `ci` draws the same examples on every run and every machine, so that a red test is red
for a reason in the change. `quick` draws a quarter of them, for `make check` and `make test`; `make campaign` runs the
property tests again with all of them.
`HYPOTHESIS_PROFILE=explore pytest ...` searches with fresh random examples.
"""

import os
import re
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A run in the background ignores interrupts, and so would the programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: how long an example takes says more about the machine than about the code.
settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=25)
settings.register_profile("explore", max_examples=2_000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Folders with the longest groups come first. Mutants, each alone, and short tests fill the workers up to the end.
ORDER = ("soak", "browser", "e2e", "torch", "native", "mutants", "pure")
PARITY = re.compile(r"tests/torch/test_parity_engine\.py::\w+\[(?:native )?([\w-]+?)(?:-torch|-native)?[:\]]")


# A minute each, and share nothing with the tests of their file: they begin first.
ALONE = (
    "test_many_random_steps_find_nothing",
    "test_many_steps_that_yield_keep_their_bits",
    "test_the_parity_tests_touch_nothing_else",
)


def group_of(nodeid: str) -> str:
    """Tests of one group run on one worker, in order. They share a server, a model or a browser."""
    file, _, name = nodeid.partition("::")
    if file.startswith("tests/mutants/") or name in ALONE:
        return nodeid
    if file.startswith("tests/browser/"):
        return "browser"
    architecture = PARITY.match(nodeid)
    return file if architecture is None else f"{file} {architecture[1]}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadgroup":
        return None
    # Not the marker `xdist_group`: xdist 3.8 adds it to the node id, which pytest 9.2 no longer lets it change.
    from xdist.scheduler import LoadFileScheduling

    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = group_of
    return scheduler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        if item.name in ALONE:
            return -1
        folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
        return ORDER.index(folder) if folder in ORDER else 0

    items.sort(key=place)
