// Products of rows with a matrix (n, k) of the format: y (rows, n of the columns) = x (rows, k) · wᵀ, plus a bias.
//
// 8, 16 or 32 lanes, as many as k asks for, compute two outputs for a tile of up to 8 rows, so that each weight is
// decoded once for the tile. Sums depend on the format and on k alone. With several heads, each has a matrix (n, k) of
// its own, rows of x are (heads, k) and those of y (heads, columns); it is the y index of the block of threads.

#define TILE_ROWS 8
#define OUTPUTS 2
// Lanes whose values are added at once.
#define OCTET 8

struct Product {
    int n;
    int k;
    int rows;
    // Lanes that compute outputs together: a power of two from OCTET to WARP.
    int lanes;
    const u8* w;
    // A value for each output, or null.
    const float* bias;
    // Columns of y, of which n are written, from the first on.
    int columns;
    int heads;
    // Whether results are added to what is in y.
    int accumulates;
    float* y;

    // The first of the outputs of this lane; n or more for lanes without any.
    __device__ __forceinline__ int output() const {
        int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
        return OUTPUTS * (blockIdx.x / tiles * (blockDim.x / lanes) + threadIdx.x / lanes);
    }

    // The first row of the tile.
    __device__ __forceinline__ int first_row() const {
        int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
        return blockIdx.x % tiles * TILE_ROWS;
    }

    // Row r of the tile as a row of x (rows * heads, k); the last one in place of those beyond it.
    __device__ __forceinline__ u64 row(int r) const {
        return (u64)min(first_row() + r, rows - 1) * heads + blockIdx.y;
    }

    // The weights of output o of this lane; those of the last one in place of those beyond it.
    __device__ __forceinline__ const u8* weights(int o) const {
        return w + ((u64)blockIdx.y * n + min(output() + o, n - 1)) * (k / BLOCK_ELEMENTS) * BLOCK_BYTES;
    }

    __device__ __forceinline__ int lane() const {
        return threadIdx.x % lanes;
    }
};

// Adds the values of the 8 lanes of an octet, for N sums at once: ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)). A lane
// gets the sums from number `lane % 8 * N / 8` on: lanes exchange halves of them, and then have half as many.
template <int N, int STEP = OCTET / 2> __device__ __forceinline__ void octet_sum(float* values) {
    if constexpr (STEP > 0 && N == 1) {
        values[0] = values[0] + __shfl_xor_sync(ALL_LANES, values[0], STEP);
        octet_sum<1, STEP / 2>(values);
    } else if constexpr (STEP > 0) {
        bool is_upper = threadIdx.x & STEP;
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            float lower = values[i], upper = values[i + N / 2];
            values[i] = (is_upper ? upper : lower) + __shfl_xor_sync(ALL_LANES, is_upper ? lower : upper, STEP);
        }
        octet_sum<N / 2, STEP / 2>(values);
    }
}

// Sums of a lane after `octet_sum`.
#define LANE_SUMS(N) ((N) > OCTET ? (N) / OCTET : 1)

// Adds the sums of the octets, (0 + 1) + (2 + 3), and stores the results. Sum number o * R + r of `octet_sum` is that
// of output o and row r of the tile.
template <int R> __device__ __forceinline__ void store(const Product& p, const float* sums) {
    const int n = R * OUTPUTS;
    int lane = p.lane();
#pragma unroll
    for (int i = 0; i < LANE_SUMS(n); i++) {
        float sum = sums[i];
        for (int step = OCTET; step < p.lanes; step *= 2) sum = sum + __shfl_xor_sync(ALL_LANES, sum, step);
        int number = lane * n / OCTET + i, row = p.first_row() + number % R, output = p.output() + number / R;
        bool is_first = lane < OCTET && lane * n % OCTET == 0;
        if (!is_first || row >= p.rows || output >= p.n) continue;
        if (p.bias) sum = sum + p.bias[output];
        float* y = p.y + ((u64)row * p.heads + blockIdx.y) * p.columns + output;
        *y = p.accumulates ? *y + sum : sum;
    }
}

// Calls a function for as many rows as the tile has, or a few more.
#define FOR_ROWS(call)                                                                                                 \
    int rows = p.rows - p.first_row();                                                                                 \
    if (rows > 4) call(8);                                                                                             \
    else if (rows > 2) call(4);                                                                                        \
    else if (rows > 1) call(2);                                                                                        \
    else call(1);

