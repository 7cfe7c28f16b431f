// Sampling of output rows as `reference::sample` defines it, a block for each row. Nothing is sorted: each candidate
// has a key, by which candidates are ordered, and a filter keeps the keys from a least one on. Sums of weights are
// integers, so that they are exact in any order.

// How to sample a row; `append_record` writes it.
struct SampleRow {
    // Number of the row among those of the call.
    u32 number;
    u32 flags;
    // The token, unless it is sampled.
    u32 token;
    u32 position;
    u32 seed_low, seed_high;
    float temperature;
    // 0 for all.
    u32 top_k;
    float top_p;
    float min_p;
    // The range of its biases in those of the batch.
    u32 bias_at, bias_len;
    // Number of most likely tokens to report.
    u32 top;
    // Penalties, and the slot whose counts of tokens they use.
    float repetition, presence, frequency;
    u32 slot;
};

#define ROW_IS_SAMPLED 1u
#define ROW_IS_GREEDY 2u
#define ROW_IS_MASKED 4u
#define ROW_IS_RANKED 8u
#define ROW_HAS_LOGPROBS 16u
#define ROW_IS_PENALIZED 32u

// Bits of a token's count that say how often it was generated; the other one is set if it is in the prompt.
#define GENERATED 0x7fffu

// The result of a row, before its most likely tokens (id, logit); `read_result` reads it.
struct SampleResult {
    u32 token;
    u32 failure;
    u32 rank;
    // The raw logit of the token, and the largest one.
    float logit;
    float largest;
    u32 unused;
    // The sum of e^(logit - largest).
    double sum;
};

#define NO_FAILURE 0u
#define NOT_FINITE 1u
#define EMPTY_MASK 2u

struct Largest {
    __device__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};

struct Sum {
    template <typename T> __device__ T operator()(T a, T b) const { return a + b; }
};

// Reduces the values of the threads of a block, in an order that follows from the size of the block; 0 is neutral.
template <typename T, typename Op> __device__ __forceinline__ T reduce(T value, Op op) {
    __shared__ T partial[WARP];
    int lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    for (int step = WARP / 2; step > 0; step /= 2) value = op(value, __shfl_xor_sync(ALL_LANES, value, step));
    __syncthreads();
    if (lane == 0) partial[threadIdx.x / WARP] = value;
    __syncthreads();
    value = lane < warps ? partial[lane] : (T)0;
    for (int step = WARP / 2; step > 0; step /= 2) value = op(value, __shfl_xor_sync(ALL_LANES, value, step));
    return value;
}

__device__ __forceinline__ float nan_to_lowest(float value) {
    return value != value ? -INFINITY_F32 : value;
}

__device__ __forceinline__ bool is_finite(float value) {
    return fabsf(value) < INFINITY_F32;
}

// The key of a candidate: larger for more likely ones, and for lower ids on ties. NaN counts as negative infinity, and
// 0.0 ties with -0.0.
__device__ __forceinline__ u64 key_of(float value, u32 id, u32 n) {
    value = nan_to_lowest(value);
    u32 bits = value == 0.0f ? 0u : __float_as_uint(value);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (u64)bits << 32 | (n - 1 - id);
}

