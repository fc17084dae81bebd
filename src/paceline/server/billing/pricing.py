"""What a request will be charged: the prices of its key, times the factor of its class at the moment it is let in.

The factors of interactive, standard and batch stand still. That of spot follows the load: its floor until half of the
engine is taken, from there in a straight line to its cap when all of it is. A quote is made once, on arrival, and
holds to the end, whatever the load does meanwhile. Knows nothing of ledgers and of HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from paceline.config.server import BillingConfig
from paceline.core.service_class import CLASSES, SPOT
from paceline.errors import ConfigError, InvalidRequest
from paceline.server.access.caller import Prices
from paceline.server.errors import PriceAboveMaximum

MILLION = 1_000_000
TOKEN_DECIMALS = 6  # of a price for a million tokens
BLOCK_DECIMALS = 9  # of a price for a KV block and second
FACTOR_DECIMALS = 6
# Nano-units (more than a billion units): fits a column of the ledger with room to add.
LARGEST_AMOUNT = 2**60
DEFAULT_FACTORS = BillingConfig().price_factors
HOST, DISK = "host", "disk"  # beside the classes: where cached tokens were loaded from
LARGEST_FACTOR = 1000
CALM = MILLION // 2  # up to this load spot costs its floor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Prices of a key as whole numbers."""

    prompt: int = 0  # micro-units for a million tokens
    cached_prompt: int = 0
    output: int = 0
    kv_block_second: int = 0  # nano-units

    @classmethod
    def of(cls, prices: Prices) -> Rates:
        return cls(
            prompt=scaled(prices.prompt, TOKEN_DECIMALS),
            cached_prompt=scaled(prices.cached_prompt, TOKEN_DECIMALS),
            output=scaled(prices.output, TOKEN_DECIMALS),
            kv_block_second=scaled(prices.kv_block_second, BLOCK_DECIMALS),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """What a request costs, in nano-units, by what it is for."""

    prompt: int = 0
    cached_prompt: int = 0
    output: int = 0
    kv: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.cached_prompt + self.output + self.kv


NOTHING = Amounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """The prices one request was let in at."""

    service_class: str
    rates: Rates
    factor: int = MILLION  # millionths, of the class
    load: int | None = None  # millionths: what the factor was read off at, where it depends on that
    # Millionths, on the price of cached tokens that were loaded from there.
    host_factor: int = MILLION
    disk_factor: int = MILLION

    @property
    def output_price(self) -> int:
        """Micro-units for a million output tokens: what `max_price` is compared with."""
        return self.rates.output * self.factor // MILLION

    def amounts(
        self, *, computed: int, cached: int, output: int, block_us: int, host: int = 0, disk: int = 0
    ) -> Amounts:
        """`host` and `disk`: of the cached tokens, those loaded from there."""
        rates, factor = self.rates, self.factor
        weighed = (cached - host - disk) * MILLION + host * self.host_factor + disk * self.disk_factor
        return Amounts(
            prompt=tokens_amount(computed, rates.prompt, factor),
            cached_prompt=tokens_amount(weighed, rates.cached_prompt, factor, parts=MILLION),
            output=tokens_amount(output, rates.output, factor),
            kv=blocks_amount(block_us, rates.kv_block_second, factor),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceCurve:
    """The factor of a class by the load, all in millionths."""

    floor: int
    cap: int

    def at(self, load: int) -> int:
        above = max(0, min(load, MILLION) - CALM)
        return self.floor + (self.cap - self.floor) * above // (MILLION - CALM)


class Pricing:
    """The factors of all classes."""

    def __init__(self, factors: str = DEFAULT_FACTORS) -> None:
        self._curves = read_factors(factors)

    def quote(self, prices: Prices, service_class: str, load: int) -> Quote:
        curve = self._curves[service_class]
        follows = curve.floor != curve.cap
        return Quote(
            service_class=service_class,
            rates=Rates.of(prices),
            factor=curve.at(load),
            load=load if follows else None,
            host_factor=self._curves[HOST].floor,
            disk_factor=self._curves[DISK].floor,
        )

    def check(self, quote: Quote, max_price: Decimal | None) -> None:
        """Refuse a request that would cost more than it accepts.

        Raises PriceAboveMaximum while the price may come down, InvalidRequest where it never will.
        """
        if max_price is None:
            return
        limit = max_price.scaleb(TOKEN_DECIMALS)
        if quote.output_price <= limit:
            return
        price = shown(quote.output_price, TOKEN_DECIMALS)
        what = f"a million output tokens of class {quote.service_class} cost {price}"
        lowest = quote.rates.output * self._curves[quote.service_class].floor // MILLION
        if lowest <= limit:
            raise PriceAboveMaximum(f"{what} now, more than max_price; try again when the load is lower")
        raise InvalidRequest(
            f"{what} and never less than {shown(lowest, TOKEN_DECIMALS)}, more than max_price; raise it",
            param="max_price",
        )


def engine_load(under_way: int, rows: int, blocks_used: int, blocks: int) -> int:
    """How full an engine is, in millionths: by rows or by KV blocks, whichever is fuller. More than all is all."""
    by_rows = under_way * MILLION // rows if rows else 0
    by_blocks = blocks_used * MILLION // blocks if blocks else 0
    return min(MILLION, max(by_rows, by_blocks))


def read_factors(text: str) -> dict[str, PriceCurve]:
    """`--price-factors`: a number for each class, two with a colon between them for a curve."""
    names = (*CLASSES, HOST, DISK)
    curves = {name: PriceCurve(floor=MILLION, cap=MILLION) for name in names}
    given = text if text == DEFAULT_FACTORS else f"{DEFAULT_FACTORS},{text}"
    for part in given.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in curves:
            raise ConfigError(
                f"--price-factors takes class=number for {', '.join(names)}, separated by commas, not {part!r:.60}"
            )
        low, colon, high = value.partition(":")
        if colon and name != SPOT:
            raise ConfigError(f"--price-factors: only spot has a floor and a cap; give {name} one number")
        floor = _factor(low, name)
        cap = _factor(high, name) if colon else floor
        if floor > cap:
            raise ConfigError(f"--price-factors: the floor of {name}, {low}, is above its cap, {high}")
        curves[name] = PriceCurve(floor=floor, cap=cap)
    return curves


def _factor(text: str, name: str) -> int:
    try:
        value = Decimal(text.strip())
        if not 0 <= value <= LARGEST_FACTOR:
            raise ValueError
        return scaled(value, FACTOR_DECIMALS)
    except (ValueError, InvalidOperation):
        raise ConfigError(
            f"--price-factors: {name} must be a number from 0 to {LARGEST_FACTOR} with at most "
            f"{FACTOR_DECIMALS} decimals, not {text!r:.60}"
        ) from None


# Exact amounts: prices as written become whole numbers, and nothing is ever a float again.
#
# A unit is whatever the operator counts in. Amounts are whole nano-units; prices of tokens are micro-units for a
# million tokens, which is the same as pico-units for one; factors and loads are millionths. A product is rounded down
# to a nano-unit once, when an amount is made of it.


def decimal_of(value: float | str) -> Decimal:
    """The number that was written: JSON and YAML hand over floats, whose shortest text is what stood there."""
    return Decimal(str(value))


def scaled(value: Decimal, decimals: int) -> int:
    """A number in its smallest parts. Raises ValueError when it has more decimals than that."""
    whole = value.scaleb(decimals)
    if whole != whole.to_integral_value():
        raise ValueError(f"{value} has more than {decimals} decimals")
    return int(whole)


def tokens_amount(tokens: int, rate: int, factor: int, parts: int = 1) -> int:
    """Nano-units for tokens, in so many parts each, at `rate` micro-units a million, times `factor` millionths."""
    return min(tokens * rate * factor // (10**9 * parts), LARGEST_AMOUNT)


def blocks_amount(block_us: int, rate: int, factor: int) -> int:
    """Nano-units for block-microseconds at `rate` nano-units a block and second, times `factor` millionths."""
    return min(block_us * rate * factor // 10**12, LARGEST_AMOUNT)


def shown(amount: int, decimals: int = 9) -> str:
    """An amount in units, with no more decimals than it has."""
    sign, amount = ("-", -amount) if amount < 0 else ("", amount)
    whole, rest = divmod(amount, 10**decimals)
    places = f"{rest:0{decimals}}".rstrip("0")
    return f"{sign}{whole}.{places}" if places else f"{sign}{whole}"
