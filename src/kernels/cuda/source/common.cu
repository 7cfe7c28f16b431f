// What all kernels share: number types and their conversions, the rows of a step, and reductions in a fixed order.
// No header is included, so that nothing but the compiler is needed.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WARP 32
#define ALL_LANES 0xffffffffu
#define NAN_F32 __int_as_float(0x7fc00000)
#define INFINITY_F32 __int_as_float(0x7f800000)

// A row of a step, as `StepRow` and its `RowSpan` describe it.
struct Row {
    u32 token;
    u32 position;
    u32 slot;
    u32 flags;
    // Maximum number of tokens of the sequence.
    u32 reserved;
    // Rows of its span in the row batch.
    u32 span_len;
    // Start of its span in the scratch cache.
    u32 scratch_start;
    // Tokens of the encoder input of the sequence.
    u32 encoder_len;
};

#define ROW_IS_NULL 1u
#define ROW_IS_GENERATED 2u
#define ROW_TAKES_LAST 4u
// The type of the token is in the bits above.
#define ROW_TYPE_SHIFT 8

__device__ __forceinline__ float f16_to_f32(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ u16 f32_to_f16(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ float bf16_to_f32(u16 bits) {
    return __uint_as_float((u32)bits << 16);
}

// Rounds to nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ u16 f32_to_bf16(float value) {
    u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)(bits >> 16 | 0x40u);
    return (u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Reads numbers of more than one byte at addresses of any alignment.
__device__ __forceinline__ u16 read_u16(const u8* at) {
    return (u16)(at[0] | at[1] << 8);
}

__device__ __forceinline__ u32 read_u32(const u8* at) {
    return (u32)read_u16(at) | (u32)read_u16(at + 2) << 16;
}

__device__ __forceinline__ float read_f16(const u8* at) {
    return f16_to_f32(read_u16(at));
}

// The sum over the lanes of a warp, in every lane. The order depends on nothing.
__device__ __forceinline__ float warp_sum(float value) {
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}

__device__ __forceinline__ int warp_sum(int value) {
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
    for (int step = WARP / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, step));
    return value;
}

// The sum over the threads of a block of whole warps, in every thread. `partial` has a place for each warp.
__device__ __forceinline__ float block_sum(float value, float* partial) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    value = warp_sum(value);
    __syncthreads();
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    return warp_sum(lane < warps ? partial[lane] : 0.0f);
}
