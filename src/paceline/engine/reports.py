"""What an engine tells the fronts that choose among several: how busy and how fast it is, and which prefixes it holds.

Asked between two steps, a few times a second.
"""

from __future__ import annotations

from paceline.kv.prefix import PrefixCache
from paceline.routing.view import Gauges
from paceline.scheduler.scheduler import Scheduler
from paceline.scheduler.step.pace import ExpectedRoom

NO_SPEED = Gauges(prefill_per_s=0.0)  # of an engine that has made no steps yet


def gauges_of(scheduler: Scheduler, before: Gauges = NO_SPEED) -> Gauges:
    """What a front chooses by. Speeds that are not known yet are those of `before`, the last ones."""
    room = ExpectedRoom(scheduler.state, scheduler.composer.pace)
    return scheduler.forecaster.gauges(room, before)


def told_cache_of(scheduler: Scheduler) -> PrefixCache:
    """Whose news are told: that of the device. Of several groups, one that sees whole prompts speaks for all."""
    groups = scheduler.state.kv.groups
    return next((group for group in groups if group.window is None), groups[0]).cache
