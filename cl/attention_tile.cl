/* SPDX-License-Identifier: MIT */
/* One 16-row tile against one 64-key block: shapes, staging of keys and values, scores, weights, results.
 * Included before every forward and backward kernel of the NVIDIA matrix tier.
 *
 * Every kernel's scale is > 0: the host passes 1e-30 for a scale of 0 (masked scores are -inf, and 0 * -inf is
 * NaN) and serves negative scales by another tier.
 * Macros: DIM, DIM_V head dimensions; GROUP query heads a kv head; CAUSAL 0/1; ALIGNED 1 if every row starts
 * on 16 bytes; and the options of attention, which cost nothing when they are off (0):
 *
 *   WINDOW 1   a query at position p sees the keys p - window + 1 .. p, not causal .. p + window - 1
 *   SOFTCAP 1  scores become cap * tanh(scale * score / cap); `scale` is the cap, `cap_scale` 2 scale / cap
 *   SINK 1     sink[head] joins the denominator of a row that has keys
 */
#ifndef DIM
#define DIM 128
#endif
#ifndef DIM_V
#define DIM_V DIM
#endif
#ifndef GROUP
#define GROUP 16
#endif
#ifndef CAUSAL
#define CAUSAL 1
#endif
#ifndef ALIGNED
#define ALIGNED 1
#endif
#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef SINK
#define SINK 0
#endif
#define LEAF 64
#define K_STEPS ((DIM + 31) / 32)   /* stretches of 32 in a score */
#define V_TILES ((DIM_V + 15) / 16) /* pairs of 8-column result tiles */
#define V_QUADS ((DIM_V + 31) / 32) /* 32-column groups of a stored row */
/* Local rows in 16-byte chunks. Keys are read by 16-byte loads (two rows of 64 bytes a quarter-warp), values
 * by ldmatrix (eight rows of 16 bytes): rows of a multiple of 8 chunks are swizzled, others are padded so that
 * banks differ. */
#define K_CHUNKS (K_STEPS * 4)
#define V_CHUNKS (V_TILES * 2)
#define K_ROW K_CHUNKS
#define V_ROW (V_CHUNKS % 8 == 0 ? V_CHUNKS : V_CHUNKS + 1)
#define K_AT(row, chunk) ((row)*K_ROW + (K_CHUNKS % 8 == 0 ? (chunk) ^ (((row)&1) << 2) : (chunk)))
#define V_AT(row, chunk) ((row)*V_ROW + (V_CHUNKS % 8 == 0 ? (chunk) ^ ((row)&7) : (chunk)))
#define VECTORS(dim) (ALIGNED && (dim) % 8 == 0)

/* Eight numbers from column `at` of a row of `dim`; beyond the row they are zero. */
static inline uint4 load8(__global const ushort *row, uint at, uint dim)
{
    uint4 r = (uint4)(0, 0, 0, 0);
    if (VECTORS(dim)) {
        if (at < dim) r = *(__global const uint4 *)(row + at);
    } else {
        ushort n[8];
#pragma unroll
        for (uint u = 0; u < 8; u++)
            n[u] = at + u < dim ? row[at + u] : (ushort)0;
        r = (uint4)(n[0] | (uint)n[1] << 16, n[2] | (uint)n[3] << 16, n[4] | (uint)n[5] << 16,
                    n[6] | (uint)n[7] << 16);
    }
    return r;
}

