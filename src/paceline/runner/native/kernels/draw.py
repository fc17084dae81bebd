"""The tokens of a row that can be drawn, by the bounds of docs/reference/sampling.md; the host then draws one of them.

    tops (row x stretch): largest logit | bounds (row): what a token must reach | lists (row x stretch): tokens that do

A greedy row is complete with its bounds. With a temperature and nothing cut, a stretch lists the tokens whose noise can
make them win: noise is bounded from above without a logarithm, and the bar rises with every token that was listed.
With top-k, top-p or min-p, it lists the tokens near the top, with the mass of all others where top-p needs it. Bounds
are float32 with a slack that covers what float32 rounds away: which token wins never depends on them.
"""

from __future__ import annotations

import numpy as np

from paceline.runner.native import layout as at
from paceline.runner.native.kernels.emit import apart, kernel
from paceline.runner.native.kernels.scalars import (
    bits_of_double,
    bits_of_float,
    double_of_bits,
    float_of_bits,
    get_float,
    get_int,
    get_word,
    put_float,
    put_int,
    put_word,
    upper_word,
)
from paceline.runner.native.kernels.simd import (
    add,
    add_ints,
    at_least,
    count_from,
    float_bits,
    float_words,
    fma,
    larger_words,
    largest,
    largest_word,
    load_floats,
    load_fourths,
    maximum,
    mul,
    multiply_high,
    multiply_low,
    only_lanes,
    round_even,
    splat,
    splat_word,
    store_floats,
    store_ints,
    sub,
    sum_of,
    sum_of_ints,
    times_two_to,
    to_ints,
    xor_ints,
    zero_from,
)
from paceline.runner.native.kernels.threads import LAP_DRAW, meet, take

_F = np.float32
ZERO, LOWEST = _F(0), _F(-np.inf)
SLACK, MAX_NOISE = _F(1e-3), _F(22.88)
LOW = 0xFFFFFFFF
MULTIPLIER_0, MULTIPLIER_1, STEP_0, STEP_1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
PHILOX_ROUNDS = 10
LOG2_E = _F(np.log2(np.e))
P0, P1, P2, P3, P4 = _F(0.99999917), _F(0.69312197), _F(0.24024981), _F(0.05591704), _F(0.00956051)  # 2**x
RACERS = 64  # tokens that are bounded together
# -log(v) of a v in units of 2**-32, where log2(v) is read from the bits of a float32.
BOUND_SCALE, BOUND_START = _F(-np.log(2) * 2.0**-23), _F(np.log(2) * (127 + 32))


# -- noise ---------------------------------------------------------------------------------------------------


@kernel
def _philox(key, position, groups):
    """The words of sixteen groups of four tokens: vector i has those of the i-th token of each."""
    c0, c1 = splat_word(position), splat_word(upper_word(position))
    c2, c3 = groups, splat_word(0)
    k0, k1 = key, upper_word(key)
    for _ in range(PHILOX_ROUNDS // 2):  # two at a time: words then change places without being moved
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0 + STEP_0, k1 + STEP_1)
        k0, k1 = k0 + 2 * STEP_0, k1 + 2 * STEP_1
    return c0, c1, c2, c3


@kernel
def _round(c0, c1, c2, c3, k0, k1):
    by_0, by_1 = splat_word(MULTIPLIER_0), splat_word(MULTIPLIER_1)
    high_0, low_0 = multiply_high(c0, by_0), multiply_low(c0, by_0)
    high_1, low_1 = multiply_high(c2, by_1), multiply_low(c2, by_1)
    return (
        xor_ints(high_1, xor_ints(c1, splat_word(k0))),
        low_1,
        xor_ints(high_0, xor_ints(c3, splat_word(k1))),
        low_0,
    )


@kernel
def _word(key, position, token):
    """The word of one token."""
    c0, c1, c2, c3 = position & LOW, upper_word(position), token // 4, 0
    k0, k1 = key & LOW, upper_word(key)
    for _ in range(PHILOX_ROUNDS):
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c1 = upper_word(product_1) ^ c1 ^ k0, product_1 & LOW
        c2, c3 = upper_word(product_0) ^ c3 ^ k1, product_0 & LOW
        k0, k1 = (k0 + STEP_0) & LOW, (k1 + STEP_1) & LOW
    lane = token % 4
    if lane == 0:
        return c0
    if lane == 1:
        return c1
    return c2 if lane == 2 else c3


