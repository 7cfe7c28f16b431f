// Elements of blocks in a number format, with the order of operations of its definition. The macro FORMAT_x selects the
// format; BLOCK_ELEMENTS and BLOCK_BYTES are the sizes of a block.

// Field number n of `bits` bits, the first in the lowest bits.
__device__ __forceinline__ int field(const u8* from, int bits, int n) {
    int at = n * bits;
    return from[at / 8] >> (at % 8) & ((1 << bits) - 1);
}

// The field of element e of a K-quant: consecutive groups of 32 elements use higher bits of the same 32 bytes.
__device__ __forceinline__ int k_field(const u8* from, int e, int bits) {
    int group = 8 / bits * 32;
    return from[e / group * 32 + e % 32] >> (e % group / 32 * bits) & ((1 << bits) - 1);
}

// The nibble of element e of 32: first the low ones of 16 bytes, then the high ones.
__device__ __forceinline__ int nibble(const u8* from, int e) {
    return from[e % 16] >> (e / 16 * 4) & 15;
}

#if defined(FORMAT_Q4_K) || defined(FORMAT_Q5_K)
// The 6-bit scale and minimum of a run of 32 elements.
__device__ __forceinline__ int2 k_scale_and_min(const u8* from, int run) {
    if (run < 4) return make_int2(from[run] & 63, from[4 + run] & 63);
    int j = run - 4, both = from[8 + j];
    return make_int2((both & 15) | from[j] >> 6 << 4, both >> 4 | from[4 + j] >> 6 << 4);
}
#endif

#if defined(FORMAT_Q3_K)
__device__ __forceinline__ int q3_k_scale(const u8* from, int run) {
    int low = from[run % 8] >> (run / 8 * 4) & 15, high = from[8 + run % 4] >> (run / 4 * 2) & 3;
    return (low | high << 4) - 32;
}
#endif

#if defined(FORMAT_Q6_B64T1)
#define AFFINE_QUANT(from, e) (field(from, 2, e) << 4 | field((from) + 16, 4, e))
#elif defined(FORMAT_Q5_B64T1)
#define AFFINE_QUANT(from, e) (field(from, 1, e) << 4 | field((from) + 8, 4, e))
#elif defined(FORMAT_Q4_B64T1) || defined(FORMAT_Q4_B32T1A) || defined(FORMAT_Q4_B32T1B) || defined(FORMAT_Q4_B16)
#define AFFINE_QUANT(from, e) field(from, 4, e)
#elif defined(FORMAT_Q3_B32T1A) || defined(FORMAT_Q3_B32T1B)
#define AFFINE_QUANT(from, e) (field(from, 1, e) << 2 | field((from) + 4, 2, e))
#elif defined(FORMAT_Q2_B32T1A) || defined(FORMAT_Q2_B32T1B)
#define AFFINE_QUANT(from, e) field(from, 2, e)
#elif defined(FORMAT_Q8_B32T1)
#define AFFINE_QUANT(from, e) ((from)[e])
#elif defined(FORMAT_Q3H_B64T1)
#define AFFINE_QUANT(from, e) paired_quant(from, e)
// Pairs of quants from 0 to 10 are 7-bit numbers: bit 6 of all 32, then bits 4 and 5, then bits 0 to 3.
__device__ __forceinline__ int paired_quant(const u8* from, int e) {
    int n = e / 2, pair = field(from, 1, n) << 6 | field(from + 4, 2, n) << 4 | field(from + 12, 4, n);
    return e % 2 ? pair / 11 : pair % 11;
}
#endif

#if defined(FORMAT_IQ4_NL) || defined(FORMAT_IQ4_XS)
__constant__ signed char LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
#elif defined(FORMAT_MXFP4)
// Twice the E2M1 numbers.
__constant__ signed char LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
#endif

