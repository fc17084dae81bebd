"""`load_workload`: which source a name means, how its options combine, and the arrival patterns."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InputError
from paceline.lab.workload import load_workload
from paceline.lab.workload.arrivals import draw_arrivals, parse_arrivals


@pytest.fixture
def three(tmp_path: Path) -> str:
    """A trace of three requests, two seconds apart."""
    path = tmp_path / "three.csv"
    path.write_text("arrival_s,prompt_len,output_len\n10,7,1\n12,8,2\n14,9,3\n", encoding="utf-8")
    return str(path)


def refused(source: str, **options: object) -> str:
    with pytest.raises(InputError) as caught:
        load_workload(source, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---------------------------------------------------------------- sources


def test_an_unknown_name_lists_the_built_ins() -> None:
    message = refused("azure-chat")
    assert message.startswith("'azure-chat' is neither a file nor a built-in workload; did you mean 'azure-")
    for name in ("azure-conv", "azure-code", "mooncake", "multi-tenant", "fixed:PROMPTxOUTPUT"):
        assert name in message
    assert "did you mean" not in refused("zzz")


@pytest.mark.parametrize("source", ["missing/trace.csv", "nul\0byte", "x" * 5000])
def test_a_missing_file_is_an_input_error(source: str) -> None:
    assert "is neither a file nor a built-in workload" in refused(source)


def test_a_built_in_name_wins_over_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake").write_text("arrival_s,prompt_len,output_len\n0,7,1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert len(load_workload("mooncake", num_requests=5)) == 5
    assert len(load_workload("./mooncake")) == 1


def test_the_number_of_requests_of_a_file(three: str) -> None:
    assert load_workload(three, num_requests=2).prompt_len.tolist() == [7, 8]
    assert len(load_workload(three, num_requests=3)) == 3
    assert "holds 3 requests, 4 were asked for" in refused(three, num_requests=4)


def test_fixed_shapes_arrive_at_once() -> None:
    workload = load_workload("fixed:512x128", num_requests=10)
    assert workload.name == "fixed:512x128"
    assert workload.prompt_len.tolist() == [512] * 10
    assert workload.output_len.tolist() == [128] * 10
    assert workload.arrival_s.tolist() == [0.0] * 10
    assert len(load_workload("fixed:1x1")) == 256
    assert load_workload("fixed:1x1", rate=10.0, num_requests=2_000).rate == pytest.approx(10, rel=0.1)


def test_uniform_shapes_fill_their_range() -> None:
    workload = load_workload("uniform:100-103x5-5", num_requests=400, seed=3)
    assert set(workload.prompt_len.tolist()) == {100, 101, 102, 103}
    assert set(workload.output_len.tolist()) == {5}
    counts = np.bincount(workload.prompt_len)[100:]
    assert counts.min() > 60


@pytest.mark.parametrize(
    "source", ["fixed:", "fixed:512", "fixed:512x", "fixed:ax1", "fixed:1-2x3", "uniform:1x2", "fixed:-1x5"]
)
def test_a_shape_that_cannot_be_read(source: str) -> None:
    assert refused(source) == (
        f"cannot read the workload '{source}'; the forms are fixed:PROMPTxOUTPUT, uniform:LOW-HIGHxLOW-HIGH"
    )


@pytest.mark.parametrize("source", ["fixed:0x5", "fixed:5x0", "uniform:9-8x1-1", "fixed:2147483648x1"])
def test_a_shape_out_of_range(source: str) -> None:
    assert "lengths must lie between 1 and 2147483647, the lower one first" in refused(source)


# ---------------------------------------------------------------- options


def test_speed_divides_recorded_times(three: str) -> None:
    assert load_workload(three, speed=2.0).arrival_s.tolist() == [0.0, 1.0, 2.0]
    assert load_workload(three, speed=0.5).arrival_s.tolist() == [0.0, 4.0, 8.0]


def test_rate_keeps_lengths_order_and_tenants() -> None:
    recorded = load_workload("multi-tenant", seed=1)
    redrawn = load_workload("multi-tenant", seed=1, rate=40.0)
    assert redrawn.prompt_len.tolist() == recorded.prompt_len.tolist()
    assert redrawn.output_len.tolist() == recorded.output_len.tolist()
    assert redrawn.tenant.tolist() == recorded.tenant.tolist()
    assert redrawn.rate == pytest.approx(40.0, rel=0.1)


def test_rate_keeps_prefix_ids() -> None:
    recorded = load_workload("mooncake", num_requests=200)
    assert load_workload("mooncake", num_requests=200, rate=9.0).prefix_ids == recorded.prefix_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_requests": 0}, "the number of requests must be at least 1, not 0"),
        ({"num_requests": -3}, "the number of requests must be at least 1, not -3"),
        ({"seed": -1}, "the seed must not be negative, but is -1"),
        ({"rate": 0.0}, "the rate must lie between"),
        ({"rate": -1.0}, "the rate must lie between"),
        ({"rate": math.nan}, "the rate must lie between"),
        ({"rate": math.inf}, "the rate must lie between"),
        ({"speed": 0.0}, "the speed must be a factor between"),
        ({"speed": math.nan}, "the speed must be a factor between"),
        ({"rate": 5.0, "speed": 2.0}, "rate and speed exclude each other"),
        ({"rate": 5.0, "arrivals": "all-at-once"}, "leave nothing for rate or speed to set"),
        ({"speed": 2.0, "arrivals": "all-at-once"}, "leave nothing for rate or speed to set"),
        (
            {"arrivals": "bursty"},
            "unknown arrivals 'bursty'; the forms are recorded, poisson, constant, gamma:CV",
        ),
        ({"arrivals": "poisson:3"}, "unknown arrivals 'poisson:3'"),
        ({"arrivals": "gamma"}, "cannot read arrivals 'gamma'"),
        ({"arrivals": "gamma:x"}, "cannot read arrivals 'gamma:x'"),
        ({"arrivals": "gamma:-1"}, "cannot read arrivals 'gamma:-1'"),
        ({"arrivals": "gamma:nan"}, "cannot read arrivals 'gamma:nan'"),
        ({"arrivals": "gamma:1,2"}, "cannot read arrivals 'gamma:1,2'"),
        ({"arrivals": "gamma:101"}, "must lie between 0 and 100"),
        ({"arrivals": "onoff:5"}, "cannot read arrivals 'onoff:5'"),
        ({"arrivals": "onoff:1,2,3,4"}, "cannot read arrivals 'onoff:1,2,3,4'"),
        ({"arrivals": "onoff:0,5"}, "ON_S and OFF_S must lie between"),
        ({"arrivals": "onoff:5,0"}, "ON_S and OFF_S must lie between"),
        ({"arrivals": "onoff:5,15,0.5"}, "BURST_FACTOR must lie between 1 (no bursts) and 4"),
        ({"arrivals": "onoff:5,15,4.1"}, "BURST_FACTOR must lie between 1 (no bursts) and 4"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    assert message in refused("azure-conv", **options)


def test_a_redraw_without_any_rate_asks_for_one(three: str) -> None:
    assert "give a rate as well" in refused("fixed:1x1", arrivals="poisson")
    assert "give a rate as well" in refused(three, num_requests=1, arrivals="gamma:2")
    assert load_workload(three, num_requests=1, arrivals="gamma:2", rate=1.0).arrival_s[0] > 0


def test_a_redraw_without_a_rate_keeps_the_mean_rate_times_the_speed() -> None:
    recorded = load_workload("azure-code")
    assert load_workload("azure-code", arrivals="poisson").rate == pytest.approx(recorded.rate, rel=0.05)
    faster = load_workload("azure-code", arrivals="poisson", speed=4.0)
    assert faster.rate == pytest.approx(4 * recorded.rate, rel=0.05)


def test_recorded_arrivals_of_a_file_do_not_depend_on_the_seed(three: str) -> None:
    assert load_workload(three, seed=1).arrival_s.tolist() == load_workload(three, seed=2).arrival_s.tolist()
    first = load_workload(three, seed=1, rate=1.0).arrival_s.tolist()
    assert first == load_workload(three, seed=1, rate=1.0).arrival_s.tolist()
    assert first != load_workload(three, seed=2, rate=1.0).arrival_s.tolist()


# ---------------------------------------------------------------- arrival patterns


def gaps(
    arrivals: str, rate: float = 20.0, num_requests: int = 20_000
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    times = load_workload("fixed:1x1", num_requests=num_requests, rate=rate, arrivals=arrivals).arrival_s
    return np.diff(np.concatenate(([0.0], times)))


@pytest.mark.parametrize(
    ("arrivals", "variation"),
    [("recorded", 1.0), ("poisson", 1.0), ("gamma:1", 1.0), ("gamma:0.25", 0.25), ("gamma:3", 3.0)],
)
def test_gaps_have_the_mean_and_variation_asked_for(arrivals: str, variation: float) -> None:
    drawn = gaps(arrivals)
    assert drawn.mean() == pytest.approx(1 / 20, rel=0.03 * max(1.0, variation))
    assert drawn.std() / drawn.mean() == pytest.approx(variation, rel=0.05)


def test_gaps_of_no_variation_are_even() -> None:
    assert np.allclose(gaps("gamma:0"), 1 / 20, atol=2e-6)


def test_poisson_gaps_are_exponential() -> None:
    drawn = gaps("poisson") * 20
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(drawn, share) == pytest.approx(-math.log(1 - share), rel=0.06)


def test_all_at_once() -> None:
    workload = load_workload("azure-conv", num_requests=50, arrivals="all-at-once")
    assert workload.arrival_s.tolist() == [0.0] * 50


def on_share(times: np.ndarray[tuple[int], np.dtype[np.float64]], on_s: float, cycle_s: float) -> float:
    return float(np.mean(np.mod(times, cycle_s) < on_s))


def test_nothing_arrives_in_the_off_phase() -> None:
    workload = load_workload("fixed:1x1", num_requests=20_000, rate=20.0, arrivals="onoff:2,6")
    assert on_share(workload.arrival_s, 2.0 + 1e-6, 8.0) == 1.0
    assert workload.rate == pytest.approx(20.0, rel=0.03)
    whole_cycles = workload.arrival_s[workload.arrival_s < 800.0]
    counts = np.bincount((whole_cycles // 8.0).astype(int), minlength=100)
    assert counts.mean() == pytest.approx(160, rel=0.03)
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.4)  # bursts are cycles, not luck


def test_a_burst_factor_leaves_some_for_the_off_phase() -> None:
    workload = load_workload("fixed:1x1", num_requests=20_000, rate=20.0, arrivals="onoff:2,6,2.5")
    # On: 2.5 x 20 for 2 s of 8 = 100 of 160 requests.
    assert on_share(workload.arrival_s, 2.0, 8.0) == pytest.approx(100 / 160, rel=0.03)
    assert workload.rate == pytest.approx(20.0, rel=0.03)
    even = load_workload("fixed:1x1", num_requests=20_000, rate=20.0, arrivals="onoff:2,6,1")
    assert on_share(even.arrival_s, 2.0, 8.0) == pytest.approx(2 / 8, rel=0.05)


@given(
    on_s=st.floats(0.001, 1e6),
    off_s=st.floats(0.001, 1e6),
    share=st.floats(0.0, 1.0),
    rate=st.floats(1e-6, 1e9),
    seed=st.integers(0, 2**32),
)
def test_on_off_times_always_ascend(on_s: float, off_s: float, share: float, rate: float, seed: int) -> None:
    burst = 1.0 + share * ((on_s + off_s) / on_s - 1.0)
    pattern = parse_arrivals(f"onoff:{on_s!r},{off_s!r},{burst!r}")
    times = draw_arrivals(pattern, 200, rate, seed)  # type: ignore[arg-type]
    assert np.isfinite(times).all()
    assert (times >= 0).all()
    assert (np.diff(times) >= 0).all()


@given(variation=st.floats(0.0, 100.0), rate=st.floats(1e-6, 1e9), seed=st.integers(0, 2**32))
def test_gamma_times_always_ascend(variation: float, rate: float, seed: int) -> None:
    times = draw_arrivals(parse_arrivals(f"gamma:{variation!r}"), 200, rate, seed)  # type: ignore[arg-type]
    assert np.isfinite(times).all()
    assert (np.diff(times) >= 0).all()
