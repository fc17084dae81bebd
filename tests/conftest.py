"""What every test run shares: Hypothesis profiles, interrupts that arrive, and readable assertions in the helpers.

The default profile `ci` draws the same examples on every run and every machine, so that a red test is red
for a reason in the change. `quick` draws a quarter of them, for `make check`; `make test` draws them all.
`HYPOTHESIS_PROFILE=explore pytest ...` searches with fresh random examples.
"""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.helpers")

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