__device__ __forceinline__ float key_value(u64 key) {
    u32 bits = (u32)(key >> 32);
    return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

__device__ __forceinline__ u32 key_id(u64 key, u32 n) {
    return n - 1 - (u32)key;
}

// The logit of a token, negative infinity if there is a mask that does not allow it.
__device__ __forceinline__ float allowed_logit(const float* logits, const u32* mask, u32 id) {
    return !mask || (mask[id / 32] >> (id % 32) & 1u) ? logits[id] : -INFINITY_F32;
}

// The largest key of the logits of allowed tokens.
__device__ __forceinline__ u64 largest_key(const float* logits, const u32* mask, u32 n) {
    u64 largest = 0;
    for (u32 id = threadIdx.x; id < n; id += blockDim.x) {
        largest = Largest()(largest, key_of(allowed_logit(logits, mask, id), id, n));
    }
    return reduce(largest, Largest());
}

// The lowest id that a mask allows; n if it allows none.
__device__ __forceinline__ u32 lowest_allowed(const u32* mask, u32 n) {
    u64 before_end = 0;
    for (u32 word = threadIdx.x; word < (n + 31) / 32; word += blockDim.x) {
        u32 id = word * 32 + __ffs((int)mask[word]) - 1;
        if (mask[word] && id < n) before_end = Largest()(before_end, n - id);
    }
    return n - (u32)reduce(before_end, Largest());
}

// A sum of the candidates of one digit, in two parts, because shared memory adds 32 bits at a time.
struct DigitSums {
    u32 low[256], high[256];

    __device__ void add(u32 digit, u32 addend) {
        u32 before = atomicAdd(&low[digit], addend);
        if (before + addend < before) atomicAdd(&high[digit], 1u);
    }

    __device__ u64 of(u32 digit) const { return (u64)high[digit] << 32 | low[digit]; }
};

// A digit of the key that is looked for: the sum of its candidates, and that of those with larger digits.
struct FoundDigit {
    u32 digit;
    u64 own, above;
};

// Finds the largest digit up to which the sums, downwards and with `before`, reach `enough`. For the first warp.
__device__ __forceinline__ void find_digit(
    const DigitSums* sums, u64 before, double enough, FoundDigit* found
) {
    u32 first = 255 - 8 * threadIdx.x;
    u64 own = 0;
    for (u32 i = 0; i < 8; i++) own += sums->of(first - i);
    u64 through = own;
    for (u32 step = 1; step < WARP; step *= 2) {
        u64 other = __shfl_up_sync(ALL_LANES, through, step);
        if (threadIdx.x >= step) through += other;
    }
    through += before;
    u64 above = through - own;
    if ((double)above >= enough || (double)through < enough) return;
    u32 digit = first;
    while ((double)(above + sums->of(digit)) < enough) above += sums->of(digit--);
    *found = {digit, sums->of(digit), above};
}

// The largest key such that the sum over the keys from it on reaches `enough`, which is above 0 and at most the sum
// over the keys from `least` on. The sum counts candidates, or weights relative to `largest`. The key is found digit by
// digit. If all candidates of a value are needed, it may be less, but not less than `least`.
__device__ __noinline__ u64 key_that_reaches(
    const float* values, u32 n, u64 least, bool by_weight, float largest, double enough
) {
    __shared__ DigitSums sums;
    __shared__ FoundDigit found;
    u64 prefix = 0, before = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        // Ids have leading zeros.
        if (shift < 32 && (n - 1) >> shift == 0) {
            prefix <<= 8;
            continue;
        }
        for (u32 digit = threadIdx.x; digit < 256; digit += blockDim.x) sums.low[digit] = sums.high[digit] = 0;
        __syncthreads();
        for (u32 id = threadIdx.x; id < n; id += blockDim.x) {
            float value = values[id];
            u64 key = key_of(value, id, n);
            if (key < least || key >> shift >> 8 != prefix) continue;
            sums.add((u32)(key >> shift) & 255u, by_weight ? draw_weight(value - largest) : 1u);
        }
        __syncthreads();
        if (threadIdx.x < WARP) find_digit(&sums, before, enough, &found);
        __syncthreads();
        prefix = prefix << 8 | found.digit;
        before = found.above;
        if (shift == 32) {
            // Only candidates of one value are left. In most cases all of them are needed.
            u64 one = by_weight ? draw_weight(key_value(prefix << 32) - largest) : 1;
            if ((double)(before + found.own - one) < enough) return Largest()(prefix << 32, least);
        }
    }
    return prefix;
}

// The least key that top-k and top-p keep.
__device__ __forceinline__ u64 least_kept(const SampleRow* row, const float* scaled, u32 n, float largest) {
    u64 least = 0;
    if (row->top_k > 0 && row->top_k < n) {
        least = key_that_reaches(scaled, n, 0, false, 0.0f, (double)row->top_k);
    }
    if (row->top_p < 1.0f) {
        u64 total = 0;
        for (u32 id = threadIdx.x; id < n; id += blockDim.x) {
            if (key_of(scaled[id], id, n) >= least) total += draw_weight(scaled[id] - largest);
        }
        double enough = (double)row->top_p * (double)reduce(total, Sum());
        // At least one candidate is kept.
        least = key_that_reaches(scaled, n, least, true, largest, enough < 1.0 ? 1.0 : enough);
    }
    return least;
}

