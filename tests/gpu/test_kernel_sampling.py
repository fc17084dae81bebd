"""Drawing tokens and taking them into rows on the card, token by token as the definition says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from paceline.kernels.row_update import (
    MAX_STOP_IDS,
    DrawnTokens,
    RowColumns,
    reference_update_rows,
    update_rows,
)
from paceline.kernels.sampling import (
    SamplingColumns,
    allocate_candidates,
    reference_sample,
    sample,
)

VOCABULARY = 151_936


def draw(logits: Tensor, columns: SamplingColumns) -> tuple[list[int], list[int]]:
    slots = len(logits)
    tokens = torch.full((slots,), -7, dtype=torch.int32, device="cuda")
    finite = torch.full((slots,), 7, dtype=torch.uint8, device="cuda")
    sample(tokens, finite, logits, columns, allocate_candidates(slots, logits.shape[1]))
    return tokens.tolist(), finite.tolist()


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 49_152, 1000, 5001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_are_those_of_the_definition(vocabulary: int, dtype: torch.dtype) -> None:
    slots, rows = 24, 40
    # bf16 logits of this spread have many exact ties, which the noise must tell apart
    logits = (torch.randn(slots, vocabulary, device="cuda") * 2).to(dtype)
    slot_rows = torch.randperm(rows)[:slots].to(torch.int32)
    choices = torch.tensor([0.0, 1e-6, 0.05, 0.6, 1.0, 2.5], dtype=torch.float64)
    temperature = choices[torch.randint(len(choices), (rows,))]
    seed = torch.randint(-(2**62), 2**62, (rows,), dtype=torch.int64)
    position = torch.randint(0, 2**34, (rows,), dtype=torch.int64)
    columns = SamplingColumns(
        slot_rows=slot_rows.cuda(),
        temperature=temperature.cuda(),
        seed=seed.cuda(),
        position=position.cuda(),
    )
    tokens, finite = draw(logits, columns)
    assert finite == [1] * slots
    expected = [
        reference_sample(logits[slot], float(temperature[row]), int(seed[row]), int(position[row]))
        for slot, row in enumerate(slot_rows.tolist())
    ]
    assert tokens == expected


def test_rows_that_are_not_finite_say_so_and_disturb_nobody() -> None:
    logits = torch.randn(6, 5000, device="cuda")
    logits[0, 17] = float("nan")
    logits[1, 4999] = float("inf")
    logits[2] = float("-inf")
    logits[3, 100:] = float("-inf")
    logits[4, :] = float("-inf")
    logits[4, 4321] = -50.0
    columns = SamplingColumns(
        slot_rows=torch.arange(6, dtype=torch.int32, device="cuda"),
        temperature=torch.full((6,), 0.7, dtype=torch.float64, device="cuda"),
        seed=torch.arange(6, dtype=torch.int64, device="cuda"),
        position=torch.arange(6, dtype=torch.int64, device="cuda"),
    )
    tokens, finite = draw(logits, columns)
    assert finite == [0, 0, 0, 1, 1, 1]
    assert tokens[3] < 100 and tokens[4] == 4321
    assert tokens[5] == reference_sample(logits[5], 0.7, 5, 5)


def test_rows_take_their_tokens_and_end() -> None:
    rows, slots = 1500, 1000

    def column(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (rows,), dtype=torch.int32)

    stops = torch.randint(-1, 20, (rows, MAX_STOP_IDS), dtype=torch.int32)
    host = RowColumns(
        length=column(1, 9),
        max_length=column(5, 20),
        active=column(0, 2),
        stop_ids=stops,
        tokens=torch.zeros(rows, 24, dtype=torch.int32),
    )
    names = ("length", "max_length", "active", "stop_ids", "tokens")
    device = RowColumns(**{name: getattr(host, name).cuda() for name in names})
    slot_rows = torch.randperm(rows)[:slots].to(torch.int32)
    tokens = torch.randint(0, 100, (slots,), dtype=torch.int32)
    finite = torch.randint(0, 3, (slots,), dtype=torch.uint8)
    drawn = DrawnTokens(
        token=torch.full((slots,), -9, dtype=torch.int32, device="cuda"),
        code=torch.full((slots,), -9, dtype=torch.int32, device="cuda"),
    )
    update_rows(device, drawn, slot_rows.cuda(), tokens.cuda(), finite.cuda())
    report = reference_update_rows(host, slot_rows, tokens, finite)
    assert list(zip(drawn.token.tolist(), drawn.code.tolist(), strict=True)) == report
    for name in names:
        assert torch.equal(getattr(device, name).cpu(), getattr(host, name)), name