// Four weights of a row from element e on. Those beyond the row are 0; it has none if IS_WHOLE.
template <bool IS_WHOLE> __device__ __forceinline__ float4 four_weights(const u8* row, u32 e, u32 k) {
    if (IS_WHOLE) {
#if defined(FORMAT_F32)
        return *(const float4*)(row + 4 * (u64)e);
#elif defined(FORMAT_F16) || defined(FORMAT_BF16)
        uint2 words = *(const uint2*)(row + 2 * (u64)e);
        u16 halves[4] = {(u16)words.x, (u16)(words.x >> 16), (u16)words.y, (u16)(words.y >> 16)};
        float values[4];
        for (int j = 0; j < 4; j++) values[j] = block_element((const u8*)&halves[j], 0);
        return make_float4(values[0], values[1], values[2], values[3]);
#else
        // They are in one block.
        const u8* block = row + (u64)(e / BLOCK_ELEMENTS) * BLOCK_BYTES;
        u32 at = e % BLOCK_ELEMENTS;
        return make_float4(
            block_element(block, at), block_element(block, at + 1), block_element(block, at + 2),
            block_element(block, at + 3)
        );
#endif
    }
    return make_float4(
        element(row, e), e + 1 < k ? element(row, e + 1) : 0.0f, e + 2 < k ? element(row, e + 2) : 0.0f,
        e + 3 < k ? element(row, e + 3) : 0.0f
    );
}

// Four inputs, of which `left` are left in their row.
template <bool IS_WHOLE> __device__ __forceinline__ float4 four_inputs(const float* x, u32 left) {
    if (IS_WHOLE) return *(const float4*)x;
    return make_float4(x[0], left > 1 ? x[1] : 0.0f, left > 2 ? x[2] : 0.0f, left > 3 ? x[3] : 0.0f);
}

// Lane l of L adds products of the columns 4 (l + L i) + j for i = 0, 1, ... to sum j of 4, by fused operations. Then
// (0 + 1) + (2 + 3), the lanes of each octet, and the octets.
template <int R, bool IS_WHOLE> __device__ __forceinline__ void multiply_rows(const Product& p, const float* x) {
    float4 sums[OUTPUTS * R] = {};
    const u8* weights[OUTPUTS];
    const float* inputs[R];
#pragma unroll
    for (int o = 0; o < OUTPUTS; o++) weights[o] = p.weights(o);
#pragma unroll
    for (int r = 0; r < R; r++) inputs[r] = x + p.row(r) * p.k + 4 * p.lane();
    for (u32 e = 4 * p.lane(); e < p.k; e += 4 * p.lanes) {
        float4 w[OUTPUTS];
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) w[o] = four_weights<IS_WHOLE>(weights[o], e, p.k);
#pragma unroll
        for (int r = 0; r < R; r++) {
            float4 v = four_inputs<IS_WHOLE>(inputs[r], p.k - e);
            inputs[r] += 4 * p.lanes;
#pragma unroll
            for (int o = 0; o < OUTPUTS; o++) {
                float4& sum = sums[o * R + r];
                sum.x = fmaf(w[o].x, v.x, sum.x);
                sum.y = fmaf(w[o].y, v.y, sum.y);
                sum.z = fmaf(w[o].z, v.z, sum.z);
                sum.w = fmaf(w[o].w, v.w, sum.w);
            }
        }
    }
    float values[OUTPUTS * R];
#pragma unroll
    for (int i = 0; i < OUTPUTS * R; i++) values[i] = (sums[i].x + sums[i].y) + (sums[i].z + sums[i].w);
    octet_sum<OUTPUTS * R>(values);
    store<R>(p, values);
}

// The product with F32 inputs x (rows, k).
extern "C" __global__ void multiply_f32(
    int n, int k, int row_count, int lanes, const u8* w, const float* bias, int columns, int heads, int accumulates,
    float* y, const float* x
) {
    Product p = {n, k, row_count, lanes, w, bias, columns, heads, accumulates, y};
#define MULTIPLY_WHOLE(R) multiply_rows<R, true>(p, x)
#define MULTIPLY_PARTS(R) multiply_rows<R, false>(p, x)
#if BLOCK_ELEMENTS == 1
    if (k % 4) {
        FOR_ROWS(MULTIPLY_PARTS)
        return;
    }
#endif
    FOR_ROWS(MULTIPLY_WHOLE)
}
