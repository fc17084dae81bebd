"""What every test run shares: Hypothesis profiles, interrupts that arrive, and which tests stay on one worker.

The default profile `ci` draws the same examples on every run and every machine, so that a red test is red
for a reason in the change. `quick` draws a quarter of them, for `make check`; `make test` draws them all.
`HYPOTHESIS_PROFILE=explore pytest ...` searches with fresh random examples.
"""

import os
import signal

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

# Files whose tests share a server or a model: whatever runs them in parallel keeps a file on one worker.
SHARING = ("e2e", "torch")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
        if folder in SHARING and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
