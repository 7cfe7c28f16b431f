// Products with inputs in blocks of int8, for formats whose blocks can be split into quants and parameters.
#if defined(HAS_QUANTS)

// What turns the quants of 32 elements into values: quant * scale + minimum.
struct Levels {
    float scale;
    float minimum;
    // Factors of the scale for the first and the last 16 elements, where they differ.
    int factors[2];
};

#define LOW_NIBBLES 0x0f0f0f0fu

// Reads a word at an even address, which is a multiple of 4 if blocks are.
__device__ __forceinline__ u32 word_at(const u8* at) {
#if BLOCK_BYTES % 4 == 0
    return *(const u32*)at;
#else
    return (u32) * (const u16*)at | (u32) * (const u16*)(at + 2) << 16;
#endif
}

__device__ __forceinline__ float f16_at(const u8* at) {
    return f16_to_f32(*(const u16*)at);
}

// The bytes of two words in turn.
__device__ __forceinline__ void interleave(u32 even, u32 odd, u32* to) {
    to[0] = __byte_perm(even, odd, 0x5140);
    to[1] = __byte_perm(even, odd, 0x7362);
}

// Four fields of one or two bits, the first in the lowest bits, as bytes.
__device__ __forceinline__ u32 spread_bits(u32 fields) {
    return (fields & 15u) * 0x00204081u & 0x01010101u;
}

__device__ __forceinline__ u32 spread_pairs(u32 fields) {
    u32 both = (fields & 255u) | (fields & 255u) << 12;
    return (both | both << 6) & 0x03030303u;
}

// 32 nibbles in the order of elements, the first of two in the low bits.
__device__ __forceinline__ void nibbles_in_order(const u8* from, u32* quants) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 word = word_at(from + 4 * i);
        interleave(word & LOW_NIBBLES, word >> 4 & LOW_NIBBLES, quants + 2 * i);
    }
}

// Reads 32 quants, from element 32 * number of the row on, four to a word in their order, and their levels.
__device__ __forceinline__ Levels read_quants(const u8* row, int number, u32 (&quants)[8]) {
    const int runs = BLOCK_ELEMENTS / 32;
    const u8* block = row + (u64)(number / runs) * BLOCK_BYTES;
    [[maybe_unused]] int run = number % runs;
#if defined(FORMAT_Q8_0)
#pragma unroll
    for (int i = 0; i < 8; i++) quants[i] = word_at(block + 2 + 4 * i);
    return {f16_at(block), 0.0f};
#elif defined(FORMAT_Q4_0) || defined(FORMAT_Q4_1)
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 word = word_at(block + BLOCK_BYTES - 16 + 4 * i);
        quants[i] = word & LOW_NIBBLES;
        quants[i + 4] = word >> 4 & LOW_NIBBLES;
    }
    float scale = f16_at(block);
#if defined(FORMAT_Q4_0)
    return {scale, -8.0f * scale};
#else
    return {scale, f16_at(block + 2)};
#endif
#elif defined(FORMAT_Q4_K) || defined(FORMAT_Q5_K)
    const u8* low = block + BLOCK_BYTES - 128 + run / 2 * 32;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        quants[i] = word_at(low + 4 * i) >> (run % 2 * 4) & LOW_NIBBLES;
#if defined(FORMAT_Q5_K)
        quants[i] |= (word_at(block + 16 + 4 * i) >> run & 0x01010101u) << 4;
#endif
    }
    int2 factors = k_scale_and_min(block + 4, run);
    return {f16_at(block) * (float)factors.x, -(f16_at(block + 2) * (float)factors.y)};
#elif defined(FORMAT_Q6_K)
    const u8 *low = block + run / 4 * 64 + run % 2 * 32, *high = block + 128 + run / 4 * 32;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u32 quant = word_at(low + 4 * i) >> (run % 4 / 2 * 4) & LOW_NIBBLES;
        quant |= (word_at(high + 4 * i) >> (run % 4 * 2) & 0x03030303u) << 4;
        // Minus 32 in each byte.
        quants[i] = (quant + 0x60606060u) ^ 0x80808080u;
    }
    const signed char* factors = (const signed char*)block + 192 + 2 * run;
    return {f16_at(block + 208), 0.0f, {factors[0], factors[1]}};
#elif defined(FORMAT_G4_B64)
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 word = word_at(block + 4 + 16 * run + 4 * i);
        interleave(word >> 4 & LOW_NIBBLES, word & LOW_NIBBLES, quants + 2 * i);
    }
    return {1.0f / f16_at(block), f16_at(block + 2)};
#else
#if defined(FORMAT_Q3H_B64T1)
    u32 bits = word_at(block + 4) >> (16 * run), pairs = word_at(block + 8 + 4 * run);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 word = word_at(block + 16 + 8 * run + i / 2 * 4) >> (i % 2 * 16) & 0xffffu, low[2];
        interleave(word & LOW_NIBBLES, word >> 4 & LOW_NIBBLES, low);
        u32 both = spread_bits(bits >> (4 * i)) << 6 | spread_pairs(pairs >> (8 * i)) << 4 | low[0];
        // Quotients by 11 of numbers below 121.
        u32 odd = (both & 0x00ff00ffu) * 187u >> 11 & 0x000f000fu;
        odd |= ((both >> 8 & 0x00ff00ffu) * 187u >> 11 & 0x000f000fu) << 8;
        interleave(both - 11u * odd, odd, quants + 2 * i);
    }
