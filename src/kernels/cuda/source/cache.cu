// The KV cache: runs, each the key or the value vector of a KV head at a position, in the format. K and V are each
// (pages, kv_heads, page_positions) runs. The last group of a run may be shorter than a block.

// Elements that a warp stores together.
#define STORED (BLOCK_ELEMENTS > WARP ? BLOCK_ELEMENTS : WARP)

// Kinds of a page table.
#define TABLE_SCRATCH 1u
#define TABLE_CROSS 2u

// Number of the run of a KV head at a position of a row's sequence. The runs of a KV head in a page are consecutive.
__device__ __forceinline__ u64 run_number(
    const Row& row, const u32* tables, int table_len, u32 kind, int page_positions, int kv_heads, int kv_head,
    u32 position
) {
    u32 at = position + (kind & TABLE_SCRATCH ? row.scratch_start : 0);
    u32 page = at / page_positions;
    // A null row uses page 0.
    if (!(kind & TABLE_SCRATCH)) page = row.flags & ROW_IS_NULL ? 0 : tables[(u64)row.slot * table_len + page];
    return ((u64)page * kv_heads + kv_head) * page_positions + at % page_positions;
}

// Bytes of a run of `width` elements.
__device__ __forceinline__ int run_bytes(int width) {
#if defined(FORMAT_Q8_0)
    int rest = width % BLOCK_ELEMENTS, bytes = rest ? 2 + rest : 0;
#elif defined(FORMAT_G4_B64)
    int rest = width % BLOCK_ELEMENTS, bytes = rest ? 4 + (rest + 1) / 2 : 0;
#else
    int bytes = 0;
#endif
    return width / BLOCK_ELEMENTS * BLOCK_BYTES + bytes;
}

// Clamps to `times` the range of F16; NaN becomes 0.
__device__ __forceinline__ float clamp_to_f16(float value, float times) {
    float largest = times * 65504.0f;
    return value != value ? 0.0f : fminf(fmaxf(value, -largest), largest);
}

__device__ __forceinline__ void write_u16(u8* to, u16 value) {
    to[0] = (u8)value;
    to[1] = (u8)(value >> 8);
}

// Writes up to STORED elements, by a warp: `left` elements are left in the run. A shorter group has the scale of its
// own elements, as copies of the last one fill it up.
__device__ __forceinline__ void write_group(const float* x, int left, u8* to) {
    int lane = threadIdx.x % WARP;
#if defined(FORMAT_Q8_0)
    float value = clamp_to_f16(x[min(lane, left - 1)], 127.0f);
    float scale = warp_max(fabsf(value)) / 127.0f;
    float quant = roundf(value * (scale == 0.0f ? 0.0f : 1.0f / scale));
    if (lane < left) to[2 + lane] = (u8)(quant != quant ? 0 : (int)fminf(fmaxf(quant, -128.0f), 127.0f));
    if (lane == 0) write_u16(to, f32_to_f16(scale));
#elif defined(FORMAT_G4_B64)
    // A lane has both elements of a byte.
    float first = clamp_to_f16(x[min(2 * lane, left - 1)], 1.0f);
    float second = clamp_to_f16(x[min(2 * lane + 1, left - 1)], 1.0f);
    float minimum = -warp_max(-fminf(first, second)), maximum = warp_max(fmaxf(first, second));
    float multiplier = fminf(15.0f / (maximum - minimum), 65504.0f);
    int high = (int)rintf(fminf(fmaxf((first - minimum) * multiplier, 0.0f), 15.0f));
    int low = (int)rintf(fminf(fmaxf((second - minimum) * multiplier, 0.0f), 15.0f));
    if (2 * lane < left) to[4 + lane] = (u8)(high << 4 | low);
    if (lane == 0) {
        write_u16(to, f32_to_f16(multiplier));
        write_u16(to + 2, f32_to_f16(minimum));
    }
#else
    if (lane >= left) return;
#if defined(FORMAT_F32)
    ((float*)to)[lane] = x[lane];
#elif defined(FORMAT_F16)
    ((u16*)to)[lane] = f32_to_f16(x[lane]);
#else
    ((u16*)to)[lane] = f32_to_bf16(x[lane]);
#endif
#endif
}

