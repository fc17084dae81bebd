"""Every error a user can see, as one tree.

Raised at the edge (configuration, files, admission) with a message that says what is wrong and what to do.
Inside the core, broken assumptions are `assert`; they are never part of this tree.
"""


class PacelineError(Exception):
    """Base of all errors meant for users. `exit_code` is what a command exits with."""

    exit_code = 1


class InputError(PacelineError):
    """A file, flag or field given by the user is wrong."""

    exit_code = 2


class ConfigError(InputError):
    """Options that are out of range or contradict each other."""


class InvalidRequest(PacelineError):
    """A request that is wrong in itself; `param` names the field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NeverFits(InvalidRequest):
    """A request that could not run even if it were alone."""


class GrammarTooComplex(InvalidRequest):
    """A schema or grammar that is too large, too deep, or takes too long to compile; `param` names the field."""

    code = "grammar_too_complex"


class InvalidAdapter(InvalidRequest):
    """An adapter's folder that is incomplete, damaged, does not fit the model or is of a kind that is not computed."""

    code = "invalid_adapter"


class UnknownAdapter(InvalidRequest):
    """A request names an adapter that is not loaded, or not any more."""

    code = "model_not_found"


class UnsupportedModality(InvalidRequest):
    """Pictures, sound or files for a model that does not take them."""

    code = "unsupported_modality"


class InvalidImage(InvalidRequest):
    """A picture that cannot be decoded, is not what it says it is, or is too large."""

    code = "invalid_image"


class MediaNotAllowed(InvalidRequest):
    """A link to a picture that is not fetched; no connection was made to it."""

    code = "media_not_allowed"


class MediaFetchFailed(InvalidRequest):
    """A link to a picture whose host did not answer with one in time."""

    code = "media_fetch_failed"


class QueueFull(PacelineError):
    """The bounded queue has no place left; one is thought to come free after `retry_after_s`, if that is known."""

    retry_after_s: float | None = None

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class TreeFull(QueueFull):
    """A tree has as many branches or tokens as it may have; nothing was forked."""

    code = "tree_limit_exceeded"


class PinsFull(QueueFull):
    """A key, or all keys together, have as much pinned as may be; nothing was pinned."""

    code = "pin_limit_exceeded"


class DeadlineImpossible(InvalidRequest):
    """A request whose times this machine could not keep even if it were alone; `param` names the objective."""

    code = "deadline_impossible"


class DeadlineInfeasible(PacelineError):
    """A request whose times cannot be kept as things stand; it may be worth trying again after `retry_after_s`."""

    code = "deadline_infeasible"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class SleepRefused(PacelineError):
    """A model that cannot be put to sleep: it is pinned, it has requests under way, or its runner cannot."""

    code = "sleep_refused"


class UnknownRequest(PacelineError):
    """No live request has this id."""


class InvalidTransition(PacelineError):
    """The request's state does not allow what was asked."""


class EngineFailed(PacelineError):
    """The engine gave up after repeated failures; every request has been answered."""

    exit_code = 70