// Element e of a block.
__device__ __forceinline__ float block_element(const u8* block, int e) {
#if defined(FORMAT_F32)
    return *(const float*)block;
#elif defined(FORMAT_F16)
    return f16_to_f32(*(const u16*)block);
#elif defined(FORMAT_BF16)
    return bf16_to_f32(*(const u16*)block);
#elif defined(FORMAT_Q8_0)
    return (float)(signed char)block[2 + e] * read_f16(block);
#elif defined(FORMAT_Q4_0)
    return (float)(nibble(block + 2, e) - 8) * read_f16(block);
#elif defined(FORMAT_Q4_1)
    return read_f16(block) * (float)nibble(block + 4, e) + read_f16(block + 2);
#elif defined(FORMAT_Q5_0)
    return read_f16(block) * (float)((nibble(block + 6, e) | field(block + 2, 1, e) << 4) - 16);
#elif defined(FORMAT_Q5_1)
    return read_f16(block) * (float)(nibble(block + 8, e) | field(block + 4, 1, e) << 4) + read_f16(block + 2);
#elif defined(FORMAT_Q2_K)
    int both = block[e / 16];
    float scale = read_f16(block + 80) * (float)(both & 15), minimum = read_f16(block + 82) * (float)(both >> 4);
    return scale * (float)k_field(block + 16, e, 2) - minimum;
#elif defined(FORMAT_Q3_K)
    float scale = read_f16(block + 108) * (float)q3_k_scale(block + 96, e / 16);
    return scale * (float)(k_field(block + 32, e, 2) - (k_field(block, e, 1) ? 0 : 4));
#elif defined(FORMAT_Q4_K) || defined(FORMAT_Q5_K)
    int2 run = k_scale_and_min(block + 4, e / 32);
#if defined(FORMAT_Q4_K)
    int quant = k_field(block + 16, e, 4);
#else
    int quant = k_field(block + 48, e, 4) | k_field(block + 16, e, 1) << 4;
#endif
    return read_f16(block) * (float)run.x * (float)quant - read_f16(block + 2) * (float)run.y;
#elif defined(FORMAT_Q6_K)
    int low = block[e / 128 * 64 + e % 64] >> (e % 128 / 64 * 4) & 15;
    int quant = (low | k_field(block + 128, e, 2) << 4) - 32;
    return read_f16(block + 208) * (float)(signed char)block[192 + e / 16] * (float)quant;
#elif defined(FORMAT_IQ4_NL)
    return read_f16(block) * (float)LEVELS[nibble(block + 2, e)];
#elif defined(FORMAT_IQ4_XS)
    int run = e / 32;
    int scale = (block[4 + run / 2] >> (run % 2 * 4) & 15) | (read_u16(block + 2) >> (run * 2) & 3) << 4;
    return read_f16(block) * (float)(scale - 32) * (float)LEVELS[nibble(block + 8 + run * 16, e % 32)];
#elif defined(FORMAT_TQ1_0)
    // Five ternary digits of each byte; a power of three moves one of them to the top.
    int at = e < 160 ? e % 32 : e < 240 ? 32 + (e - 160) % 16 : 48 + (e - 240) % 4;
    int digit = e < 160 ? e / 32 : e < 240 ? (e - 160) / 16 : (e - 240) / 4;
    int power = digit == 0 ? 1 : digit == 1 ? 3 : digit == 2 ? 9 : digit == 3 ? 27 : 81;
    int quant = (((block[at] * power) & 255) * 3 >> 8) - 1;
    return read_f16(block + 52) * (float)quant;
#elif defined(FORMAT_TQ2_0)
    int quant = (block[e / 128 * 32 + e % 32] >> (e % 128 / 32 * 2) & 3) - 1;
    return read_f16(block + 64) * (float)quant;
#elif defined(FORMAT_MXFP4)
    // 2^(exponent - 128), which is subnormal for the two smallest.
    u32 exponent = block[0], bits = exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23;
    return __uint_as_float(bits) * (float)LEVELS[nibble(block + 1, e)];
#elif defined(FORMAT_Q4_B16)
    float minimum = (float)block[0] / 100.0f - 1.0f, scale = (float)block[1] / 1000.0f;
    return minimum + (float)AFFINE_QUANT(block + 2, e) * scale;
#elif defined(FORMAT_G4_B64)
    return (float)(block[4 + e / 2] >> (e % 2 ? 0 : 4) & 15) / read_f16(block) + read_f16(block + 2);
#else
    return read_f16(block) + (float)AFFINE_QUANT(block + 4, e) * read_f16(block + 2);
#endif
}

// Element e of a row of blocks.
__device__ __forceinline__ float element(const u8* row, int e) {
    return block_element(row + (u64)(e / BLOCK_ELEMENTS) * BLOCK_BYTES, e % BLOCK_ELEMENTS);
}