#else
    nibbles_in_order(block + BLOCK_BYTES - BLOCK_ELEMENTS / 2 + 16 * run, quants);
#if defined(FORMAT_Q5_B64T1)
    u32 bits = word_at(block + 4 + 4 * run);
#pragma unroll
    for (int i = 0; i < 8; i++) quants[i] |= spread_bits(bits >> (4 * i)) << 4;
#elif defined(FORMAT_Q6_B64T1)
#pragma unroll
    for (int i = 0; i < 8; i++) {
        quants[i] |= spread_pairs(word_at(block + 4 + 8 * run + i / 4 * 4) >> (i % 4 * 8)) << 4;
    }
#endif
#endif
    return {f16_at(block + 2), f16_at(block)};
#endif
}

// The dot product of four quants of weights and inputs, plus `sum`.
__device__ __forceinline__ int dot4(u32 weights, int inputs, int sum) {
#if defined(FORMAT_Q8_0) || defined(FORMAT_Q6_K)
    asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(weights), "r"(inputs));
#else
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(weights), "r"(inputs));
#endif
    return sum;
}

__device__ __forceinline__ int dot16(const u32* weights, int4 inputs, int sum) {
    sum = dot4(weights[1], inputs.y, dot4(weights[0], inputs.x, sum));
    return dot4(weights[3], inputs.w, dot4(weights[2], inputs.z, sum));
}

// The product of a block: (scale * dot + minimum * sum) * scale of the inputs, where `dot` and `sum` are exact
// integers and the first product and the addition are fused.
__device__ __forceinline__ float block_product(const u32* weights, const Levels& levels, const int4* x, float2 input) {
#if defined(FORMAT_Q6_K)
    // Below 2^24, so it is exact as F32 too.
    int dot = levels.factors[0] * dot16(weights, x[0], 0) + levels.factors[1] * dot16(weights + 4, x[1], 0);
#else
    int dot = dot16(weights + 4, x[1], dot16(weights, x[0], 0));
#endif
#if defined(FORMAT_Q8_0) || defined(FORMAT_Q6_K)
    return levels.scale * (float)dot * input.x;
#else
    return fmaf(levels.scale, (float)dot, levels.minimum * input.y) * input.x;
#endif
}

// An octet of lanes computes 8 blocks of 32 columns at once, and adds their products as `octet_sum` does; there are
// zeros for blocks beyond the columns. With L lanes, octet number s has the s-th of L / 8 equal slices of these groups
// of 8, and adds their sums in ascending order. Then the slices are added. A kernel that takes blocks in ascending order
// can keep this order with few sums at a time.
template <int R>
__device__ __forceinline__ void multiply_blocks(const Product& p, const int4* x, const float2* inputs) {
    const int n = OUTPUTS * R;
    int blocks = p.k / 32, octets = p.lanes / OCTET;
    int groups = ((blocks + OCTET - 1) / OCTET + octets - 1) / octets;
    int block = p.lane() / OCTET * groups * OCTET + p.lane() % OCTET;
    float sums[LANE_SUMS(n)] = {};
    for (int i = 0; i < groups; i++, block += OCTET) {
        float values[n] = {};
        if (block < blocks) {
            u32 quants[OUTPUTS][8];
            Levels levels[OUTPUTS];
#pragma unroll
            for (int o = 0; o < OUTPUTS; o++) levels[o] = read_quants(p.weights(o), block, quants[o]);
#pragma unroll
            for (int r = 0; r < R; r++) {
                u64 at = p.row(r) * blocks + block;
                int4 halves[2] = {x[2 * at], x[2 * at + 1]};
                float2 input = inputs[at];
#pragma unroll
                for (int o = 0; o < OUTPUTS; o++) {
                    values[o * R + r] = block_product(quants[o], levels[o], halves, input);
                }
            }
        }
        octet_sum<n>(values);
#pragma unroll
        for (int j = 0; j < LANE_SUMS(n); j++) sums[j] = sums[j] + values[j];
    }
    store<R>(p, sums);
}

// The product with inputs in blocks of 32 quants, and the scale and the sum of the quants of each.
extern "C" __global__ void multiply_int8(
    int n, int k, int row_count, int lanes, const u8* w, const float* bias, int columns, int heads, int accumulates,
    float* y, const int4* x, const float2* inputs
) {
    Product p = {n, k, row_count, lanes, w, bias, columns, heads, accumulates, y};
#define MULTIPLY_BLOCKS(R) multiply_blocks<R>(p, x, inputs)
    FOR_ROWS(MULTIPLY_BLOCKS)
}
#endif