// Stores k (rows, kv_heads, k_dim) and v (rows, kv_heads, v_dim) at the positions of the rows: blocks (rows, K and V,
// or K alone).
extern "C" __global__ void store_kv(
    const Row* rows, int count, const u32* tables, int table_len, u32 kind, int page_positions, int kv_heads,
    int k_dim, int v_dim, const float* k, const float* v, u8* keys, u8* values
) {
    Row row = rows[blockIdx.x];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    if (row.flags & ROW_IS_NULL) {
        // Of the null rows at one place of page 0, the last one is stored.
        bool is_replaced = false;
        for (int other = blockIdx.x + 1 + lane; other < count; other += WARP) {
            is_replaced |= rows[other].flags & ROW_IS_NULL
                && rows[other].position % page_positions == row.position % page_positions;
        }
        if (__any_sync(ALL_LANES, is_replaced)) return;
    }
    int width = blockIdx.y ? v_dim : k_dim, bytes = run_bytes(width), groups = (width + STORED - 1) / STORED;
    const float* x = (blockIdx.y ? v : k) + (u64)blockIdx.x * kv_heads * width;
    u8* to = blockIdx.y ? values : keys;
    for (int at = warp; at < kv_heads * groups; at += warps) {
        int head = at / groups, first = at % groups * STORED;
        u64 run = run_number(row, tables, table_len, kind, page_positions, kv_heads, head, row.position);
        u8* group = to + run * bytes + first / BLOCK_ELEMENTS * BLOCK_BYTES;
        write_group(x + head * width + first, width - first, group);
    }
}

// Elements 4 * quad to 4 * quad + 3 of a run; zeros from element `width` on. The runs of a width that is a multiple of
// four are aligned to four elements, or to two bytes.
__device__ __forceinline__ float4 read_quad(const u8* run, int quad, int width) {
    if (width % 4 != 0) {
        int e = 4 * quad;
        float4 quad = make_float4(element(run, e), 0.0f, 0.0f, 0.0f);
        if (e + 1 < width) quad.y = element(run, e + 1);
        if (e + 2 < width) quad.z = element(run, e + 2);
        if (e + 3 < width) quad.w = element(run, e + 3);
        return quad;
    }
#if defined(FORMAT_F32)
    return ((const float4*)run)[quad];
#elif defined(FORMAT_F16)
    uint2 bits = ((const uint2*)run)[quad];
    return make_float4(f16_to_f32((u16)bits.x), f16_to_f32((u16)(bits.x >> 16)), f16_to_f32((u16)bits.y),
                       f16_to_f32((u16)(bits.y >> 16)));
#elif defined(FORMAT_BF16)
    uint2 bits = ((const uint2*)run)[quad];
    return make_float4(__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u),
                       __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xffff0000u));
#elif defined(FORMAT_Q8_0)
    const u16* block = (const u16*)(run + quad / 8 * BLOCK_BYTES);
    int low = block[1 + quad % 8 * 2], high = block[2 + quad % 8 * 2];
    float scale = f16_to_f32(block[0]);
    return make_float4((float)(signed char)low * scale, (float)(signed char)(low >> 8) * scale,
                       (float)(signed char)high * scale, (float)(signed char)(high >> 8) * scale);
#elif defined(FORMAT_G4_B64)
    const u16* block = (const u16*)(run + quad / 16 * BLOCK_BYTES);
    int quants = block[2 + quad % 16];
    float step = 1.0f / f16_to_f32(block[0]), minimum = f16_to_f32(block[1]);
    return make_float4(fmaf((float)(quants >> 4 & 15), step, minimum), fmaf((float)(quants & 15), step, minimum),
                       fmaf((float)(quants >> 12), step, minimum), fmaf((float)(quants >> 8 & 15), step, minimum));
#endif
}
