"""Where everything lies in memory: the one table that the kernels and the runner both read.

Weights are panels of 16 outputs. In a quantised panel 32 inputs are a group, and four bytes that a dot product takes
together are four inputs of one column:

    group    [quad][16 columns][4 inputs]  then 16 scales and 16 offsets as halves
    4 bits   4 quads of 64 bytes: low nibbles are inputs 0 to 15, high nibbles 16 to 31     256 + 64 bytes
    8 bits   8 quads of 64 bytes                                                            512 + 64 bytes
    16 bits, float32: [input][16 columns]; no groups, inputs are not quantised

A weight is scale * q + offset. Quantised inputs stand four rows abreast, a tile, so that one load feeds four rows:

    x        [tile][quad][row][4]  bytes
    scales   [tile][group][row](scale, scale * sum, -128 * sum as an integer, -128 * sum of the rests)

Where all quantised panels have 8 bits, inputs have 16: each group's bytes are followed by as many that count what
rounding left of them, in steps of a 254th.

Keys and values of one layer are cut into sub-blocks of 16 tokens; a block of the scheduler is one or more of them:

    sub-block  [kv head](keys [head dim][16 tokens], values [16 tokens][head dim])  float32
    in bytes   [kv head](keys [quad][16 tokens][4], values [16 tokens][head dim]  bytes,
                         scales of keys [16 tokens], scales of values [16 tokens]  float32)

An encoder's keys and values are those of one layer: a text has sub-blocks one behind the other, and the next layer
writes over them. Its embedding is no matrix of panels, but a row of floats for each token.

Vectors of pictures are rows of floats. Where a token stands for one, `seen` has its address, else 0; behind it lie
those that the first `deep` layers add. Their encoder is called for some units of one layer and one stage at a time:
addresses of what those units have are those of the first.

An adapter has two matrices for each part of a layer that it changes, of 16 or 32 bits:

    A        [rank][inputs], ranks filled up with zeros to a multiple of four;   B   panels of 16 outputs, [rank][16]
"""

from __future__ import annotations

GROUP = 32  # inputs that share a scale
COLUMNS = 16  # outputs of a panel
TILE = 4  # rows abreast
QUAD = 4  # inputs of a dense product that are taken together
SUB_BLOCK = 16  # tokens
INPUT_SCALES = 16  # bytes for a row and group
Q4_GROUP, Q8_GROUP = 320, 576  # bytes of a group of a panel
Q4_UNPACKED = 640  # the same with bytes and float32 scales

# Kinds of panels, by number in a step's parameters.
Q4, Q8, F16, BF16, F32, Q8_FINE = range(6)  # the last: 8 bits with inputs of 16
KINDS = ("q4", "q8", "f16", "bf16", "f32", "q8")
QUANTISED = (Q4, Q8, Q8_FINE)
REST_STEPS = 254  # of an input's first byte
SILU, GELU_TANH, GELU = range(3)
# What a call of an encoder computes: texts whole; or of units of pictures keys and values, attention and what follows,
# the states that vectors are made of, or these vectors.
WHOLE, KEYS, REST, STATES, VECTORS = range(5)


def kv_head_bytes(dim: int, *, in_bytes: bool) -> int:
    """Bytes of one kv head of a sub-block: keys and values of 16 tokens, and in bytes two scales of each token."""
    return 2 * SUB_BLOCK * (dim + 4 if in_bytes else 4 * dim)


def panel_bytes(kind: int, inputs: int) -> int:
    """Bytes of one panel of 16 outputs."""
    if kind in QUANTISED:
        return inputs // GROUP * (Q4_GROUP if kind == Q4 else Q8_GROUP)
    return inputs * COLUMNS * (4 if kind == F32 else 2)


