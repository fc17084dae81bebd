"""The runner on a GPU: plans go down as changes of rows, tokens come back through pinned memory one step late.

All steps are queued in one stream in the order of the plans, and swaps in another beside it; nothing waits for the
device but `wait`. A step in which rows only decode is one graph, and so are the hidden states of a step with prompts,
up to some thousand tokens. Log-probabilities of drawn tokens are made behind the draw. Rows that need more than the
device can sample are sampled on the host by the reference sampler, which makes their steps wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.engine import EngineConfig
from paceline.config.speculative import DRAFT_BUCKETS
from paceline.core.guide import Guide
from paceline.core.plan import GuideWork, RowLogprobs, StepPlan
from paceline.core.stretch import MediaInput
from paceline.models.decoder import Parts
from paceline.models.files.head_folder import HeadFiles
from paceline.models.spec import ModelSpec
from paceline.runner.gpu.adapters import AdapterRoom, DeviceAdapters
from paceline.runner.gpu.compile import compiling_only, watch_compilations
from paceline.runner.gpu.device_attention import FEW_ROWS, DeviceAttention, LaunchShape, SharedPrefixes
from paceline.runner.gpu.device_pictures import open_pictures
from paceline.runner.gpu.device_pooling import DevicePooler
from paceline.runner.gpu.device_queue import DeviceQueue, Mark
from paceline.runner.gpu.drafts.device_drafts import DeviceDrafts
from paceline.runner.gpu.drafts.device_head import (
    DeviceGuesser,
    DraftParts,
    FollowedStep,
    HeadSite,
    build_guesser,
    further_layers,
    queries_of,
)
from paceline.runner.gpu.drafts.drafted_steps import DraftedPending, DraftedSteps, StepParts
from paceline.runner.gpu.forward import DeviceDecoder, rotation_tables
from paceline.runner.gpu.graphs import (
    DRAWS,
    KINDS,
    MAX_SPANS,
    DecodeKey,
    DecodeKind,
    DrawKey,
    MixedKey,
    Step,
    StepGraphs,
    decode_keys,
    decode_kinds,
    draw_keys,
    mixed_key,
    mixed_keys,
    slot_bucket,
    spans_of,
    warm_shapes,
    warm_slots,
)
from paceline.runner.gpu.host_rows import DeviceBatch, HostRows
from paceline.runner.gpu.kernels.prefill_attention import Spans
from paceline.runner.gpu.kernels.step_rows import allocate_step_tokens, decode_inputs, span_inputs
from paceline.runner.gpu.kv_pools import KVPools, SwapPool
from paceline.runner.gpu.pending import GPUPending
from paceline.runner.gpu.picture_encoder import DevicePictureEncoder
from paceline.runner.gpu.slab_memory import HostPlaces, SlabMemory
from paceline.runner.gpu.token_sampling import AskedLogprobs, DeviceSampler, reports_of_prompts

Draw = Callable[[Mapping[int, Guide]], tuple[RowLogprobs, ...]]
AnyKey = TypeVar("AnyKey", DecodeKey, DrawKey)
_LARGE_STEP = 256  # steps too large to be replayed have a multiple of this number of tokens


class GPURunner:
    """Computes plans on one GPU."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        parts: Parts,
        eos_token_ids: tuple[int, ...],
        *,
        device: torch.device,
        graphs: bool = True,  # output does not depend on it
        kv_dtype: torch.dtype | None = None,  # None: that of the weights
        guesser: HeadFiles | DraftParts | None = None,  # makes drafts
        adapter_room: AdapterRoom | None = None,  # None: rows have no adapters
        eyes: DevicePictureEncoder | None = None,  # None: it sees no pictures
        memory: SlabMemory | None = None,  # that models share; None: it has its own
    ) -> None:
        self._config, self._queue = config, DeviceQueue(device)
        self.max_slots = max_slots = config.scheduler.max_num_seqs
        self._rows = HostRows(config, device)
        rows = self._rows.memory
        max_tokens = max(config.scheduler.max_num_batched_tokens, max_slots) + max_slots
        drafts = config.scheduler.drafts
        max_drafted = 0 if drafts is None else min(DRAFT_BUCKETS[-1], max_tokens)
        max_draws = max(max_slots, max_drafted)
        self._pictures = open_pictures(eyes, config.scheduler.encoder, max_tokens, self._queue)
        self._decoder = DeviceDecoder(
            spec,
            parts,
            max_tokens=max_tokens,
            max_logits=max_draws,
            max_kept=max_slots,
            device=device,
            taps=guesser.spec.taps if isinstance(guesser, HeadFiles) else (),
            pictures=None if self._pictures is None else self._pictures.pages,
        )
        further, dtype = further_layers(guesser), self._decoder.dtype
        self._pools = KVPools(spec, config.kv, rows.tables, kv_dtype or dtype, further, memory)
        self._swap_pool = SwapPool(self._pools.blocks, config.kv.num_host_blocks, self._queue)
        self._attention = DeviceAttention(
            spec,
            self._pools.layers,
            rotation_tables(spec, config.scheduler.max_model_len + 1, device),
            max_tokens=max_tokens,
            max_slots=max_slots,
            max_spans=rows.num_rows,
            dtype=dtype,
            most_queries=1 if drafts is None else queries_of(drafts.width),
        )
        self.adapters: DeviceAdapters | None = None
        if adapter_room is not None:
            self.adapters = DeviceAdapters(adapter_room, spec, rows, self._queue, max_tokens, dtype)
        self._sampler = DeviceSampler(rows, spec.vocab_size, eos_token_ids, self._queue, max_draws)
        self._pooler = DevicePooler(rows.num_rows + 1, spec.hidden_size, max_slots, self._queue)
        self._drafts: DeviceDrafts | None = None
        self._guesser: DeviceGuesser | None = None
        if drafts is not None:
            if guesser is not None:
                site = HeadSite(self._decoder, self._pools, rows, max_tokens)
                self._guesser = build_guesser(guesser, site, drafts.width, config.scheduler.max_model_len)
                self._rows.lends = False  # it has to see the tokens before
            sizes = {"vocab_size": spec.vocab_size, "max_tokens": max_drafted, "depth": config.depth}
            self._drafts = DeviceDrafts(drafts, rows, device=device, guesser=self._guesser, **sizes)
        self._tokens = allocate_step_tokens(max_tokens, len(rows.tables), device, eyes.axes if eyes else 0)
        self._visible = torch.zeros(rows.num_rows + 1, dtype=torch.int32, device=device)
        self._ring = torch.empty(
            config.depth + 2, 2, max_slots, dtype=torch.int32, pin_memory=self._queue.is_gpu
        )
        self._next_seq, self._graphs = 1, StepGraphs()
        self._drafted = None if self._drafts is None else self._drafted_steps(self._drafts, max_drafted)
        self._mixed = {adapted: self._mixed_keys(adapted=adapted) for adapted in (False, True)}
        self._prepare(graphs)

    def _drafted_steps(self, drafts: DeviceDrafts, max_tokens: int) -> DraftedSteps:
        parts = StepParts(
            queue=self._queue,
            rows=self._rows,
            decoder=self._decoder,
            attention=self._attention,
            sampler=self._sampler,
            tokens=self._tokens,
            visible=self._visible,
            graphs=self._graphs,
            adapters=self.adapters,
        )
        return DraftedSteps(parts, drafts, self._guesser, max_tokens)

    def _mixed_keys(self, *, adapted: bool) -> list[MixedKey]:
        """The steps with prompts that are replayed, of rows with adapters or without."""
        if not self._queue.is_gpu or (adapted and self.adapters is None):
            return []
        return mixed_keys(self.max_slots, self._config.scheduler.max_num_batched_tokens, adapted=adapted)

    def _prepare(self, graphs: bool) -> None:
        """Run every kind of step, and capture them."""
        self._queue.drain()  # weights and buffers were filled in another stream
        with self._queue.entered():
            if self._queue.is_gpu:
                with compiling_only():
                    self._warm_up()
            self._warm_up()
            if graphs and self._queue.stream is not None:
                self._graphs.capture(self._steps(), self._queue.stream)
        self._queue.drain()
        watch_compilations()

    def _steps(self) -> list[Step]:
        """Every step that is captured."""
        adapted = self.adapters is not None
        keys = decode_keys(self.max_slots, can_share=self._rows.can_share, adapted=adapted)
        steps: list[Step] = [(decode, partial(self._decode_step, decode)) for decode in keys]
        steps += [(draw, partial(self._draw_step, draw)) for draw in draw_keys(self.max_slots)]
        if self._drafted is not None:
            steps += self._drafted.steps()
        for mixed in self._mixed[False] + self._mixed[True]:
            shape = self._attention.shape_of(mixed.tokens, mixed.slots)
            steps.append((mixed, partial(self._forward, shape, mixed.adapted)))
        return steps

    def _warm_up(self) -> None:
        """Compile and load every kernel a step may launch: nothing is compiled while serving."""
        memory, scheduler = self._rows.memory, self._config.scheduler
        self._sampler.warm_up(self._decoder.dtype)
        self._pooler.warm_up(self._decoder.hidden)
        largest = scheduler.max_num_batched_tokens
        if self._queue.is_gpu:
            sizes = (*range(_LARGE_STEP, largest, _LARGE_STEP), largest)
            self._decoder.warm_up(sizes, None if self.adapters is None else self.adapters.of_none)
            if self._guesser is not None:
                self._guesser.warm_up(sizes)
        for slots in warm_slots(memory.max_slots):
            for kind in decode_kinds(self._rows.can_share, adapted=self.adapters is not None):
                self._decode_step(DecodeKey(slots, kind))
            for with_rules, guided in DRAWS:
                self._draw_step(DrawKey(slots, with_rules, guided))
        if self._drafted is not None:
            self._drafted.warm_up()
        if self._queue.is_gpu:  # steps too large to be replayed, with few decoding rows and with many
            for rows in (1, 16):
                number, count = spans_of(max(largest - rows, 1), scheduler.max_model_len)
                if rows + number <= memory.max_slots:
                    self._run(self._rows.dummy_batch(number, count, num_decode=rows))
        shapes = warm_shapes(memory.max_slots, largest, scheduler.max_model_len)
        for number, count in shapes if self._queue.is_gpu else shapes[:4]:
            batch = self._rows.dummy_batch(number, count)
            self._run(batch)
            if self.adapters is not None:
                self._mixed_step(batch, adapted=True)

    # -- how long steps take -----------------------------------------------------------------------------------

    def decode_seconds(self, slots: int) -> float:
        """How long a step of `slots` decoding rows takes, with short contexts."""
        key = DecodeKey(slot_bucket(slots, self.max_slots), KINDS[0])
        return self._queue.seconds(lambda: self._replay_or_run(key, self._decode_step))

    @property
    def draft_sizes(self) -> tuple[int, ...]:
        """Tokens of the steps with drafts that there are."""
        return () if self._drafted is None else self._drafted.sizes

    def drafted_seconds(self, num_tokens: int) -> float:
        """How long a step with drafts of that size takes, with short contexts."""
        assert self._drafted is not None
        return self._queue.seconds(partial(self._drafted.run_size, num_tokens))

    def mixed_seconds(self, num_tokens: int, num_decode: int, start: int = 0) -> float:
        """How long a step of `num_tokens` takes: `num_decode` of rows with short contexts, the rest of prompts of
        which `start` tokens are computed."""
        longest = self._config.scheduler.max_model_len - start
        number, count = spans_of(num_tokens - num_decode, longest)
        batch = self._rows.dummy_batch(number, count, start=start, num_decode=num_decode)
        return self._queue.seconds(lambda: self._run(batch))

    def context_seconds(self) -> float:
        """How long keys and values of a token take to be read, as far as a copy tells that."""
        keys = self._pools.layers[0].keys
        half = len(keys) // 2
        seconds = self._queue.seconds(lambda: keys[:half].copy_(keys[half : 2 * half]))
        byte_s = seconds / (2 * half * keys[0].nbytes)  # read and written
        return self._pools.context_bytes * byte_s

    def copy_out_and_back(self, count: int) -> None:
        """Copy `count` blocks to the swap pool and back, and wait for it; only while they are not in use."""
        self._swap_pool.copy_out_and_back(count)

    @property
    def kv_bytes(self) -> Tensor:
        return self._pools.memory.bytes

    def capture_again(self) -> None:
        """After weights or KV came back to another place; only while there are no rows."""
        with self._queue.entered():
            self._graphs.capture_again(self._steps(), self._queue.stream)
        self._queue.drain()

    @property
    def host_places(self) -> HostPlaces:
        """Where blocks lie that left the device."""
        return self._swap_pool.places

    # -- the runner seam -------------------------------------------------------------------------------------

    def hold(self, media: int, given: MediaInput) -> None:
        assert self._pictures is not None, "this model sees no pictures"
        self._pictures.hold(media, given)

    def drop(self, media: int) -> None:
        assert self._pictures is not None, "this model sees no pictures"
        self._pictures.drop(media)

    def reset(self, full: StepPlan) -> None:
        self._queue.drain()
        if self._pictures is not None and not len(full.joins.row):  # a step has failed: they may be anything
            self._pictures.clear()
        self._swap_pool.forget()
        self._next_seq = full.seq + 1
        self._rows.clear()
        self._pooler.clear()
        with self._queue.entered():
            self._apply(self._pools.in_units(full))
            self._rows.memory.send()

    def submit(self, plan: StepPlan) -> GPUPending | DraftedPending:
        assert plan.seq == self._next_seq, f"plan {plan.seq} after {self._next_seq - 1}"
        assert not len(plan.placements.row), "texts are placed by runners on a CPU only"
        self._next_seq += 1
        started_s = time.perf_counter()
        plan = self._pools.in_units(plan)
        with self._queue.entered():
            self._apply(plan)
            self._swap_pool.swap(plan.swap_out, plan.swap_in)
            if len(plan.block_copies.row):
                self._pools.copy_blocks(plan.block_copies)
            batch, bad_encodings = self._rows.batch(plan), None
            if self._pictures is not None:
                bad_encodings = self._pictures.encode(plan.encodes)
                self._pictures.put_tokens(self._rows, batch)
            drafted = None if self._drafted is None else self._drafted.key(plan, batch)
            if self._drafted is not None and drafted is not None:
                swapped = partial(self._swapped, wait=False)
                return self._drafted.submit(plan, batch, drafted, started_s=started_s, swapped=swapped)
            ring = self._ring[plan.seq % len(self._ring)]
            asked = self._sampler.logprobs.asked(batch, self._rows.num_tokens)
            draw = self._compute(batch, is_asked=asked is not None)
            pending = GPUPending(
                seq=plan.seq,
                batch=batch,
                ring=ring.numpy(),
                # A step without tokens has nothing to do but to wait for a swap.
                swapped=partial(self._swapped, wait=not (batch.num_tokens or plan.encodes.count)),
                started_s=started_s,
                draw=partial(self._draw_late, plan, ring, batch, asked, draw),
                asked=asked,
                vectors=self._pooler.made(),
                bad_encodings=bad_encodings,
                failed=None if self._drafts is None else self._drafts.failed,
                took=None if self._drafts is None else self._drafts.forced.took,
            )
            if not self._sampler.any_guided(batch):
                pending.done, pending.logprobs = self._finish(ring, batch, asked, draw, {})
            else:
                pending.computed = Mark.timed(self._queue.device)
            return pending

    def _swapped(self, *, wait: bool) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Tickets that are done, and those that failed, of which an empty step need not wait for others."""
        failed = self._swap_pool.take_failed()
        return self._swap_pool.completed(wait=wait and not len(failed)), failed

    def _draw_late(
        self,
        plan: StepPlan,
        ring: Tensor,
        batch: DeviceBatch,
        asked: AskedLogprobs | None,
        draw: Draw | None,
        guides: Mapping[int, Guide],
    ) -> tuple[Mark, tuple[RowLogprobs, ...], GuideWork | None, Mark]:
        with self._queue.entered():
            done, logprobs = self._finish(ring, batch, asked, draw, guides)
        if self._drafts is not None and self._drafts.looks_ahead(plan):
            self._drafts.forced.look(batch.sampled.tolist(), guides)
        return done, logprobs, self._sampler.guided, self._sampler.masked

    def _finish(
        self,
        ring: Tensor,
        batch: DeviceBatch,
        asked: AskedLogprobs | None,
        draw: Draw | None,
        guides: Mapping[int, Guide],
    ) -> tuple[Mark, tuple[RowLogprobs, ...]]:
        """Draw the tokens of a step, unless its graph has, and send them to the host."""
        logprobs = () if draw is None else draw(guides)
        if len(batch.decode) + len(batch.finishing):
            # Whole: torch waits for a copy that has gaps.
            ring.copy_(self._sampler.drawn, non_blocking=True)
        if asked is not None:
            self._sampler.logprobs.send(asked)
        return self._queue.mark(), logprobs

    def _run(self, batch: DeviceBatch) -> None:
        """Compute a batch without guides, to see how it goes."""
        draw = self._compute(batch)
        if draw is not None:
            draw({})

    # -- one step --------------------------------------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        rows, sampler, joins = self._rows, self._sampler, plan.joins
        if len(plan.leaves):
            leaving = plan.leaves.tolist()
            sampler.leave(leaving)
            self._pooler.leave(leaving)
            if self._drafts is not None:
                self._drafts.leave(leaving)
        rows.apply(plan)
        if not len(joins.row):
            return
        sampler.write_columns(joins)
        self._pooler.join(joins)
        if self._pictures is not None:
            self._pictures.join(joins, rows)
        if self._drafts is not None:
            self._drafts.join(joins)
        if self.adapters is not None:
            self.adapters.join(joins)
        rows.memory.send()
        if self._guesser is not None:
            self._guesser.fork(plan.row_copies)
        joined = joins.row.tolist()
        sampler.count_known_tokens(joined)
        for row, params, tokens in zip(joined, joins.sampling, joins.tokens, strict=True):
            if sampler.is_host[row]:
                known = tokens
                if not len(tokens):  # a branch: its parent's tokens are on the device
                    known = rows.memory["tokens"].device[row, : rows.num_tokens[row]].cpu().numpy()
                sampler.host.join(row, params, known, int(rows.num_prompt[row]))

    def _compute(self, batch: DeviceBatch, *, is_asked: bool = False) -> Draw | None:
        """Compute a batch; returns what draws its tokens, or None where that is done. `is_asked`: rows that get a token
        ask for its log-probability."""
        rows, sampler = self._rows, self._sampler
        if not batch.num_tokens:
            rows.memory.send()
            return None
        sampled = batch.sampled
        on_host = bool(sampler.is_host[sampled].any() or sampler.is_host[batch.spans].any())
        with_rules, is_guided = bool(sampler.has_logit_rules[sampled].any()), sampler.any_guided(batch)
        adapted = self.adapters is not None and self.adapters.are_in(batch)
        if not len(batch.spans) and not batch.num_pad and not on_host:
            rows.memory.send()
            slots = slot_bucket(len(batch.decode), self.max_slots)
            kind = DecodeKind(with_rules=with_rules, shared=bool(rows.sharing), adapted=adapted)
            return self._decode(DrawKey(slots, with_rules, is_guided), kind, sampled, is_asked)
        # In a bucket too: a product of a size that has not been seen loads its kernel then, and waits for the device.
        num_draws = slot_bucket(len(sampled), self.max_slots) if len(sampled) else 0
        rows.put_batch(batch, MAX_SPANS, num_draws)
        rows.memory.send()
        hidden = self._mixed_step(batch, adapted=adapted)
        if self._pooler:
            self._pooler.take(batch, rows, hidden, self._decoder.logits)
        found: tuple[RowLogprobs, ...] = ()
        if on_host:
            found = reports_of_prompts(rows, batch, hidden, self._decoder)
        if not len(sampled):
            return lambda guides: found
        slot_rows = rows.memory.column("sample_rows")[:num_draws]
        logits = self._decoder.logits(hidden, rows.memory.column("sample_tokens")[:num_draws])
        positions = rows.num_tokens[sampled] - 1

        def draw(guides: Mapping[int, Guide]) -> tuple[RowLogprobs, ...]:
            changes = with_rules or is_guided
            raw = self._decoder.keep_logits(num_draws) if is_asked and changes else logits
            masks = None
            if is_guided:
                masks = sampler.load_masks(sampled, guides)
                sampler.hide(logits)
            sampler.sample(logits, slot_rows, with_rules=with_rules)
            more = sampler.sample_on_host(logits, sampled, positions, masks) if on_host else ()
            sampler.update(slot_rows, with_rules=with_rules)
            if is_asked:
                sampler.report(raw, slot_rows)
            return found + more

        return draw

    def _decode(
        self, key: DrawKey, kind: DecodeKind, sampled: NDArray[np.int64], is_asked: bool
    ) -> Draw | None:
        """A step in which all rows decode: one graph, or one up to the logits and one that draws. The second is needed
        where masks come late, where rules change logits that are asked about, and for kinds that have no rules."""
        if key.guided or (key.with_rules and (is_asked or kind.shared or kind.adapted)):
            kind = kind._replace(with_rules=False, undrawn=True)
            self._replay_or_run(DecodeKey(key.slots, kind), self._decode_step)
            return partial(self._draw_decoded, key, sampled, is_asked)
        self._replay_or_run(DecodeKey(key.slots, kind), self._decode_step)
        if is_asked:
            self._sampler.report(self._decoder.last_logits(key.slots), self._slot_rows(key.slots))
        return None

    def _draw_decoded(
        self, key: DrawKey, sampled: NDArray[np.int64], is_asked: bool, guides: Mapping[int, Guide]
    ) -> tuple[RowLogprobs, ...]:
        raw = self._decoder.keep_logits(key.slots) if is_asked else None
        if key.guided:
            self._sampler.load_masks(sampled, guides)
        self._replay_or_run(key, self._draw_step)
        if raw is not None:
            self._sampler.report(raw, self._slot_rows(key.slots))
        return ()

    def _slot_rows(self, slots: int) -> Tensor:
        return self._rows.memory.column("slot_rows")[:slots]

    def _draw_step(self, key: DrawKey) -> None:
        """The draw of a decode step that was computed up to its logits."""
        slot_rows = self._slot_rows(key.slots)
        logits = self._decoder.last_logits(key.slots)
        if key.guided:
            self._sampler.hide(logits)
        self._sampler.sample(logits, slot_rows, with_rules=key.with_rules)
        self._sampler.update(slot_rows, with_rules=key.with_rules)

    def _replay_or_run(self, key: AnyKey, run: Callable[[AnyKey], None]) -> None:
        if not self._graphs.replay(key):
            run(key)

    def _decode_step(self, key: DecodeKey) -> None:
        """A step in which all rows decode."""
        memory, slots, kind = self._rows.memory, key.slots, key.kind
        slot_rows = self._slot_rows(slots)
        overlapped = self._queue.is_gpu and slots <= FEW_ROWS
        shape = LaunchShape(num_tokens=slots, num_slots=slots, overlapped=overlapped)
        decode_inputs(self._tokens, self._visible, memory.columns, slot_rows, memory.tables)
        if self._pictures is not None:
            self._pictures.turn(self._tokens, slots, slot_rows, memory)
        prefixes = None
        if kind.shared:
            prefixes = SharedPrefixes(tokens=memory.column("shared"), groups=memory.shared_groups())
        step = self._attention.begin(shape, slot_rows, self._visible, None, prefixes)
        adapters = None
        if kind.adapted:
            assert self.adapters is not None
            adapters = self.adapters.of_rows(slot_rows)
        hidden = self._decoder.forward(self._tokens, self._attention, step, adapters)
        self._follow(shape, slot_rows, None, hidden)
        logits = self._decoder.logits(hidden, None)
        if kind.undrawn:
            return
        self._sampler.sample(logits, slot_rows, with_rules=kind.with_rules)
        self._sampler.update(slot_rows, with_rules=kind.with_rules)

    def _mixed_step(self, batch: DeviceBatch, *, adapted: bool) -> Tensor:
        """Hidden states of a step with prompts, in a bucket if there is one that holds it."""
        num_tokens, number = batch.num_tokens, len(batch.spans)
        key = None
        if number <= MAX_SPANS:
            key = mixed_key(self._mixed[adapted], num_tokens, len(batch.decode))
        if key is None:
            tiles = int((-(-batch.count // self._attention.tile_tokens)).sum())
            longest = int(batch.count.max()) if number else 0
            shape = LaunchShape(
                num_tokens=self._rounded(num_tokens),
                num_slots=len(batch.decode),
                num_spans=number,
                num_tiles=tiles,
                longest_span=longest,
            )
            return self._forward(shape, adapted)[:num_tokens]
        if self._graphs.replay(key):
            return self._decoder.hidden[:num_tokens]
        return self._forward(self._attention.shape_of(key.tokens, key.slots), adapted)[:num_tokens]

    def _rounded(self, num_tokens: int) -> int:
        """The size a step that is not replayed is computed at: one whose products have been seen at the start."""
        if not self._queue.is_gpu:
            return num_tokens
        up = -(-num_tokens // _LARGE_STEP) * _LARGE_STEP
        return max(num_tokens, min(up, self._config.scheduler.max_num_batched_tokens))

    def _forward(self, shape: LaunchShape, adapted: bool) -> Tensor:
        """Hidden states of the tokens of decoding rows, then those of spans; what is left over is stored nowhere."""
        memory, tokens = self._rows.memory, self._tokens
        slot_rows = self._slot_rows(shape.num_slots)
        columns = ((tokens.ids, 0), (tokens.positions, 0), *((slots, -1) for slots in tokens.slots))
        for column, nothing in columns:
            column[: shape.num_tokens].fill_(nothing)
        if shape.num_slots:
            decode_inputs(tokens, self._visible, memory.columns, slot_rows, memory.tables)
        spans = None
        if shape.num_spans:
            spans = memory.spans(shape.num_spans)
            span_inputs(tokens, spans, shape.longest_span, memory.columns, memory.tables)
        if self._pictures is not None:
            self._pictures.turn(tokens, shape.num_tokens, slot_rows, memory)
        step = self._attention.begin(shape, slot_rows, self._visible, spans)
        adapters = None
        if adapted:
            assert self.adapters is not None
            adapters = self.adapters.of_spans(shape.num_tokens, slot_rows, spans, shape.longest_span)
        hidden = self._decoder.forward(tokens, self._attention, step, adapters)
        self._follow(shape, slot_rows, spans, hidden)
        return hidden

    def _follow(self, shape: LaunchShape, slot_rows: Tensor, spans: Spans | None, hidden: Tensor) -> None:
        """A step without drafts has been computed: what guesses keeps what it needs of it."""
        if self._guesser is not None:
            step = FollowedStep(
                shape=shape, tokens=self._tokens, visible=self._visible, slot_rows=slot_rows, spans=spans
            )
            self._guesser.follow(step, hidden)