@kernel
def _log(x):
    """The logarithm of a positive number, within 1e-10 of its size."""
    bits = bits_of_double(x)
    power = (bits >> 52) - 1023
    mantissa = double_of_bits((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000)
    if mantissa > 1.4142135:
        mantissa *= 0.5
        power += 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square, series = s * s, 0.0
    for divisor in range(17, 0, -2):  # 2 * (s + s^3 / 3 + s^5 / 5 + ...)
        series = series * square + 1.0 / divisor
    return power * 0.6931471805599453 + 2.0 * s * series


@kernel
def _noise(word):
    """Nearly the noise of a word."""
    return _F(-_log(-_log((word + 0.5) * 2.0**-32)))


@kernel
def _noise_bound(words):
    """Nearly the noise of each word and never below it, as `sampling.sampler.noise_bound` defines it."""
    return fma(
        float_bits(float_words(xor_ints(words, splat_word(LOW)))), splat(BOUND_SCALE), splat(BOUND_START)
    )


# -- tops ----------------------------------------------------------------------------------------------------


@kernel
def _find_tops(p):
    """The largest logit of each stretch, the first among equals; NaN where there is one. Maxima of every block."""
    sync, rows, stretches = (
        get_int(p + at.S_SYNC),
        get_int(p + at.S_NUM_DRAWS),
        get_int(p + at.S_NUM_STRETCHES),
    )
    while True:
        piece = take(sync, 1)
        if piece >= rows * stretches:
            break
        row, first = piece // stretches, piece % stretches * at.STRETCH
        part = get_int(p + at.S_DRAW_PARTS) + piece * at.PART_BYTES
        put_int(part + at.P_COUNT, 0)
        if get_int(_draw_of(p, row) + at.D_KIND) != at.NO_DRAW:
            end = min(first + at.STRETCH, get_int(p + at.S_VOCAB_SIZE))
            _find_top(_logits_of(p, row), _maxima_of(p, row), first, end, part)


@kernel
def _draw_of(p, row):
    return get_int(p + at.S_DRAWS) + row * at.DRAW_BYTES


@kernel
def _logits_of(p, row):
    return get_int(p + at.S_LOGITS) + row * get_int(p + at.S_LOGITS_STEP)


@kernel
def _num_blocks(p):
    return (get_int(p + at.S_VOCAB_SIZE) + at.BLOCK - 1) // at.BLOCK


@kernel
def _maxima_of(p, row):
    return get_int(p + at.S_MAXIMA) + row * _num_blocks(p) * 64


@kernel
def _find_top(logits, maxima, first, end, part):
    top, where = LOWEST, first
    for start in range(first, end, at.BLOCK):
        stop = min(start + at.BLOCK, end)
        whole = start + (stop - start) // 16 * 16
        lanes = splat(LOWEST)
        for token in range(start, whole, 16):
            lanes = maximum(lanes, load_floats(logits + 4 * token))
        if whole < stop:
            lanes = maximum(lanes, only_lanes(load_floats(logits + 4 * whole), 0, stop - whole))
        store_floats(maxima + start // at.BLOCK * 64, lanes)
        here = largest(lanes)
        if top == top and not here <= top:  # NaN is found and stays
            top, where = here, start
    while where < end - 1 and get_float(logits + 4 * where) != top:
        where += 1
    put_int(part + at.P_TOP, bits_of_float(top))
    put_int(part + at.P_BEST, where)


# -- bounds --------------------------------------------------------------------------------------------------


@kernel
def _find_bounds(p):
    """Top and best token of each row; the score that a token must reach to be listed, or the logit."""
    sync, rows, stretches = (
        get_int(p + at.S_SYNC),
        get_int(p + at.S_NUM_DRAWS),
        get_int(p + at.S_NUM_STRETCHES),
    )
    while True:
        row = take(sync, 1)
        if row >= rows:
            break
        draw_row = _draw_of(p, row)
        kind = get_int(draw_row + at.D_KIND)
        if kind == at.NO_DRAW:
            continue
        top, best = LOWEST, 0
        part = get_int(p + at.S_DRAW_PARTS) + row * stretches * at.PART_BYTES
        for _ in range(stretches):
            here = float_of_bits(get_int(part + at.P_TOP))
            if top == top and not here <= top:
                top, best = here, get_int(part + at.P_BEST)
            part += at.PART_BYTES
        put_int(draw_row + at.D_TOP, bits_of_float(top))
        put_int(draw_row + at.D_BEST, best)
        if kind == at.RACE:
            key, position = get_int(draw_row + at.D_KEY), get_int(draw_row + at.D_POSITION)
            put_int(draw_row + at.D_BOUND, bits_of_float(_noise(_word(key, position, best))))
        elif kind == at.NEAR_TOP:
            bound = top - float_of_bits(get_int(draw_row + at.D_REACH))
            top_k = get_int(draw_row + at.D_TOP_K)
            if top_k > 0:
                bound = max(bound, _below_kth(_maxima_of(p, row), _num_blocks(p), top_k, top))
            put_int(draw_row + at.D_BOUND, bits_of_float(bound))


@kernel
def _below_kth(maxima, blocks, k, top):
    """A number that at least k logits are not below: the k-th largest of the maxima, or minus infinity."""
    low, high = _ordered(bits_of_float(LOWEST)), _ordered(bits_of_float(top)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        bound, counts = splat(_from_ordered(middle)), splat_word(0)
        for index in range(blocks):
            counts = add_ints(counts, at_least(load_floats(maxima + 64 * index), bound))
        if sum_of_ints(counts) >= k:
            low = middle
        else:
            high = middle
    return _from_ordered(low)


@kernel
def _ordered(bits):
    """Bits of a float as an integer that is larger for a larger float."""
    return bits if bits < 0x80000000 else 0x80000000 - bits


@kernel
def _from_ordered(number):
    return float_of_bits(number if number >= 0 else 0x80000000 - number)


# -- lists ---------------------------------------------------------------------------------------------------


@kernel
def _list_tokens(p, scratch):
    """Tokens that reach their row's bound, and how many there are; only the first of too many are written."""
    sync, rows, stretches = (
        get_int(p + at.S_SYNC),
        get_int(p + at.S_NUM_DRAWS),
        get_int(p + at.S_NUM_STRETCHES),
    )
    while True:
        piece = take(sync, 1)
        if piece >= rows * stretches:
            break
        row, first = piece // stretches, piece % stretches * at.STRETCH
        draw_row = _draw_of(p, row)
        kind, top = get_int(draw_row + at.D_KIND), float_of_bits(get_int(draw_row + at.D_TOP))
        if kind in (at.NO_DRAW, at.GREEDY) or top - top != ZERO:
            continue
        end = min(first + at.STRETCH, get_int(p + at.S_VOCAB_SIZE))
        part = get_int(p + at.S_DRAW_PARTS) + piece * at.PART_BYTES
        to = get_int(p + at.S_LISTED) + piece * at.LISTED * at.LISTED_BYTES
        logits = _logits_of(p, row)
        if kind == at.RACE:
            count = _list_racers(draw_row, row, logits, first, end, to, scratch)
        else:
            count = _list_near_top(draw_row, row, logits, _maxima_of(p, row), first, end, to, part)
        put_int(part + at.P_COUNT, count)


@kernel
def _list(to, count, row, token, value, word):
    """One more token; returns how many there are."""
    if count < at.LISTED:
        entry = to + count * at.LISTED_BYTES
        put_word(entry, token)
        put_float(entry + 4, value)
        put_word(entry + 8, word)
        put_word(entry + 12, row)
    return count + 1


@kernel
def _list_racers(draw_row, row, logits, first, end, to, scratch):
    """Tokens whose (logit - top) / temperature + noise can reach the bar."""
    key, position = get_int(draw_row + at.D_KEY), get_int(draw_row + at.D_POSITION)
    bar = float_of_bits(get_int(draw_row + at.D_BOUND))
    top, inverse = (
        splat(float_of_bits(get_int(draw_row + at.D_TOP))),
        splat(float_of_bits(get_int(draw_row + at.D_INVERSE))),
    )
    values, scores, offsets, words = scratch, scratch + 256, scratch + 512, scratch + 768
    count = 0
    for start in range(first, end, RACERS):
        source = logits + 4 * start
        if end - start < RACERS:  # the last tokens, with others that cannot be drawn
            for index in range(RACERS):
                put_float(
                    values + 4 * index, get_float(source + 4 * index) if start + index < end else LOWEST
                )
            source = values
        o0 = mul(sub(load_fourths(source, 0), top), inverse)
        o1 = mul(sub(load_fourths(source, 1), top), inverse)
        o2 = mul(sub(load_fourths(source, 2), top), inverse)
        o3 = mul(sub(load_fourths(source, 3), top), inverse)
        nearest = largest(maximum(maximum(o0, o1), maximum(o2, o3)))
        if nearest < bar - MAX_NOISE - SLACK:
            continue
        w0, w1, w2, w3 = _philox(key, position, count_from(start // 4))
        # Not even the largest word of all would lift the nearest token over the bar.
        word = largest_word(larger_words(larger_words(w0, w1), larger_words(w2, w3)))
        if nearest + largest(_noise_bound(splat_word(word))) < bar - SLACK:
            continue
        s0, s1 = add(o0, _noise_bound(w0)), add(o1, _noise_bound(w1))
        s2, s3 = add(o2, _noise_bound(w2)), add(o3, _noise_bound(w3))
        if largest(maximum(maximum(s0, s1), maximum(s2, s3))) < bar - SLACK:
            continue
        _put_fourths(scores, s0, s1, s2, s3)
        _put_fourths(offsets, o0, o1, o2, o3)
        store_ints(words, w0)
        store_ints(words + 64, w1)
        store_ints(words + 128, w2)
        store_ints(words + 192, w3)
        for index in range(RACERS):
            place = index % 4 * 64 + index // 4 * 4
            if get_float(scores + place) >= bar - SLACK:
                word = get_word(words + place)
                count = _list(to, count, row, start + index, get_float(source + 4 * index), word)
                bar = max(bar, get_float(offsets + place) + _noise(word))
    return count


@kernel
def _put_fourths(to, v0, v1, v2, v3):
    store_floats(to, v0)
    store_floats(to + 64, v1)
    store_floats(to + 128, v2)
    store_floats(to + 192, v3)


@kernel
def _list_near_top(draw_row, row, logits, maxima, first, end, to, part):
    """Tokens with a logit from the bound on; the mass of the others in the stretch where it is asked for."""
    key, position = get_int(draw_row + at.D_KEY), get_int(draw_row + at.D_POSITION)
    bound, has_mass = float_of_bits(get_int(draw_row + at.D_BOUND)), get_int(draw_row + at.D_HAS_MASS)
    count, mass = 0, 0.0
    for start in range(first, end, at.BLOCK):
        stop = min(start + at.BLOCK, end)
        if largest(load_floats(maxima + start // at.BLOCK * 64)) >= bound:
            for token in range(start, stop):
                value = get_float(logits + 4 * token)
                if value >= bound:
                    count = _list(to, count, row, token, value, _word(key, position, token))
        if has_mass:
            mass += _mass_below(draw_row, logits, start, stop, bound)
    put_int(part + at.P_MASS, bits_of_double(mass))
    return count


@kernel
def _mass_below(draw_row, logits, start, stop, bound):
    """Nearly the sum of exp((logit - top) / temperature) of tokens below the bound."""
    top, inverse = (
        float_of_bits(get_int(draw_row + at.D_TOP)),
        float_of_bits(get_int(draw_row + at.D_INVERSE)),
    )
    top, scale = splat(top), splat(inverse * LOG2_E)
    limit, total = splat(bound), splat(ZERO)
    for token in range(start, stop, 16):
        value = load_floats(logits + 4 * token)
        if stop - token < 16:
            value = only_lanes(value, 0, stop - token)
        total = add(total, zero_from(value, limit, _power_of_two(mul(sub(value, top), scale))))
    return np.float64(sum_of(total))


@kernel
def _power_of_two(x):
    """2**x of numbers that are not above 0, within 3e-6 of it; below 2**-120 that."""
    x = maximum(x, splat(_F(-120)))
    whole = round_even(x)
    rest = sub(x, whole)
    p = fma(splat(P4), rest, splat(P3))
    p = fma(p, rest, splat(P2))
    p = fma(p, rest, splat(P1))
    p = fma(p, rest, splat(P0))
    return times_two_to(p, to_ints(whole))


@apart
def draw(p, has_draws, has_lists, scratch, laps):
    """What the sampled rows of a step have to choose from; nothing where no row asks for it."""
    if has_draws:
        _find_tops(p)
        meet(p, laps, LAP_DRAW)
        _find_bounds(p)
        meet(p, laps, LAP_DRAW)
    if has_lists:
        _list_tokens(p, scratch)
        meet(p, laps, LAP_DRAW)
