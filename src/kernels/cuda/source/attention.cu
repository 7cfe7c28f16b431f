// Attention. The positions of a sequence form splits of SPLIT positions, counted from the first position of the
// sequence. Each split has a largest score, a sum of weights relative to it, and weighted sums of V, all in a fixed
// order; splits are merged in ascending order. So a result follows from what its row sees, however it is computed.
//
// - A score is summed by four lanes, each over every fourth quad of elements; ((0 + 1) + (2 + 3)).
// - The weights of a split are summed by 32 lanes, each over every 32nd position, and then by a tree.
// - V is summed over every fourth position; (0 + 2) + (1 + 3) of these sums.

// A whole number of blocks; pages, and encoder inputs in the scratch cache, hold whole blocks, too.
#define SPLIT 256
#define BLOCK 32
#define BLOCKS (SPLIT / BLOCK)
// A lane for each of LANES quads of a key, and one for each of VALUE_LANES quads of a value.
#define LANES 4
#define VALUE_LANES 8
// Steps in which a warp reads the keys of a block.
#define STEPS (BLOCK * LANES / WARP)

// Other bits beside the kind of the page table.
#define IS_CAUSAL 4u
// Rows that were generated attend to some of the values only.
#define IS_SELECTIVE 8u
// A row sees its own chunk of `before` positions.
#define IS_CHUNKED 16u

// What is the same for all rows.
struct Attention {
    const u32* tables;
    int table_len;
    // The kind of the page table, and the bits above.
    u32 flags;
    // A row sees as many positions before and after its own at most.
    u32 before, after;
    int page_positions, heads, kv_heads, k_dim, v_dim;
    // Numbers of a stored value, the first v_dim of which are summed: those of a key that has its value in it.
    int width;
    float scale;
    // 0 without a softcap.
    float cap;
    // Biases (heads, 2 * reach - 1), or null.
    const float* bias;
    int reach;
    // Scores of nothing (heads), or null.
    const float* sinks;
    // Products of queries and of keys with vectors of distances, (rows, heads, bucket_count) each, or null, and the
    // buckets of distances (2 * bucket_reach - 1).
    const float* of_queries;
    const float* of_keys;
    const float* buckets;
    int bucket_count, bucket_reach;
    const float* q;
    const u8* keys;
    const u8* values;
    float* out;
};

#define ATTENTION_PARAMETERS \
    const Row* rows, const u32* tables, int table_len, u32 flags, u32 before, u32 after, int page_positions, \
    int heads, int kv_heads, int k_dim, int v_dim, int width, float scale, float cap, const float* bias, int reach, \
    const float* sinks, const float* of_queries, const float* of_keys, const float* buckets, int bucket_count, \
    int bucket_reach, const float* q, const u8* keys, const u8* values, float* out
#define ATTENTION \
    Attention{tables, table_len, flags, before, after, page_positions, heads, kv_heads, k_dim, v_dim, width, scale, \
              cap, bias, reach, sinks, of_queries, of_keys, buckets, bucket_count, bucket_reach, q, keys, values, out}

// A number for each of T query heads.
template <int T> struct alignas(4 * T) PerHead {
    float of[T];
};

// T query heads of a row that share a KV head; those from `count` on do not exist.
struct Heads {
    int row, first, count, kv_head;
};

// Positions that a row sees.
struct Seen {
    u32 first, end;
};

// The state of a block of threads.
template <int T> struct State {
    // Scores, and then weights, of the positions of a split.
    PerHead<T> weights[SPLIT];
    // Positions of each block whose values are summed, as bits.
    u32 wanted[BLOCKS];
    // Of the splits so far: the largest score, and the sum of the weights relative to it.
    float largest[T], total[T];
    // Factors of the earlier splits and of this one.
    float earlier[T], current[T];
};

__device__ __forceinline__ int quads_of(int width) {
    return (width + 3) / 4;
}

__device__ __forceinline__ bool is_selective(const Attention& a, const Row& row) {
    return a.flags & IS_SELECTIVE && (row.flags & (ROW_IS_GENERATED | ROW_IS_NULL)) == ROW_IS_GENERATED;
}

