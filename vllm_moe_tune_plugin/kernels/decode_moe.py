"""An MoE layer for a handful of tokens in two launches.

Decode reads each chosen expert's weights once and does little with them, so that time is bytes over bandwidth plus whatever
keeps the memory idle. Stock takes five launches; here the first computes the gate and up projections with the activation,
the second the down projection with the router-weighted sum. What keeps memory busy:

* a program's loads of one step are all independent, and are issued before the first of them is used;
* the second kernel is launched while the first still runs (programmatic dependent launch) and has the first tiles of its
  weights in registers by the time the first one's results are there;
* programs that read the same rows for different tokens are neighbours, so that an expert chosen by several tokens comes
  from memory once and from the L2 cache after that;
* where experts are shared out to ranks, programs look for this rank's pairs first: there are as many programs as it expects
  pairs, and none multiplies zeros for experts of other ranks.

Every sum has one fixed order: the same input gives the same bits in every run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm_moe_tune_plugin import gpu
from vllm_moe_tune_plugin.kernels.scales import Scale

#: Warps that a multiprocessor holds even where each thread takes all the registers that it may (255 of 65536).
ROOMY = 8
#: Programs of the first kernel that a multiprocessor holds.
RESIDENT = 16
#: Pairs that a program of the first kernel looks through at least for those of this rank's experts.
LEAST_PADDED = 128
#: Scales that a thread of the second kernel keeps in registers while it waits for the first.
MOST_SCALES_AHEAD = 32


@triton.jit  # type: ignore[untyped-decorator]
def _local_pairs(ids, expert_map, first, pairs, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of ``pairs`` pairs from ``first`` on have an expert on this rank.

    Returns each one's place among those, -1 for the others; its number and its local expert in one value; how many they are.
    """
    number = tl.arange(0, PADDED)
    expert = tl.load(ids + first + number, mask=number < pairs, other=-1).to(tl.int64)
    # A negative id must not wrap around to the map's last entry.
    local = tl.load(expert_map + tl.maximum(expert, 0), mask=expert >= 0, other=-1).to(tl.int64)
    is_local = (local >= 0).to(tl.int32)
    place = tl.where(local >= 0, tl.cumsum(is_local, 0) - 1, -1)
    return place, (local << 32) + first + number, tl.sum(is_local)


@triton.jit
def _local_pair(places, pairs, place):  # type: ignore[no-untyped-def]
    """The pair at a place among this rank's, and its expert."""
    # Beyond the last one it is nobody's: -1, the pair 2**32 - 1 of expert -1.
    found = tl.max(tl.where(places == place, pairs, -1))
    return found & 0xFFFFFFFF, found >> 32