static inline void store8(__global ushort *row, uint at, uint dim, uint4 w)
{
    if (VECTORS(dim)) {
        if (at < dim) *(__global uint4 *)(row + at) = w;
    } else {
        const uint n[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (uint u = 0; u < 4; u++) {
            if (at + 2 * u < dim) row[at + 2 * u] = (ushort)n[u];
            if (at + 2 * u + 1 < dim) row[at + 2 * u + 1] = (ushort)(n[u] >> 16);
        }
    }
}

/* Words k of the four lanes of a quad change places: afterwards lane c holds what lanes 0..3 had as word c. */
static inline uint word_of(uint4 w, uint i)
{
    const uint a = i & 1 ? w.y : w.x, b = i & 1 ? w.w : w.z;
    return i & 2 ? b : a;
}
static inline uint4 quad_transpose(uint4 w, uint c)
{
    uint4 t;
    t.x = word_of(w, c);
    t.y = shuffle_xor_uint(word_of(w, c ^ 1), 1);
    t.z = shuffle_xor_uint(word_of(w, c ^ 2), 2);
    t.w = shuffle_xor_uint(word_of(w, c ^ 3), 3);
    return (uint4)(word_of(t, c), word_of(t, c ^ 1), word_of(t, c ^ 2), word_of(t, c ^ 3));
}

/* A block's rows, `valid` of which exist, into local memory; `items` work-items take part, this is number t. */
static inline void stage_keys(__local uint4 *to, __global const ushort *from, ulong stride, int valid, uint t,
                              uint items)
{
    for (uint n = t; n < LEAF * K_CHUNKS; n += items) {
        const uint row = n / K_CHUNKS, chunk = n % K_CHUNKS;
        const int exists = (int)row < valid && chunk * 8 < DIM;
        __global const ushort *p = from + (exists ? row * stride : 0);
        if (VECTORS(DIM))
            copy_async(local_address(to + K_AT(row, chunk)), p + (exists ? chunk * 8 : 0), exists ? 16 : 0);
        else
            to[K_AT(row, chunk)] = exists ? load8(p, chunk * 8, DIM) : (uint4)(0, 0, 0, 0);
    }
}
static inline void stage_values(__local uint4 *to, __global const ushort *from, ulong stride, int valid, uint t,
                                uint items)
{
    for (uint n = t; n < LEAF * V_CHUNKS; n += items) {
        const uint row = n / V_CHUNKS, chunk = n % V_CHUNKS;
        const int exists = (int)row < valid && chunk * 8 < DIM_V;
        __global const ushort *p = from + (exists ? row * stride : 0);
        if (VECTORS(DIM_V))
            copy_async(local_address(to + V_AT(row, chunk)), p + (exists ? chunk * 8 : 0), exists ? 16 : 0);
        else
            to[V_AT(row, chunk)] = exists ? load8(p, chunk * 8, DIM_V) : (uint4)(0, 0, 0, 0);
    }
}

/* Scores of columns >= limit become -inf; low and high are the limits of rows g and g+8. */
static inline void mask_scores(float4 *s, int low, int high, uint c)
{
#pragma unroll
    for (uint n = 0; n < 8; n++) {
        const int column = (int)(8 * n + 2 * c);
        if (column >= low) s[n].x = -INFINITY;
        if (column + 1 >= low) s[n].y = -INFINITY;
        if (column >= high) s[n].z = -INFINITY;
        if (column + 1 >= high) s[n].w = -INFINITY;
    }
}

/* The same for columns < low and < high. */
static inline void mask_scores_before(float4 *s, int low, int high, uint c)
{
#pragma unroll
    for (uint n = 0; n < 8; n++) {
        const int column = (int)(8 * n + 2 * c);
        if (column < low) s[n].x = -INFINITY;
        if (column + 1 < low) s[n].y = -INFINITY;
        if (column < high) s[n].z = -INFINITY;
        if (column + 1 < high) s[n].w = -INFINITY;
    }
}

/* The keys that a query sees: first and end. */
static inline int keys_begin(int position, uint window)
{
    return WINDOW ? max(position + 1 - (int)window, 0) : 0;
}
static inline int keys_end(int position, uint kv_len, uint window)
{
    return CAUSAL ? min((int)kv_len, position + 1) : WINDOW ? min((int)kv_len, position + (int)window) : (int)kv_len;
}

/* tanh(x * cap_scale * LN2 / 2); near 0 by its series, where the other form cancels. */
static inline float capped(float x, float cap_scale)
{
    const float y = x * cap_scale, h = y * (0.5f * LN2), h2 = h * h;
    const float near = h + h * h2 * fma(h2, 2.0f / 15, -1.0f / 3);
    const float far = 1 - 2 * reciprocal_fast(1 + exp2_fast(y));
    return h2 < 0.01f ? near : far;
}
static inline void cap_scores(float4 *s, float cap_scale)
{
#pragma unroll
    for (uint n = 0; n < 8; n++)
        s[n] = (float4)(capped(s[n].x, cap_scale), capped(s[n].y, cap_scale), capped(s[n].z, cap_scale),
                        capped(s[n].w, cap_scale));
}

/* The sink joins a finished row, whose sum counts in exp2(.. - top); returns what the row is to be multiplied by. */
static inline float close_row(float *top, float *sum, __global const float *sink, ulong at)
{
    float keep = 1;
    if (SINK && *sum > 0) {
        const float logit = sink[at] * LOG2E, most = fmax(*top, logit);
        keep = exp2_fast(*top - most);
        *sum = *sum * keep + exp2_fast(logit - most);
        *top = most;
    }
    return *sum > 0 ? keep / *sum : 0.0f;
}
static inline float2 close_rows(float2 *top, float2 *sum, __global const float *sink, ulong at0, ulong at1)
{
    float top0 = top->x, top1 = top->y, sum0 = sum->x, sum1 = sum->y;
    const float2 inv = (float2)(close_row(&top0, &sum0, sink, at0), close_row(&top1, &sum1, sink, at1));
    *top = (float2)(top0, top1);
    *sum = (float2)(sum0, sum1);
    return inv;
}
static inline float row_lse(float top, float sum)
{
    return sum > 0 ? (top + log2_fast(sum)) * LN2 : -INFINITY;
}

static inline float2 row_max_of(const float4 *s)
{
    float2 m = (float2)(-INFINITY, -INFINITY);
#pragma unroll
    for (uint n = 0; n < 8; n++) {
        m.x = fmax(m.x, fmax(s[n].x, s[n].y));
        m.y = fmax(m.y, fmax(s[n].z, s[n].w));
    }
    m.x = fmax(m.x, shuffle_xor(m.x, 1));
    m.y = fmax(m.y, shuffle_xor(m.y, 1));
    m.x = fmax(m.x, shuffle_xor(m.x, 2));
    m.y = fmax(m.y, shuffle_xor(m.y, 2));
    return m;
}

/* s becomes the weights exp2(s * scale - shift); returns this lane's share of the row sums. */
static inline float2 weigh(float4 *s, float scale, float2 shift)
{
    float2 sum = (float2)(0, 0);
#pragma unroll
    for (uint n = 0; n < 8; n++) {
        s[n].x = exp2_fast(fma(s[n].x, scale, -shift.x));
        s[n].y = exp2_fast(fma(s[n].y, scale, -shift.x));
        s[n].z = exp2_fast(fma(s[n].z, scale, -shift.y));
        s[n].w = exp2_fast(fma(s[n].w, scale, -shift.y));
        sum.x += s[n].x + s[n].y;
        sum.y += s[n].z + s[n].w;
    }
    return sum;
}

/* The weights of keys 16 k .. 16 k + 15 as operand A, 16-bit numbers. */
static inline uint4 weights_of(const float4 *s, uint k)
{
    return (uint4)(pack2(s[2 * k].x, s[2 * k].y), pack2(s[2 * k].z, s[2 * k].w),
                   pack2(s[2 * k + 1].x, s[2 * k + 1].y), pack2(s[2 * k + 1].z, s[2 * k + 1].w));
}

/* o += P V for the 16 x 64 weights in s and staged values */
static inline void add_values(float4 *o, const float4 *s, uint values, uint lane)
{
#pragma unroll
    for (uint k = 0; k < 4; k++) {
        const uint4 p = weights_of(s, k);
        const uint row = 16 * k + (lane & 15);
#pragma unroll
        for (uint n = 0; n < V_TILES; n++) {
            const uint4 b = load_matrix_trans(values + 16 * V_AT(row, 2 * n + (lane >> 4)));
            mma(&o[2 * n], p.x, p.y, p.z, p.w, b.x, b.y);
            mma(&o[2 * n + 1], p.x, p.y, p.z, p.w, b.z, b.w);
        }
    }
}

/* How many entries of an ascending list, -1 padded right, are blocks that end at or before key `begin`; all lanes of a
 * warp together. */
static inline uint entries_before(__global const int *list, uint length, int begin, uint lane)
{
    uint low = 0, width = length + 1; /* the answer lies in [low, low + width) */
    while (width > 1) {
        const uint step = (width + 31) / 32, at = low + lane * step;
        const int block = lane > 0 && lane * step < width ? list[at - 1] : -1;
        const uint below = ballot(lane == 0 || (block >= 0 && (block + 1) * LEAF <= begin));
        const uint k = 31 - clz(below);
        low += k * step;
        width = min(step, width - k * step);
    }
    return low;
}

/* The entry e of ascending offsets [0..entries] with offset[e] <= n < offset[e + 1]; all lanes of a warp
 * together. */
static inline uint find_entry(__global const uint *offset, uint entries, uint n, uint lane)
{
    uint low = 0, width = entries; /* the answer lies in [low, low + width) */
    while (width > 1) {
        const uint step = (width + 31) / 32, at = low + lane * step;
        const uint below = ballot(lane * step < width && offset[at] <= n);
        const uint k = 31 - clz(below); /* lane 0 always holds */
        low += k * step;
        width = min(step, width - k * step);
    }
    return low;
}
