// The random numbers of sampling and the formulas of a draw, operation by operation as `random.rs` and `draw.rs` of
// the reference define them: compiled without fused operations, they give the same bits. No function of a library is
// used.

// 1.5 * 2^23: adding and subtracting it rounds a number of magnitude below 2^22 to the nearest integer.
#define ROUNDING 12582912.0f
#define EXP_FLOOR -87.0f
#define LN_2_HIGH 0.6933594f
#define LN_2_LOW -2.1219444e-4f
// Least and largest noise of a token.
#define LEAST_NOISE -3.2f
#define MOST_NOISE 22.2f

__device__ __forceinline__ float nearest(float x, int* bits) {
    float shifted = x + ROUNDING;
    *bits = __float_as_int(shifted) - __float_as_int(ROUNDING);
    return shifted - ROUNDING;
}

// e^x for x <= 0; 0 for x < -87.
__device__ __forceinline__ float draw_exp(float x) {
    float limited = x > EXP_FLOOR ? x : EXP_FLOOR;
    int n_bits;
    float n = nearest(limited * 1.44269504088896340736f, &n_bits);
    float r = (limited - n * LN_2_HIGH) - n * LN_2_LOW;
    float sum = 1.0f / 5040.0f;
    sum = sum * r + 1.0f / 720.0f;
    sum = sum * r + 1.0f / 120.0f;
    sum = sum * r + 1.0f / 24.0f;
    sum = sum * r + 1.0f / 6.0f;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    float value = sum * __int_as_float((n_bits + 127) << 23);
    return x < EXP_FLOOR ? 0.0f : value;
}

// The integer nearest to e^x * 2^30 for x <= 0.
__device__ __forceinline__ u32 draw_weight(float x) {
    float scaled = draw_exp(x) * 32768.0f;
    int high_bits, low_bits;
    float high = nearest(scaled, &high_bits);
    nearest((scaled - high) * 32768.0f, &low_bits);
    return (u32)(high_bits * 32768 + low_bits);
}

// The natural logarithm of a positive normal number.
__device__ __forceinline__ float draw_ln(float x) {
    u32 bits = __float_as_uint(x);
    int exponent = (int)(bits >> 23) - 127;
    float m = __uint_as_float((bits & 0x007fffffu) | 0x3f800000u);
    if (m > 1.41421356237309504880f) {
        m *= 0.5f;
        exponent += 1;
    }
    float f = (m - 1.0f) / (m + 1.0f);
    float square = f * f;
    float sum = 1.0f / 9.0f;
    sum = sum * square + 1.0f / 7.0f;
    sum = sum * square + 1.0f / 5.0f;
    sum = sum * square + 1.0f / 3.0f;
    float rest = (2.0f * f) * (square * sum);
    float e = (float)exponent;
    return e * LN_2_HIGH + (2.0f * f + (rest + e * LN_2_LOW));
}

// The noise of a random word.
__device__ __forceinline__ float gumbel(u32 word) {
    const float unit = 1.0f / 4294967296.0f;
    float r = (float)(word | 1u) * unit;
    float rest = (float)(~word | 1u) * unit;
    float rounded = 1.0f - rest;
    float exponential = rounded > 0.0f ? -draw_ln(rest) * (r / rounded) : r;
    return -draw_ln(exponential);
}

// An upper bound of the noise of a random word, without a logarithm.
__device__ __forceinline__ float gumbel_bound(u32 word) {
    float n = (float)(int)(word >> 1);
    return (158.0f - (float)__float_as_int(n) * (1.0f / 8388608.0f)) * 0.693147180559945309417f + 0.001f;
}

// The random words of the tokens 4 * group to 4 * group + 3: Philox4x32-10.
__device__ __forceinline__ uint4 token_words(u32 seed_low, u32 seed_high, u32 position, u32 group) {
    uint4 words = make_uint4(position, 0u, group, 1u);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 a = (u64)0xD2511F53u * words.x, b = (u64)0xCD9E8D57u * words.z;
        words = make_uint4((u32)(b >> 32) ^ words.y ^ seed_low, (u32)b, (u32)(a >> 32) ^ words.w ^ seed_high, (u32)a);
        seed_low += 0x9E3779B9u;
        seed_high += 0xBB67AE85u;
    }
    return words;
}