@triton.jit  # type: ignore[untyped-decorator]
def _token_pair(ids, places, pairs, token, slot, TOP_K: tl.constexpr, HAS_MAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a token the pair in this slot and its expert, negative where it has none; with a map this rank's come first."""
    if HAS_MAP:
        return _local_pair(places, pairs, slot)
    pair = (token * TOP_K + slot).to(tl.int64)
    return pair, tl.load(ids + pair).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu":  # noqa: RET505  (Triton compiles one branch of a chain)
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(2.0 * inner) * up  # 0.5 * (1 + tanh(x)) is sigmoid(2x)
    elif ACTIVATION == "swigluoai":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate * tl.sigmoid(alpha * gate) * (up + 1.0)
    else:
        tl.static_assert(ACTIVATION == "relu2_no_mul")
        positive = tl.maximum(gate, 0.0)
        return positive * positive


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x,
    x_scale,
    w1,
    w1_scale,
    bias,
    ids,
    expert_map,
    h,
    pairs,
    alpha,
    limit,
    x_stride,
    x_scale_token,
    x_scale_group,
    w_expert,
    w_row,
    w_scale_expert,
    w_scale_row,
    w_scale_group,
    bias_expert,
    K: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    GATE_STEP: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr,
    X_SCALED: tl.constexpr,
    W_SCALED: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """h[pair, n] = activation(gate . x, up . x) for ROWS values of n of one (token, expert) pair.

    With an expert map there are programs for as many pairs as are expected on this rank. They share out those that are there.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.program_id(0)
    if HAS_MAP:
        places, found, count = _local_pairs(ids, expert_map, 0, pairs, PADDED)
        turns = tl.cdiv(tl.maximum(count - first, 0), tl.num_programs(0))
    else:
        only = tl.load(ids + first).to(tl.int64)
        if only < 0:
            return
        turns = 1
    for turn in tl.range(0, turns, num_stages=1):
        if HAS_MAP:
            pair, expert = _local_pair(places, found, first + turn * tl.num_programs(0))
        else:
            pair, expert = first, only
        # With a map always so; asked all the same, the compiler needs fewer registers.
        if not HAS_MAP or expert >= 0:
            token = pair // TOP_K
            n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
            in_n = n < N
            # A row beyond the last reads the last one again: its load needs no mask, its result is not stored.
            row = tl.minimum(n, N - 1)
            gate_row = row * GATE_STEP
            lane = tl.arange(0, COLUMNS // VECTOR)
            column = lane[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
            # Threads go along the columns of a row: a thread has VECTOR of them in each row.
            gate_at = w1 + expert * w_expert + (gate_row.to(tl.int64) * w_row)[None, :, None] + column[:, None, :]
            up_at = gate_at + UP_OFFSET * w_row
            x_at = x + token * x_stride + column

            # All scales are asked for before the first of them is needed: they come from memory, as the weights do.
            gate_scales = ()
            up_scales = ()
            if X_SCALED == 2:
                # ROWS divides GROUP_N: one row of scales serves all of the program's rows.
                first_row = tl.program_id(1) * ROWS * GATE_STEP
                for start in tl.static_range(0, K, COLUMNS):
                    # A thread's VECTOR values are in one group.
                    group = tl.minimum(start + lane * VECTOR, K - 1) // GROUP_K
                    scale_at = w1_scale + expert * w_scale_expert + group * w_scale_group
                    gate_scales = gate_scales + (tl.load(scale_at + (first_row // GROUP_N) * w_scale_row),)  # type: ignore[assignment]  # noqa: RUF005
                    up_scales = up_scales + (tl.load(scale_at + ((first_row + UP_OFFSET) // GROUP_N) * w_scale_row),)  # type: ignore[assignment]  # noqa: RUF005

            gate_sum = tl.zeros((COLUMNS // VECTOR, ROWS), tl.float32)
            up_sum = tl.zeros((COLUMNS // VECTOR, ROWS), tl.float32)
            for start in tl.static_range(0, K, COLUMNS):
                if start + COLUMNS <= K:
                    gate = tl.load(gate_at + start, eviction_policy="evict_first")
                    if UP_OFFSET > 0:
                        up = tl.load(up_at + start, eviction_policy="evict_first")
                    values = tl.load(x_at + start).to(tl.float32)
                else:
                    in_k = start + column < K
                    gate = tl.load(gate_at + start, mask=in_k[:, None, :], other=0.0, eviction_policy="evict_first")
                    if UP_OFFSET > 0:
                        up = tl.load(up_at + start, mask=in_k[:, None, :], other=0.0, eviction_policy="evict_first")
                    values = tl.load(x_at + start, mask=in_k, other=0.0).to(tl.float32)
                gate_part = tl.sum(gate.to(tl.float32) * values[:, None, :], 2)
                if UP_OFFSET > 0:
                    up_part = tl.sum(up.to(tl.float32) * values[:, None, :], 2)
                if X_SCALED == 2:
                    group = tl.minimum(start + lane * VECTOR, K - 1) // GROUP_K
                    scale = tl.load(x_scale + token * x_scale_token + group * x_scale_group)
                    gate_part *= (scale * gate_scales[start // COLUMNS])[:, None]
                    if UP_OFFSET > 0:
                        up_part *= (scale * up_scales[start // COLUMNS])[:, None]
                gate_sum += gate_part
                if UP_OFFSET > 0:
                    up_sum += up_part

            gate_out = tl.sum(gate_sum, 0)
            up_out = tl.sum(up_sum, 0)
            if X_SCALED == 1:
                scale = tl.load(x_scale + token * x_scale_token)
                gate_out *= scale
                up_out *= scale
            if W_SCALED == 1:
                scale_at = w1_scale + expert * w_scale_expert + gate_row * w_scale_row
                gate_out *= tl.load(scale_at)
                if UP_OFFSET > 0:
                    up_out *= tl.load(scale_at + UP_OFFSET * w_scale_row)
            if HAS_BIAS:
                bias_at = bias + expert * bias_expert + gate_row
                gate_out += tl.load(bias_at).to(tl.float32)
                if UP_OFFSET > 0:
                    up_out += tl.load(bias_at + UP_OFFSET).to(tl.float32)
            result = _activate(gate_out, up_out, alpha, limit, ACTIVATION)
            tl.store(h + pair.to(tl.int64) * N + n, result.to(h.dtype.element_ty), mask=in_n)


@triton.jit  # type: ignore[untyped-decorator]
def _down_tile(w2_at, expert, w_expert, in_row, column, PART: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    mask = in_row & (expert >= 0)
    at = w2_at + expert * w_expert + PART * COLUMNS
    if (PART + 1) * COLUMNS <= N:
        return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    return tl.load(at, mask=mask & (PART * COLUMNS + column < N)[:, None, :], other=0.0, eviction_policy="evict_first")


@triton.jit  # type: ignore[untyped-decorator]
def _down_kernel(  # type: ignore[no-untyped-def]
    h,
    w2,
    w2_scale,
    bias,
    ids,
    topk_weights,
    expert_map,
    out,
    w_expert,
    w_row,
    w_scale_expert,
    w_scale_row,
    w_scale_group,
    bias_expert,
    out_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    W_SCALED: tl.constexpr,
    GROUP_K: tl.constexpr,
    GROUP_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    PADDED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    AHEAD: tl.constexpr,
    SCALES_AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[token, k] = sum over the token's experts of weight * (w2[expert, k] . h[pair]) for ROWS values of k."""
    TILES: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    token = tl.program_id(0)
    k = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_k = (k < K)[None, :, None]
    lane = tl.arange(0, COLUMNS // VECTOR)
    column = lane[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    w2_at = w2 + (k.to(tl.int64) * w_row)[None, :, None] + column[:, None, :]

    # Weights and ids do not come from the first kernel, and what came before it is complete: it waited for that itself.
    places, found, count = ids, ids, TOP_K
    if HAS_MAP:
        places, found, count = _local_pairs(ids, expert_map, token * TOP_K, TOP_K, PADDED)
    ahead = ()
    for index in tl.static_range(AHEAD):
        _, expert = _token_pair(ids, places, found, token, index // TILES, TOP_K, HAS_MAP)
        loaded = _down_tile(w2_at, expert, w_expert, in_k, column, index % TILES, N, COLUMNS)
        ahead = ahead + (loaded,)  # type: ignore[assignment]  # noqa: RUF005  (Triton knows no unpacking)
    scales = ()
    if W_SCALED == 2:
        first = tl.program_id(1) * ROWS
        for index in tl.static_range(SCALES_AHEAD):
            _, expert = _token_pair(ids, places, found, token, index // TILES, TOP_K, HAS_MAP)
            part_at = (index % TILES) * COLUMNS + lane * VECTOR
            scale_at = w2_scale + expert * w_scale_expert + (first // GROUP_K) * w_scale_row
            loaded = tl.load(scale_at + part_at // GROUP_N * w_scale_group, mask=(expert >= 0) & (part_at < N), other=0.0)
            scales = scales + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
    if PDL:
        gdc_wait()

    # Threads meet only once, in the sum at the end: weights and scales are multiplied in before.
    dot = tl.zeros((COLUMNS // VECTOR, ROWS), tl.float32)
    biases = tl.zeros((ROWS,), tl.float32)
    for slot in tl.static_range(TOP_K):
        pair, expert = _token_pair(ids, places, found, token, slot, TOP_K, HAS_MAP)
        if slot < count:
            is_local = expert >= 0
            if WEIGHTED:  # noqa: SIM108  (the ternary has no common type for mypy)
                weight = tl.load(topk_weights + pair, mask=is_local, other=0.0).to(tl.float32)
            else:
                weight = 1.0
            if W_SCALED == 1:
                row_at = w2_scale + expert * w_scale_expert + k * w_scale_row
                row_scale = tl.load(row_at, mask=is_local & (k < K), other=0.0)
            for part in tl.static_range(TILES):
                start = part * COLUMNS
                if slot * TILES + part < AHEAD:
                    tile = ahead[slot * TILES + part]  # type: ignore[var-annotated]
                else:
                    tile = _down_tile(w2_at, expert, w_expert, in_k, column, part, N, COLUMNS)
                # Masked also for a pair without a local expert: its row of h was never written.
                values = tl.load(h + pair * N + start + column, mask=is_local & (start + column < N), other=0.0)
                product = tl.sum(tile.to(tl.float32) * values.to(tl.float32)[:, None, :], 2)
                if W_SCALED == 2:
                    if slot * TILES + part < SCALES_AHEAD:
                        scale = scales[slot * TILES + part]
                    else:
                        part_at = start + lane * VECTOR
                        scale_at = w2_scale + expert * w_scale_expert + (first // GROUP_K) * w_scale_row
                        scale = tl.load(scale_at + part_at // GROUP_N * w_scale_group, mask=is_local & (part_at < N), other=0.0)
                    product *= (weight * scale)[:, None]
                elif W_SCALED == 1:
                    product *= (weight * row_scale)[None, :]
                else:
                    product *= weight
                dot += product
            if HAS_BIAS:
                biases += weight * tl.load(bias + expert * bias_expert + k, mask=is_local & (k < K), other=0.0).to(tl.float32)
    total = tl.sum(dot, 0) + biases
    tl.store(out + token * out_stride + k, total.to(out.dtype.element_ty), mask=k < K)


@dataclass(frozen=True)
class Tiles:
    """How the kernels cut their work: rows and columns of a weight tile, warps of a program, tiles loaded ahead."""

    up_rows: int
    up_columns: int
    up_warps: int
    down_rows: int
    down_columns: int
    down_warps: int
    down_ahead: int


@functools.cache
def choose_tiles(
    hidden: int,
    intermediate: int,
    top_k: int,
    weight_bytes: int,
    tokens: int,
    multiprocessors: int,
    expected: int | None = None,
) -> Tiles:
    """Tiles for a shape, by formula: 16-byte loads, a few of them in flight in each thread.

    Columns, and with them the order of every sum, do not depend on the number of tokens. The rest was measured on an H200
    (``tests/gpu/results/sweep``): Qwen3-30B-A3B, Qwen3-Next, Qwen3.5-35B-A3B, DeepSeek-V3 TP8 and gpt-oss-120b in bf16, the
    first in fp8 blocks, with 1 to 8 tokens; one of 2 and 8 ranks with a share of the experts of Qwen3-30B-A3B and GLM-4.5-Air
    in bf16 and in fp8 blocks, with 1 to 16.

    Args:
        hidden: K, the model's hidden size.
        intermediate: N, the expert's intermediate size on this rank.
        top_k: experts for each token.
        weight_bytes: bytes of one weight: 2 (bf16, fp16), 1 (fp8) or 4 (fp32).
        tokens: M.
        multiprocessors: of the GPU.
        expected: with an expert map, how many (token, expert) pairs are this rank's if all experts are chosen alike.
    """
    vector = 16 // weight_bytes
    # With a map a program looks for its pair before its first load: rows make more of that, once there are programs enough.
    few = expected is not None and expected * intermediate <= 2 * RESIDENT * multiprocessors
    if weight_bytes == 1:
        # A row of fp8 is short: four of them share the activations, which are as long as each.
        up_rows, up_columns, loads = 2 if few else 4, 1024, 1
    elif hidden <= 2048:
        # What is read in one step needs no second row to keep loads in flight.
        up_rows, up_columns, loads = 1 if few or expected is None else 2, 2048, 2
    else:
        up_rows, up_columns, loads = (2, 2048, 2) if expected is None else (1, 1024, 2)
    up_columns = min(up_columns, max(vector, triton.next_power_of_2(hidden)))
    up_warps = max(1, up_columns // (32 * vector * loads))
    # A warp for two rows. The kernel is unrolled over the tiles of all slots: keep the code short.
    down_rows, down_columns = 2, 512
    while top_k * triton.cdiv(intermediate, down_columns) > 64:
        down_columns *= 2
    down_warps = down_columns // 512
    parts = triton.cdiv(intermediate, down_columns)
    # Whether all programs are resident with the most registers there are.
    roomy = tokens * triton.cdiv(hidden, down_rows) * down_warps <= ROOMY * multiprocessors
    if expected is not None and not roomy:
        # A token has few experts here: more rows of each instead, where those take few registers or there are few programs.
        down_rows, ahead = (4, 2) if parts <= 2 or (weight_bytes == 1 and tokens == 1) else (2, 4)
    elif weight_bytes == 1:
        ahead = 4
    else:
        # Less where one tile holds an expert's row.
        ahead = (6 if roomy else 4) if parts == 1 else (12 if roomy else 6)
    return Tiles(up_rows, up_columns, up_warps, down_rows, down_columns, down_warps, min(top_k * parts, ahead))


def expected_pairs(w1: torch.Tensor, expert_map: torch.Tensor | None, pairs: int) -> int | None:
    """Of that many (token, expert) pairs, this rank's if all experts are chosen alike, rounded up; None without a map."""
    return None if expert_map is None else triton.cdiv(pairs * w1.size(0), expert_map.numel())


def tiles_of(w1: torch.Tensor, w2: torch.Tensor, tokens: int, top_k: int, expected: int | None) -> Tiles:
    """The tiles by formula for these weights on their GPU."""
    return choose_tiles(w2.size(1), w2.size(2), top_k, w1.element_size(), tokens, gpu.multiprocessors(w1.device), expected)


def decode_moe(
    out: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor | None,
    topk_ids: torch.Tensor,
    h: torch.Tensor,
    *,
    activation: str,
    expert_map: torch.Tensor | None = None,
    x_scale: Scale | None = None,
    w1_scale: Scale | None = None,
    w2_scale: Scale | None = None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float = 0.0,
    pdl: bool = False,
    tiles: Tiles | None = None,
) -> None:
    """Compute an MoE layer for few tokens, accumulating in fp32.

    Args:
        out: [M, K], bf16, fp16 or fp32; written whole. Contiguous in its last dimension.
        x: [M, K] in the weights' dtype (bf16, fp16, fp32 or fp8 e4m3), contiguous in its last dimension.
        w1: [E, 2N, K] (gate rows, then up rows, or alternating where ``interleaved``), [E, N, K] for `relu2_no_mul`.
        w2: [E, K, N].
        topk_weights: [M, top_k], float, contiguous; None where they are in ``x`` already: experts' outputs are added up.
        topk_ids: [M, top_k], integer, contiguous; a negative id is no expert.
        h: at least M * top_k * N elements, bf16, fp16 or fp32, contiguous; scratch, must not overlap ``out``.
        activation: `silu`, `gelu`, `gelu_tanh`, `swigluoai` (with ``alpha`` and ``limit``) or `relu2_no_mul`.
        expert_map: [global experts] integer: the local expert or -1. A pair without a local expert adds nothing.
        x_scale, w1_scale, w2_scale: for fp8.
        w1_bias, w2_bias: [E, rows of w1] and [E, K].
        pdl: launch with programmatic dependent launch (compute capability 9.0 and later).
        tiles: how the work is cut; by formula if None.
    """
    tokens, top_k = topk_ids.shape
    hidden, intermediate = w2.shape[1], w2.shape[2]
    if tokens == 0:
        return
    pairs = tokens * top_k
    expected = expected_pairs(w1, expert_map, pairs)
    # 16 bytes are what a thread loads at once, of h as well as of the weights.
    up_vector, down_vector = 16 // w1.element_size(), 16 // max(w2.element_size(), h.element_size())
    if tiles is None:
        tiles = tiles_of(w1, w2, tokens, top_k, expected)
    if tiles.up_columns % up_vector or tiles.down_columns % down_vector:
        raise ValueError(f"columns of a tile in multiples of {up_vector} and {down_vector} are needed, not {tiles}")
    gated = activation != "relu2_no_mul"
    up_offset = 0 if not gated else 1 if interleaved else intermediate
    # PDL is a launch option only where it is asked for: other backends do not know it.
    launch_options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    up: Any = _gate_up_kernel
    up[(pairs if expected is None else expected, triton.cdiv(intermediate, tiles.up_rows))](
        x,
        x_scale.values if x_scale else x,
        w1,
        w1_scale.values if w1_scale else w1,
        w1_bias if w1_bias is not None else w1,
        topk_ids,
        expert_map if expert_map is not None else topk_ids,
        h,
        pairs,
        alpha,
        limit,
        x.stride(0),
        x_scale.strides[0] if x_scale else 0,
        x_scale.strides[2] if x_scale else 0,
        w1.stride(0),
        w1.stride(1),
        *(w1_scale.strides if w1_scale else (0, 0, 0)),
        w1_bias.stride(0) if w1_bias is not None else 0,
        K=hidden,
        N=intermediate,
        TOP_K=top_k,
        GATE_STEP=2 if gated and interleaved else 1,
        UP_OFFSET=up_offset,
        ACTIVATION=activation,
        X_SCALED=x_scale.kind if x_scale else 0,
        W_SCALED=w1_scale.kind if w1_scale else 0,
        GROUP_N=w1_scale.groups[0] if w1_scale else 1,
        GROUP_K=w1_scale.groups[1] if w1_scale else 1,
        HAS_BIAS=w1_bias is not None,
        HAS_MAP=expert_map is not None,
        # Not the number of pairs: one kernel serves all batches of the window.
        PADDED=max(LEAST_PADDED, triton.next_power_of_2(pairs)),
        ROWS=tiles.up_rows,
        COLUMNS=tiles.up_columns,
        VECTOR=up_vector,
        PDL=pdl,
        num_warps=tiles.up_warps,
        **launch_options,
    )
    parts = top_k * triton.cdiv(intermediate, tiles.down_columns)
    down: Any = _down_kernel
    down[(tokens, triton.cdiv(hidden, tiles.down_rows))](
        h,
        w2,
        w2_scale.values if w2_scale else w2,
        w2_bias if w2_bias is not None else w2,
        topk_ids,
        topk_weights if topk_weights is not None else topk_ids,
        expert_map if expert_map is not None else topk_ids,
        out,
        w2.stride(0),
        w2.stride(1),
        *(w2_scale.strides if w2_scale else (0, 0, 0)),
        w2_bias.stride(0) if w2_bias is not None else 0,
        out.stride(0),
        K=hidden,
        N=intermediate,
        TOP_K=top_k,
        W_SCALED=w2_scale.kind if w2_scale else 0,
        GROUP_K=w2_scale.groups[0] if w2_scale else 1,
        GROUP_N=w2_scale.groups[1] if w2_scale else 1,
        HAS_BIAS=w2_bias is not None,
        HAS_MAP=expert_map is not None,
        PADDED=triton.next_power_of_2(top_k),
        WEIGHTED=topk_weights is not None,
        ROWS=tiles.down_rows,
        COLUMNS=tiles.down_columns,
        VECTOR=down_vector,
        # A tile beyond a token's last one would be read by the id of the next token, or of none.
        AHEAD=min(tiles.down_ahead, parts),
        SCALES_AHEAD=min(MOST_SCALES_AHEAD, parts),
        PDL=pdl,
        num_warps=tiles.down_warps,
        **launch_options,
    )