__device__ __forceinline__ Seen seen_by(const Attention& a, const Row& row) {
    if (row.flags & ROW_IS_NULL) return Seen{row.position, row.position + (a.flags & TABLE_CROSS ? 0 : 1)};
    u32 whole = row.encoder_len;
    if (a.flags & TABLE_SCRATCH) whole = row.span_len;
    if (a.flags & IS_CAUSAL) whole = row.position + 1;
    u32 end = min(whole, row.position + a.after + 1);
    u32 before = a.flags & IS_CHUNKED ? row.position % a.before : a.before;
    return Seen{min(row.position > before ? row.position - before : 0, end), end};
}

// Number of the run of the first position of a block.
__device__ __forceinline__ u64 block_run(const Attention& a, const Row& row, int kv_head, u32 block) {
    return run_number(row, a.tables, a.table_len, a.flags, a.page_positions, a.kv_heads, kv_head, block * BLOCK);
}

// What weights are relative to. If all scores of a split are negative infinity, its weights are 0 rather than NaN.
__device__ __forceinline__ float base_of(float largest) {
    return largest == -INFINITY_F32 ? 0.0f : largest;
}

// Sums the numbers of LANES neighboring lanes. Lane n of these gets the sum for head n % T.
template <int T> __device__ __forceinline__ float sum_over_lanes(const float (&sums)[T]) {
    bool is_odd = threadIdx.x & 1, is_upper = threadIdx.x & 2;
    if constexpr (T == 1) {
        float sum = sums[0] + __shfl_xor_sync(ALL_LANES, sums[0], 1);
        return sum + __shfl_xor_sync(ALL_LANES, sum, 2);
    } else {
        // Each lane keeps half of the heads, then one.
        float first = (is_odd ? sums[1] : sums[0]) + __shfl_xor_sync(ALL_LANES, is_odd ? sums[0] : sums[1], 1);
        if constexpr (T == 2) return first + __shfl_xor_sync(ALL_LANES, first, 2);
        float second = (is_odd ? sums[3 % T] : sums[2 % T])
            + __shfl_xor_sync(ALL_LANES, is_odd ? sums[2 % T] : sums[3 % T], 1);
        return (is_upper ? second : first) + __shfl_xor_sync(ALL_LANES, is_upper ? first : second, 2);
    }
}

// What the distance to a position adds to the dot product of a row and a head. The rows of a span are neighbors.
__device__ __forceinline__ float distance_score(const Attention& a, const Row& row, int at, int head, u32 position) {
    int distance = (int)(position - row.position);
    int bucket = (int)a.buckets[a.bucket_reach - 1 + distance];
    u64 query = (u64)at * a.heads + head, key = (u64)(at + distance) * a.heads + head;
    return a.of_queries[query * a.bucket_count + bucket] + a.of_keys[key * a.bucket_count + bucket];
}

// Writes the scores of the positions of a block that are seen, by a warp.
template <int T> __device__ __forceinline__ void score_block(
    const Attention& a, const Row& row, Heads heads, Seen seen, u32 block, const float4* q, PerHead<T>* scores
) {
    int lane = threadIdx.x % WARP, bytes = run_bytes(a.k_dim), quads = quads_of(a.k_dim);
    const u8* key = a.keys + (block_run(a, row, heads.kv_head, block) + lane / LANES) * bytes;
    int head = lane % LANES % T;
    const float* bias = a.bias
        ? a.bias + (u64)(heads.first + head) * (2 * a.reach - 1) + (a.reach - 1) + block * BLOCK - row.position
        : nullptr;
    u32 start = block * BLOCK + lane / LANES;
    float sums[STEPS][T];
    bool is_seen[STEPS];
    for (int step = 0; step < STEPS; step++) {
        u32 position = start + step * WARP / LANES;
        is_seen[step] = position >= seen.first && position < seen.end;
        for (int t = 0; t < T; t++) sums[step][t] = 0.0f;
    }
    for (int quad = lane % LANES; quad < quads; quad += LANES) {
        float4 x[T];
        for (int t = 0; t < T; t++) x[t] = q[t * quads + quad];
        for (int step = 0; step < STEPS; step++) {
            if (!is_seen[step]) continue;
            float4 k = read_quad(key + step * WARP / LANES * bytes, quad, a.k_dim);
            for (int t = 0; t < T; t++) {
                float sum = fmaf(x[t].y, k.y, fmaf(x[t].x, k.x, sums[step][t]));
                sums[step][t] = fmaf(x[t].w, k.w, fmaf(x[t].z, k.z, sum));
            }
        }
    }
    for (int step = 0; step < STEPS; step++) {
        u32 first = block * BLOCK + step * WARP / LANES;
        if (first >= seen.end || first + WARP / LANES <= seen.first) continue;
        float product = sum_over_lanes<T>(sums[step]);
        // Heads that do not exist have scores, too, which are not used.
        if (is_seen[step] && lane % LANES < T) {
            int at = step * WARP / LANES + lane / LANES;
            if (a.of_queries && head < heads.count) {
                product = product + distance_score(a, row, heads.row, heads.first + head, block * BLOCK + at);
            }
            float score = product * a.scale;
            if (a.cap != 0.0f) score = a.cap * tanhf(score / a.cap);
            if (bias && head < heads.count) score = score + bias[at];
            scores[at].of[head] = score;
        }
    }
}

