"""Every option of the engine: its bounds, and messages that name the flag to change."""

from collections.abc import Iterator
from dataclasses import Field, FrozenInstanceError, fields
from typing import Any

import pytest

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.config.options import flag_of
from paceline.config.sized import Capacity
from paceline.errors import ConfigError, InputError, PacelineError
from paceline.llm.arguments import split_arguments

CONFIGS = (KVConfig, SchedulerConfig, EngineConfig)
Option = tuple[type[Any], Field[Any]]


def options() -> Iterator[Option]:
    for config in CONFIGS:
        for spec in fields(config):
            if "help" in spec.metadata:
                yield config, spec


def name_of(option: Option) -> str:
    return option[1].name


def with_bound(bound: str) -> list[Option]:
    return [option for option in options() if option[1].metadata[bound] is not None]


NUMBERS = [option for option in options() if isinstance(option[1].default, int | float)]
NUMBERS = [option for option in NUMBERS if not isinstance(option[1].default, bool)]
FLOATS = [option for option in NUMBERS if isinstance(option[1].default, float)]
INTS = [option for option in NUMBERS if isinstance(option[1].default, int)]


def step_of(spec: Field[Any]) -> Any:
    return 1 if isinstance(spec.default, int) else 1e-9


def refused(option: Option, value: Any) -> str:
    config, spec = option
    with pytest.raises(ConfigError) as caught:
        config(**{spec.name: value})
    message = str(caught.value)
    assert message.startswith(flag_of(spec) + " "), "a message names the flag to change"
    assert "\n" not in message
    return message


@pytest.mark.parametrize("option", with_bound("low"), ids=name_of)
def test_the_lower_bound_is_taken_and_the_value_below_it_refused(option: Option) -> None:
    config, spec = option
    low = spec.metadata["low"]
    assert getattr(config(**{spec.name: low}), spec.name) == low
    assert f"at least {low}" in refused(option, low - step_of(spec))


@pytest.mark.parametrize("option", with_bound("high"), ids=name_of)
def test_the_upper_bound_is_taken_and_the_value_above_it_refused(option: Option) -> None:
    config, spec = option
    high = spec.metadata["high"]
    assert getattr(config(**{spec.name: high}), spec.name) == high
    assert f"at most {high}" in refused(option, high + step_of(spec))


@pytest.mark.parametrize("option", with_bound("choices"), ids=name_of)
def test_a_choice_is_one_of_the_named_ones(option: Option) -> None:
    config, spec = option
    for choice in spec.metadata["choices"]:
        assert getattr(config(**{spec.name: choice}), spec.name) == choice
    message = refused(option, "nonsense")
    assert all(choice in message for choice in spec.metadata["choices"])
    assert "'nonsense'" in message


@pytest.mark.parametrize("option", FLOATS, ids=name_of)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_a_number_is_finite(option: Option, value: float) -> None:
    assert "finite" in refused(option, value)


@pytest.mark.parametrize("option", INTS, ids=name_of)
def test_a_count_is_whole(option: Option) -> None:
    default: Any = option[1].default
    assert "whole number" in refused(option, default + 0.5)


@pytest.mark.parametrize("option", INTS[:3], ids=name_of)
@pytest.mark.parametrize("value", ["8", True, None], ids=repr)
def test_a_count_is_nothing_but_a_number(option: Option, value: Any) -> None:
    refused(option, value)


def test_a_switch_is_a_bool() -> None:
    option = next(option for option in options() if option[1].name == "enable_prefix_caching")
    refused(option, "no")


@pytest.mark.parametrize("option", list(options()), ids=name_of)
def test_every_option_explains_itself(option: Option) -> None:
    spec = option[1]
    assert len(spec.metadata["help"]) >= 10
    assert not spec.metadata["help"].endswith(".")
    assert flag_of(spec).startswith("--")


def test_flags_are_unique_and_derived_from_the_name_unless_named() -> None:
    flags = {spec.name: flag_of(spec) for _, spec in options()}
    assert len(set(flags.values())) == len(flags)
    assert flags["max_num_seqs"] == "--max-num-seqs"
    assert flags["num_blocks"] == "--num-gpu-blocks-override"


def test_errors_of_options_are_input_errors() -> None:
    assert issubclass(ConfigError, InputError)
    assert issubclass(InputError, PacelineError)
    assert (PacelineError.exit_code, ConfigError.exit_code) == (1, 2)


def test_configs_are_frozen() -> None:
    for config in CONFIGS:
        with pytest.raises(FrozenInstanceError):
            setattr(config(), fields(config)[0].name, 1)


@pytest.mark.parametrize("name", ["window", "num_blocks"])
def test_a_layer_group_needs_at_least_one_of_each(name: str) -> None:
    assert getattr(GroupSpec(**{name: 1}), name) == 1
    with pytest.raises(ConfigError, match=name):
        GroupSpec(**{name: 0})


def test_there_is_at_least_one_layer_group() -> None:
    with pytest.raises(ConfigError, match="group"):
        KVConfig(groups=())


@pytest.mark.parametrize("mode", ["continuous", "dynamic", "static"])
@pytest.mark.parametrize("depth", [0, 1, 8])
def test_capacity_has_rows_for_every_step_under_way(mode: str, depth: int) -> None:
    config = EngineConfig(
        kv=KVConfig(block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=10, max_model_len=100, mode=mode),
        depth=depth,
    )
    capacity = Capacity.of(config)
    assert capacity.num_rows == 10 * (depth + 1)
    # Padded to another's prompt, then as long as another's output.
    longest = 100 if mode == "continuous" else 200
    assert capacity.max_blocks_per_row * 16 >= longest + 1


@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_e4m3"])
def test_types_of_the_kv_cache(name: str) -> None:
    model, given = split_arguments("somewhere", {"kv_cache_dtype": name})
    assert model.kv_cache_dtype == name and not given


@pytest.mark.parametrize("name", ["fp8_e5m2", "int4", "FP8", 8])
def test_another_type_of_the_kv_cache_is_refused(name: object) -> None:
    with pytest.raises(ConfigError, match="^--kv-cache-dtype must be one of auto, fp8, fp8_e4m3, int8, not "):
        split_arguments("somewhere", {"kv_cache_dtype": name})