// Draws a token from the candidates with keys from `least` on that min-p keeps.
__device__ __forceinline__ u32 draw(const SampleRow* row, const float* scaled, u32 n, float largest, u64 least) {
    u64 best = 0;
    // The most likely candidate has at least this score.
    float least_score = largest + LEAST_NOISE;
    for (u32 group = threadIdx.x; group < (n + 3) / 4; group += blockDim.x) {
        float values[4];
        bool can_win = false;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 id = 4 * group + i;
            values[i] = id < n && key_of(scaled[id], id, n) >= least ? scaled[id] : -INFINITY_F32;
            can_win |= values[i] + MOST_NOISE >= least_score;
        }
        if (!can_win) continue;
        uint4 group_words = token_words(row->seed_low, row->seed_high, row->position, group);
        u32 words[4] = {group_words.x, group_words.y, group_words.z, group_words.w};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (!(values[i] + gumbel_bound(words[i]) >= least_score)) continue;
            float behind = values[i] - largest;
            if (behind < 0.0f && row->min_p > 0.0f && draw_exp(behind) < row->min_p) continue;
            float score = values[i] + gumbel(words[i]);
            least_score = fmaxf(least_score, score);
            best = Largest()(best, key_of(score, 4 * group + i, n));
        }
    }
    return key_id(reduce(best, Largest()), n);
}

// Samples a token. `edited` has the logits with biases and penalties, if the row has any, and is overwritten. Returns
// the reason if there is no token.
__device__ __forceinline__ u32 sample_token(
    const SampleRow* row, const float* raw, const u32* mask, u32 n, u64 largest, float* edited, u32* token
) {
    u32 lowest = mask ? lowest_allowed(mask, n) : 0;
    if (lowest == n) return EMPTY_MASK;
    bool is_edited = row->bias_len > 0 || row->flags & ROW_IS_PENALIZED;
    const float* logits = is_edited ? edited : raw;
    if (is_edited || mask) largest = largest_key(logits, mask, n);
    if (is_edited && key_value(largest) == -INFINITY_F32) {
        // Biases and penalties that leave nothing are ignored, all of them.
        logits = raw;
        largest = largest_key(raw, mask, n);
    }
    float scaled_largest = key_value(largest) / row->temperature;
    *token = key_value(largest) == -INFINITY_F32 ? lowest : key_id(largest, n);
    if (key_value(largest) == -INFINITY_F32 || row->flags & ROW_IS_GREEDY || !is_finite(scaled_largest)) {
        return NO_FAILURE;
    }
    for (u32 id = threadIdx.x; id < n; id += blockDim.x) {
        edited[id] = nan_to_lowest(allowed_logit(logits, mask, id) / row->temperature);
    }
    u64 least = least_kept(row, edited, n, scaled_largest);
    __syncthreads();
    *token = draw(row, edited, n, scaled_largest, least);
    return NO_FAILURE;
}

// Writes the most likely tokens with their logits, in order.
__device__ __forceinline__ void report_top(const float* logits, u32 n, u32 top, uint2* to) {
    // Lists have 255 entries at most.
    __shared__ u64 list[256];
    __shared__ u32 filled;
    u64 least = top < n ? key_that_reaches(logits, n, 0, false, 0.0f, (double)top) : 0;
    if (threadIdx.x == 0) filled = 0;
    __syncthreads();
    for (u32 id = threadIdx.x; id < n; id += blockDim.x) {
        u64 key = key_of(logits[id], id, n);
        if (key >= least) list[atomicAdd(&filled, 1u)] = key;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < top; i += blockDim.x) {
        u32 rank = 0;
        for (u32 other = 0; other < top; other++) rank += list[other] > list[i];
        to[rank] = make_uint2(key_id(list[i], n), __float_as_uint(key_value(list[i])));
    }
}

// Samples or scores rows of logits (rows, width), of which n numbers count. Masks (rows, mask_words), the edited logits
// (rows, n) and the results, of `result_bytes` each, are numbered by the numbers of rows.
extern "C" __global__ void sample(
    const SampleRow* rows, int width, u32 n, int mask_words, int result_bytes, const float* logits, const u32* masks,
    float* edited, u8* results
) {
    SampleRow row = rows[blockIdx.x];
    SampleResult* result = (SampleResult*)(results + (u64)row.number * result_bytes);
    const float* raw = logits + (u64)row.number * width;
    const u32* mask = row.flags & ROW_IS_MASKED ? masks + (u64)row.number * mask_words : 0;
    u64 largest_raw = largest_key(raw, 0, n);
    float largest = key_value(largest_raw);
    u32 token = row.token, failure = is_finite(largest) ? NO_FAILURE : NOT_FINITE;
    if (failure == NO_FAILURE && row.flags & ROW_IS_SAMPLED) {
        failure = sample_token(&row, raw, mask, n, largest_raw, edited + (u64)row.number * n, &token);
    }
    u64 rank = 0;
    double sum = 0.0;
    if (failure == NO_FAILURE && row.flags & ROW_HAS_LOGPROBS) {
        u64 own = key_of(raw[token], token, n);
        for (u32 id = threadIdx.x; id < n; id += blockDim.x) {
            rank += key_of(raw[id], id, n) >= own;
            sum += (double)draw_exp(nan_to_lowest(raw[id]) - largest);
        }
        sum = reduce(sum, Sum());
        rank = row.flags & ROW_IS_RANKED ? reduce(rank, Sum()) : 0;
        if (row.top > 0) report_top(raw, n, row.top, (uint2*)(result + 1));
    }
    if (threadIdx.x == 0) {
        float logit = failure == NO_FAILURE ? nan_to_lowest(raw[token]) : 0.0f;
        *result = {token, failure, (u32)rank, logit, largest, 0, sum};
    }
}