# Offsets in the parameters of a step: one column of 64-bit sizes and addresses, changed between steps only.
(
    S_THREADS,
    S_SLEEPS,
    S_STEP,
    S_STOP,
    S_PHASE,
    S_ONLY_LOGITS,
    S_NUM_TOKENS,
    S_NUM_TILES,
    S_NUM_SAMPLED,
    S_NUM_LAYERS,
    S_HIDDEN,
    S_HEADS,
    S_KV_HEADS,
    S_HEAD_DIM,
    S_ROTARY_DIM,
    S_INNER,
    S_VOCABULARY,
    S_EMBED_SCALE,
    S_NORM_EPS,
    S_SOFTMAX_SCALE,
    S_ACTIVATION,
    S_INPUT_BYTES,
    S_EMBEDDING_KIND,
    S_EMBEDDING,
    S_HEAD_KIND,
    S_HEAD,
    S_LAST_NORM,
    S_LAYERS,
    S_SYNC,
    S_SLEEPING,
    S_SEMAPHORES,
    S_LAPS,
    S_TOKENS,
    S_POSITIONS,
    S_TILES,
    S_SAMPLED,
    S_FINITE,
    S_RESIDUAL,
    S_DELTA,
    S_NORMED,
    S_NORMED_Q,
    S_NORMED_SCALES,
    S_QUERIES,
    S_ATTENDED,
    S_ATTENDED_Q,
    S_ATTENDED_SCALES,
    S_GATED,
    S_GATED_Q,
    S_GATED_SCALES,
    S_SCRATCH,
    S_SCRATCH_STEP,
    S_UNPACKED,
    S_UNPACKED_STEP,
    S_SCORES_STEP,
    S_LOGITS,
    S_LOGITS_STEP,
    S_NUM_EXPERTS,
    S_PER_TOKEN,
    S_NORMALIZE,
    S_EXPERT_INNER,
    S_CHOSEN,
    S_FIRSTS,
    S_SIZES,
    S_ENTRIES,
    S_PLACES,
    S_EXPERT_X,
    S_EXPERT_X_Q,
    S_EXPERT_X_SCALES,
    S_EXPERT_PARTS,
    S_VOCAB_SIZE,
    S_NUM_DRAWS,
    S_HAS_LISTS,
    S_DRAWS,
    S_NUM_STRETCHES,
    S_DRAW_PARTS,
    S_LISTED,
    S_MAXIMA,
    S_KV_IN_BYTES,
    S_ENDS,
    S_ADAPTED,
    S_NUM_ADAPTED_BLOCKS,
    S_ADAPTED_BLOCKS,
    S_ADAPTED_TOKENS,
    S_LOW,
    S_LOW_STEP,
    S_LOW_PART,
    S_IS_ENCODER,
    S_PLACE_VECTORS,
    S_SECONDS,
    S_SECOND_VECTOR,
    S_FIRST_NORM,
    S_FIRST_NORM_BIAS,
    S_LAST_NORM_BIAS,
    S_SEEN,
    S_STAGE,
    S_PATCHES,
    S_PATCH_INPUTS,
    S_CHOSEN_UNITS,
    S_IS_RMS,
    S_OUTPUTS,
    S_DEEP,
) = range(0, 808, 8)
# In the row of one layer. An address of 0: the model does not have it.
(
    L_Q_KIND,
    L_Q,
    L_K_KIND,
    L_K,
    L_V_KIND,
    L_V,
    L_OUTPUT_KIND,
    L_OUTPUT,
    L_GATE_KIND,
    L_GATE,
    L_UP_KIND,
    L_UP,
    L_DOWN_KIND,
    L_DOWN,
    L_NORM_BEFORE_ATTENTION,
    L_NORM_AFTER_ATTENTION,
    L_NORM_BEFORE_FEED_FORWARD,
    L_NORM_AFTER_FEED_FORWARD,
    L_QKV_BIAS,
    L_OUTPUT_BIAS,
    L_Q_NORM,
    L_K_NORM,
    L_COS,
    L_SIN,
    L_WINDOW,
    L_TABLE,
    L_TABLE_WIDTH,
    L_SLOTS,
    L_KV,
    L_BLOCK_BYTES,
    L_SUBS,
    L_ROUTER_KIND,
    L_ROUTER,
    L_EXPERTS,
    L_REACH,
    L_GATE_BIAS,
    L_DOWN_BIAS,
    L_NORM_BIAS_BEFORE_ATTENTION,
    L_NORM_BIAS_BEFORE_FEED_FORWARD,
    L_UP_BIAS,
) = range(0, 320, 8)
# In the row of one expert of a layer.
(
    E_GATE_KIND,
    E_GATE,
    E_UP_KIND,
    E_UP,
    E_DOWN_KIND,
    E_DOWN,
) = range(0, 48, 8)
# In the row of one part of a layer of an adapter; an address of 0: it leaves that part as it is. Kinds are those of
# panels.
(
    M_A_KIND,
    M_A,
    M_B_KIND,
    M_B,
    M_RANKS,
) = range(0, 40, 8)
PARTS = ("q", "k", "v", "o", "gate", "up", "down")  # of a layer, in the order of these rows
PART_Q, PART_K, PART_V, PART_O, PART_GATE, PART_UP, PART_DOWN = range(7)
NUM_PARTS = len(PARTS)
# In a block of tokens that have one adapter: its table, and where the tokens stand among all that have one.
(
    B_ADAPTER,
    B_FIRST,
    B_COUNT,
) = range(0, 24, 8)
ADAPTED_BLOCK_BYTES = 24
# In a tile of queries: tokens of one row that attention takes together.
(
    T_FIRST,
    T_COUNT,
    T_ROW,
) = range(0, 24, 8)
# Of tokens that are placed, in all layers: how many there are, where they are found and where they go, and the table of
# the layers. Then in the row of one layer.
(
    R_KV_HEADS,
    R_HEAD_DIM,
    R_ROTARY_DIM,
    R_BLOCK_BYTES,
    R_COUNT,
    R_SOURCES,
    R_TARGETS,
    R_NUM_LAYERS,
    R_LAYERS,
) = range(0, 72, 8)
(
    R_KV,
    R_COS,
    R_SIN,
) = range(0, 24, 8)
# In the row of one draw: what is asked of a sampled row, then what the step found of it.
(
    D_KIND,
    D_KEY,
    D_POSITION,
    D_INVERSE,
    D_REACH,
    D_TOP_K,
    D_HAS_MASS,
    D_TOP,
    D_BEST,
    D_BOUND,
) = range(0, 80, 8)
# In the row of one stretch of the vocabulary of a draw: its largest logit, and the tokens listed.
(
    P_TOP,
    P_BEST,
    P_COUNT,
    P_MASS,
) = range(0, 32, 8)