// Replaces the scores of a head in a split by weights, and merges their sum with those of earlier splits, by a warp.
template <int T> __device__ __forceinline__ void weigh_split(State<T>& state, int head, Seen seen, u32 split) {
    int lane = threadIdx.x % WARP;
    u32 first = seen.first > split * SPLIT ? seen.first - split * SPLIT : 0;
    u32 end = min(seen.end - split * SPLIT, (u32)SPLIT);
    float largest = -INFINITY_F32, total = 0.0f;
    for (u32 at = first / WARP * WARP + lane; at < end; at += WARP) {
        if (at >= first) largest = fmaxf(largest, state.weights[at].of[head]);
    }
    largest = warp_max(largest);
    float base = base_of(largest);
    for (u32 at = first / WARP * WARP + lane; at < end; at += WARP) {
        if (at < first) continue;
        float weight = expf(state.weights[at].of[head] - base);
        state.weights[at].of[head] = weight;
        total = total + weight;
    }
    total = warp_sum(total);
    if (lane != 0) return;
    float merged = fmaxf(state.largest[head], largest);
    float earlier = expf(state.largest[head] - base_of(merged)), current = expf(largest - base_of(merged));
    state.largest[head] = merged;
    state.total[head] = fmaf(total, current, state.total[head] * earlier);
    state.earlier[head] = earlier;
    state.current[head] = current;
}

// Adds the weighted values of a split to sums (T, quads of v_dim). A thread always has the same sums.
template <int T> __device__ __forceinline__ void add_values(
    const Attention& a, const Row& row, Heads heads, u32 split, const State<T>& state, float4* sums
) {
    int lane = threadIdx.x % WARP, part = lane / VALUE_LANES, bytes = run_bytes(a.width), quads = quads_of(a.v_dim);
    for (int at = threadIdx.x / WARP * VALUE_LANES; at < quads; at += blockDim.x / WARP * VALUE_LANES) {
        int quad = at + lane % VALUE_LANES;
        float4 own[T];
        for (int t = 0; t < T; t++) own[t] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int block = 0; block < BLOCKS; block++) {
            u32 wanted = state.wanted[block] >> part;
            if (state.wanted[block] == 0) continue;
            u64 run = block_run(a, row, heads.kv_head, split * BLOCKS + block) + part;
            const u8* value = a.values + run * bytes;
            const PerHead<T>* weights = state.weights + block * BLOCK + part;
            for (int first = 0; first < BLOCK; first += WARP / VALUE_LANES, value += WARP / VALUE_LANES * bytes) {
                if (quad >= quads || !(wanted >> first & 1)) continue;
                float4 v = read_quad(value, quad, a.width);
                PerHead<T> weight = weights[first];
                for (int t = 0; t < T; t++) {
                    own[t].x = fmaf(weight.of[t], v.x, own[t].x);
                    own[t].y = fmaf(weight.of[t], v.y, own[t].y);
                    own[t].z = fmaf(weight.of[t], v.z, own[t].z);
                    own[t].w = fmaf(weight.of[t], v.w, own[t].w);
                }
            }
        }
        for (int t = 0; t < T; t++) {
            for (int step = VALUE_LANES * 2; step >= VALUE_LANES; step /= 2) {
                own[t].x = own[t].x + __shfl_xor_sync(ALL_LANES, own[t].x, step);
                own[t].y = own[t].y + __shfl_xor_sync(ALL_LANES, own[t].y, step);
                own[t].z = own[t].z + __shfl_xor_sync(ALL_LANES, own[t].z, step);
                own[t].w = own[t].w + __shfl_xor_sync(ALL_LANES, own[t].w, step);
            }
            if (part == 0 && quad < quads && t < heads.count) {
                float4* to = sums + t * quads + quad;
                float4 sum = *to;
                float earlier = state.earlier[t], current = state.current[t];
                sum.x = fmaf(own[t].x, current, sum.x * earlier);
                sum.y = fmaf(own[t].y, current, sum.y * earlier);
                sum.z = fmaf(own[t].z, current, sum.z * earlier);
                sum.w = fmaf(own[t].w, current, sum.w * earlier);
                *to = sum;
            }
        }
    }
}