// Adds biases first..first + count of the batch to the edited logits (rows, n) of the rows that have any, in their
// order; `is_first` if there are none before. Two biases of a token are added one after the other.
extern "C" __global__ void add_biases(
    const SampleRow* rows, int width, u32 n, u32 first, u32 count, int is_first, const uint2* biases,
    const float* logits, float* edited
) {
    SampleRow row = rows[blockIdx.x];
    if (row.bias_len == 0) return;
    edited += (u64)row.number * n;
    if (is_first) {
        const float* raw = logits + (u64)row.number * width;
        for (u32 id = threadIdx.x; id < n; id += blockDim.x) edited[id] = raw[id];
        __syncthreads();
    }
    if (threadIdx.x >= WARP) return;
    u32 lane = threadIdx.x, start = max(row.bias_at, first), end = min(row.bias_at + row.bias_len, first + count);
    for (u32 at = start; at < end; at += WARP) {
        uint2 bias = at + lane < end ? biases[at + lane - first] : make_uint2(n, 0u);
        // A draft model may have fewer tokens than the target.
        u32 id = min(bias.x, n);
        u32 turn = __popc(__match_any_sync(ALL_LANES, id) & ((1u << lane) - 1));
        for (u32 now = 0; __any_sync(ALL_LANES, id < n && turn >= now); now++) {
            if (id < n && turn == now) edited[id] += __uint_as_float(bias.y);
            __syncwarp();
        }
    }
}

// Applies penalties to the edited logits (rows, n) of the rows that have any, after their biases, by the counts of
// tokens (slots, vocab).
extern "C" __global__ void penalize(
    const SampleRow* rows, int width, u32 n, int vocab, const float* logits, const u16* counts, float* edited
) {
    SampleRow row = rows[blockIdx.x];
    if (!(row.flags & ROW_IS_PENALIZED)) return;
    edited += (u64)row.number * n;
    counts += (u64)row.slot * vocab;
    const float* from = row.bias_len > 0 ? edited : logits + (u64)row.number * width;
    for (u32 id = threadIdx.x; id < n; id += blockDim.x) {
        float logit = from[id];
        u32 count = counts[id];
        if (count > 0) logit = logit > 0.0f ? logit / row.repetition : logit * row.repetition;
        u32 generated = count & GENERATED;
        if (generated > 0) logit = logit - row.frequency * (float)generated - row.presence;
        edited[id] = logit;
    }
}

// Writes the counts (id, count) of some tokens of a slot.
extern "C" __global__ void write_counts(int n, const uint2* changes, u16* counts) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        counts[changes[i].x] = (u16)changes[i].y;
    }
}

// Stores sampled tokens as the last ones of their slots, in the order of rows: one thread, as a slot may have several.
// `slots` has the slot of each row, or ~0 where the token is not to be stored, and whether the token is counted in the
// counts (slots, vocab).
extern "C" __global__ void store_tokens(
    int rows, const uint2* slots, int result_bytes, const u8* results, u32* last_tokens, int vocab, u16* counts
) {
    for (int i = 0; i < rows; i++) {
        u32 slot = slots[i].x;
        if (slot == ~0u) continue;
        const SampleResult* result = (const SampleResult*)(results + (u64)i * result_bytes);
        if (result->failure != 0) continue;
        last_tokens[slot] = result->token;
        if (slots[i].y == 0) continue;
        u16* count = counts + (u64)slot * vocab + result->token;
        if ((*count & GENERATED) != GENERATED) *count += 1;
    }
}