def symbol_of(kernel: str) -> str:
    """What a kernel is called in the compiled code."""
    return f"paceline_{kernel}"


def _fields(prefix: str) -> dict[str, int]:
    """Places of the fields of a row, by name."""
    return {name[2:].lower(): at // 8 for name, at in globals().items() if name.startswith(prefix)}


STEP, LAYER, EXPERT = _fields("S_"), _fields("L_"), _fields("E_")
DRAW, PART, MATRICES = _fields("D_"), _fields("P_"), _fields("M_")
LAYER_BYTES, EXPERT_BYTES, QUERY_TILE_BYTES = 8 * len(LAYER), 8 * len(EXPERT), 24
PLACED_LAYER_BYTES = 24
DRAW_BYTES, PART_BYTES, PART_MATRICES_BYTES = 8 * len(DRAW), 8 * len(PART), 8 * len(MATRICES)
MOST_QUERY_TOKENS = 16  # in a tile of queries
ROW_BLOCK = 64  # rows of a piece of `heads`, where there are many
MOST_THREADS = 256  # more than there can be
LINE = 64  # bytes that no two threads write
# In `sync`: which meeting is next, and where the pieces of every phase begin: behind all there are, when a step is to
# end early; how many threads have come; the next piece. A line of the cache for each that threads write often. Then two
# lines for threads that sleep at a meeting, one for even meetings and one for odd ones: how many, and their semaphore.
Y_FIRST_PIECE, Y_ARRIVED, Y_PIECE, Y_ASLEEP, SYNC_BYTES = 8, LINE, 2 * LINE, 3 * LINE, 5 * LINE
SEMAPHORE = 16  # in a line for threads that sleep
NO_PIECES = 1 << 40
# The table of the checking form (see `checks`): what was missed, a place where a miss does no harm, then ranges of
# memory in order, three numbers each: start, end, whether it may be written.
(
    C_COUNT,
    C_MISSES,
    C_MISSED_AT,
    C_MISSED_SIZE,
    C_MISSED_WRITES,
    C_YIELDS,
    C_DRAWN,
) = range(0, 56, 8)
C_HARMLESS, C_RANGES = 64, 128
ALLOW = "allow"  # a function that takes the address of the table
# Kernels that can be called alone (`kernels.probe`).
PROBES = (
    "panel",
    "quantise",
    "norm",
    "attend",
    "activate",
    "rotate",
    "exp",
    "embed",
    "draw",
    "keep_bytes",
    "shrink",
    "expand",
)
# What is called from outside of the compiled code, and what that needs from the C library.
ENTRIES = ("enter", "probe", "place")
LIBC = ("sched_yield", "sem_wait", "sem_post", "clock_gettime", "memcpy", "memset", "memmove")
LIBM = ("fmaf",)  # where a processor has no such instruction; its result has the same bits
PHASES = ("rows", "heads", "attention", "products", "gated", "logits", "draw", "waiting")
LAP_BYTES = 2 * LINE  # the times of one thread
# Draws. A row has no draw, its largest logit, the tokens whose noise can make them win, or all tokens near the top.
NO_DRAW, GREEDY, RACE, NEAR_TOP = range(4)
STRETCH = 8192  # tokens of a piece of a draw
BLOCK = 256  # tokens that share sixteen maxima, one for each lane
LISTED = 4096  # tokens that a stretch can list
LISTED_BYTES = 16  # of one token: its id, logit and random word, and the row, 32 bits each
DRAW_SCRATCH = 1024
