"""The progress bar of a batch: requests done, tokens per second in and out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from paceline.llm.outputs import RequestOutput


class Progress:
    """Shows nothing when switched off."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar: Any = None
        self._num_input = self._num_output = 0
        self._started_s = time.perf_counter()
        if enabled:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc="Processed prompts", dynamic_ncols=True, postfix=_rates(0, 0))

    def show(self, finished: Sequence[RequestOutput]) -> None:
        if self._bar is None or not finished:
            return
        for output in finished:
            self._num_input += len(output.prompt_token_ids)
            self._num_output += sum(len(part.token_ids) for part in output.outputs)
        seconds = max(time.perf_counter() - self._started_s, 1e-9)
        self._bar.set_postfix_str(
            _rates(self._num_input / seconds, self._num_output / seconds), refresh=False
        )
        self._bar.update(len(finished))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _rates(num_input: float, num_output: float) -> str:
    return f"est. speed input: {num_input:.2f} toks/s, output: {num_output:.2f} toks/s"