// Reads the queries of the heads to q (T, quads of k_dim), and clears the sums and the state.
template <int T> __device__ __forceinline__ void begin_row(
    const Attention& a, Heads heads, float* q, float4* sums, State<T>& state
) {
    const float* from = a.q + ((u64)heads.row * a.heads + heads.first) * a.k_dim;
    int width = 4 * quads_of(a.k_dim);
    for (int t = 0; t < T; t++) {
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            q[t * width + i] = t < heads.count && i < a.k_dim ? from[t * a.k_dim + i] : 0.0f;
        }
    }
    if (threadIdx.x < T) {
        state.largest[threadIdx.x] = -INFINITY_F32;
        state.total[threadIdx.x] = 0.0f;
    }
    for (int i = threadIdx.x; i < T * quads_of(a.v_dim); i += blockDim.x) sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    __syncthreads();
}

// Divides the sums by the sums of the weights, to which the sink of a head adds.
template <int T> __device__ __forceinline__ void write_row(
    const Attention& a, const Row& row, Heads heads, Seen seen, const float* sums, const State<T>& state
) {
    __syncthreads();
    float* out = a.out + ((u64)heads.row * a.heads + heads.first) * a.v_dim;
    int width = 4 * quads_of(a.v_dim);
    bool has_sinks = a.sinks && !(row.flags & ROW_IS_NULL);
    for (int t = 0; t < heads.count; t++) {
        float total = state.total[t];
        if (has_sinks) total = total + expf(a.sinks[heads.first + t] - base_of(state.largest[t]));
        for (int i = threadIdx.x; i < a.v_dim; i += blockDim.x) {
            out[t * a.v_dim + i] = seen.first < seen.end ? sums[t * width + i] / total : 0.0f;
        }
    }
}

extern __shared__ float4 dynamic_memory[];

// Blocks (rows, KV heads and parts of T heads of each group).
template <int T> __device__ __forceinline__ void attend(const Row* rows, const Attention& a) {
    __shared__ State<T> state;
    Row row = rows[blockIdx.x];
    if (is_selective(a, row)) return;
    int group = a.heads / a.kv_heads, parts = (group + T - 1) / T, part = blockIdx.y % parts;
    int kv_head = blockIdx.y / parts, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    Heads heads = {(int)blockIdx.x, kv_head * group + part * T, min(T, group - part * T), kv_head};
    Seen seen = seen_by(a, row);
    float4 *q = dynamic_memory, *sums = q + T * quads_of(a.k_dim);
    begin_row<T>(a, heads, (float*)q, sums, state);
    for (u32 split = seen.first / SPLIT; split * SPLIT < seen.end; split++) {
        for (int block = warp; block < BLOCKS; block += warps) {
            u32 start = split * SPLIT + block * BLOCK, from = max(start, seen.first), to = min(start + BLOCK, seen.end);
            u32 wanted = from < to ? ALL_LANES >> (BLOCK - (to - from)) << (from - start) : 0;
            if (threadIdx.x % WARP == 0) state.wanted[block] = wanted;
            if (wanted == 0) continue;
            score_block<T>(a, row, heads, seen, start / BLOCK, q, state.weights + block * BLOCK);
        }
        __syncthreads();
        for (int t = warp; t < heads.count; t += warps) weigh_split<T>(state, t, seen, split);
        __syncthreads();
        add_values<T>(a, row, heads, split, state, sums);
        __syncthreads();
    }
    write_row<T>(a, row, heads, seen, (const float*)sums, state);
}

extern "C" __global__ void attend_1(ATTENTION_PARAMETERS) {
    attend<1>(rows, ATTENTION);
}

extern "C" __global__ void attend_2(ATTENTION_PARAMETERS) {
    attend<2>(rows, ATTENTION);
}

extern "C" __global__ void attend_4(ATTENTION_PARAMETERS) {
    attend<4>(rows, ATTENTION);
}

