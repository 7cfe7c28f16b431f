// Inputs of products in blocks of 32 int8, as `Int8Block` defines them.

// For each block of x, 32 quants, and its scale and the sum of its quants; a warp for each block.
extern "C" __global__ void quantize(u64 blocks, const float* x, signed char* quants, float2* levels) {
    u64 at = GLOBAL_INDEX;
    if (at / WARP >= blocks) return;
    float value = x[at];
    // Magnitudes compare as integers in the same order, with infinity and NaN above all finite ones.
    u32 magnitude = __float_as_uint(value) & 0x7fffffffu, largest_bits;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest_bits) : "r"(magnitude));
    float largest = __uint_as_float(largest_bits);
    // For magnitudes below 127 / (largest F32) the reciprocal overflows.
    float inverse = largest < 127.0f / 3.40282347e38f ? 0.0f : 127.0f / largest;
    // Added to a small number, 1.5 * 2^23 leaves it rounded to an integer in the low bits. NaN becomes -127.
    float rounded = fminf(fmaxf(value * inverse, -127.0f), 127.0f) + 12582912.0f;
    int quant = (signed char)__float_as_uint(rounded), sum;
    asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(quant));
    quants[at] = (signed char)quant;
    float scale = largest_bits < 0x7f800000u ? largest / 127.0f : NAN_F32;
    if (at % WARP == 0) levels[at / WARP] = make_float2(scale, (float)sum);
}
