"""Turning the dial and changing the policy of an engine that serves, in its own process, and saying how it stands.

What is asked for comes as a frame; a mistake in it is an answer, never the end of the engine. Knows the scheduler's two
inputs for it and nothing of sockets.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.dial import DialSetting
from paceline.errors import PacelineError
from paceline.scheduler.policy import POLICY_OPTIONS
from paceline.scheduler.scheduler import Scheduler
from paceline.serving import frames
from paceline.serving.client import Steering
from paceline.serving.refusals import refusal_of


def steer(scheduler: Scheduler, asked: frames.Steer) -> frames.Steered:
    """Do what is asked, if anything is, and answer."""
    refusal = None
    try:
        if asked.dial is not None:
            kind, value = asked.dial
            scheduler.set_dial(DialSetting(kind=kind, value=value))
        if asked.policy is not None:
            name, options = asked.policy
            _change_policy(scheduler, name, options)
    except PacelineError as error:
        refusal = refusal_of(0, error)
    return frames.Steered(asked.question, steering_of(scheduler), refusal)


def _change_policy(scheduler: Scheduler, name: str, options: Mapping[str, float | str]) -> None:
    """Without a name, other options of the policy there is."""
    scheduler.set_policy(name or scheduler.state.config.scheduling_policy, **options)


def steering_of(scheduler: Scheduler) -> Steering:
    """How it stands now."""
    config = scheduler.state.config
    options = {name: getattr(config, name) for name in sorted(POLICY_OPTIONS)}
    return Steering(
        dial=scheduler.state.dial.status(), policy=config.scheduling_policy, policy_options=options
    )