// The place of a position among those that are selected, ascending: by score, descending, then by position. NaN counts
// as negative infinity.
__device__ __forceinline__ u64 rank_of(float score, u32 position) {
    if (score != score) score = -INFINITY_F32;
    // Both zeros are equal.
    u32 bits = __float_as_uint(score == 0.0f ? 0.0f : score);
    return (u64)(bits & 0x80000000u ? bits : bits ^ 0x7fffffffu) << 32 | position;
}

// Finds the digit of the rank number `count`, which is at least 1, in a histogram of 256 digits, by a warp: writes the
// digit, its number among the ranks with that digit, and how many these are.
__device__ __forceinline__ void find_digit(const u32* histogram, u32 count, u32* found) {
    int lane = threadIdx.x % WARP;
    u32 own = 0;
    for (int i = 0; i < 8; i++) own += histogram[8 * lane + i];
    u32 end = own;
    for (int step = 1; step < WARP; step *= 2) {
        u32 lower = __shfl_up_sync(ALL_LANES, end, step);
        if (lane >= step) end += lower;
    }
    u32 before = end - own;
    if (count > before && count <= end) {
        int digit = 8 * lane;
        while (before + histogram[digit] < count) before += histogram[digit++];
        found[0] = digit;
        found[1] = count - before;
        found[2] = histogram[digit];
    }
}

// Returns the largest of the `count` smallest ranks of positions from `first` to before `end`, or a number above it
// that has the same ones below it.
__device__ __forceinline__ u64 select_ranks(const PerHead<1>* scores, u32 first, u32 end, u32 count) {
    __shared__ u32 histogram[256], found[3];
    u64 prefix = 0;
    if (count == 0) return 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x) histogram[i] = 0;
        __syncthreads();
        for (u32 position = first + threadIdx.x; position < end; position += blockDim.x) {
            u64 rank = rank_of(scores[position].of[0], position);
            if ((rank ^ prefix) >> shift < 256) atomicAdd(&histogram[rank >> shift & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x < WARP) find_digit(histogram, count, found);
        __syncthreads();
        prefix |= (u64)found[0] << shift;
        count = found[1];
        // All ranks with this prefix are among those wanted.
        if (found[2] == count) return prefix | (((u64)1 << shift) - 1);
    }
    return prefix;
}

// Attention of the rows that attend to a fraction of the values: heads of rows, one after another. `scratch` holds
// `scratch_len` scores for each block of threads.
extern "C" __global__ void attend_selected(
    ATTENTION_PARAMETERS, int count, u32 millionths, int scratch_len, PerHead<1>* scratch
) {
    __shared__ State<1> state;
    Attention a = ATTENTION;
    int warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    float4 *q_quads = dynamic_memory, *sums = q_quads + quads_of(k_dim);
    PerHead<1>* scores = scratch + (u64)blockIdx.x * scratch_len;
    for (u64 item = blockIdx.x; item < (u64)count * heads; item += gridDim.x) {
        int head = item % heads;
        Heads own = {(int)(item / heads), head, 1, head / (heads / kv_heads)};
        Row row = rows[own.row];
        if (!is_selective(a, row)) continue;
        Seen seen = seen_by(a, row);
        begin_row<1>(a, own, (float*)q_quads, sums, state);
        for (u32 block = seen.first / BLOCK + warp; block * BLOCK < seen.end; block += warps) {
            score_block<1>(a, row, own, seen, block, q_quads, scores + block * BLOCK);
        }
        __syncthreads();
        u32 last = seen.end - 1, wanted = (u64)(last - seen.first) * millionths / 1000000;
        u64 limit = select_ranks(scores, seen.first, last, wanted);
        for (u32 split = seen.first / SPLIT; split * SPLIT < seen.end; split++) {
            for (u32 at = threadIdx.x; at < SPLIT; at += blockDim.x) {
                u32 position = split * SPLIT + at;
                bool is_seen = position >= seen.first && position < seen.end, is_wanted = position == last;
                if (is_seen) {
                    float score = scores[position].of[0];
                    state.weights[at].of[0] = score;
                    is_wanted |= wanted > 0 && rank_of(score, position) <= limit;
                }
                u32 bits = __ballot_sync(ALL_LANES, is_wanted);
                if (at % WARP == 0) state.wanted[at / BLOCK] = bits;
            }
            __syncthreads();
            if (warp == 0) weigh_split<1>(state, 0, seen, split);
            __syncthreads();
            add_values<1>(a, row, own, split, state, sums);
            __syncthreads();
        }
        write_row<1>(a, row, own, seen, (const float*)sums, state);
        __syncthreads();
    }
}
