// Operations on matrices (n, k) of the format, which lie row by row in blocks.

// x (rows, width) = the rows of a table of `count` tokens, from token `first` on; zeros for other tokens.
extern "C" __global__ void embed(
    const Row* rows, u32 first, u32 count, int width, const u8* table, float* x
) {
    u32 token = rows[blockIdx.x].token - first;
    const u8* from = table + (u64)token * (width / BLOCK_ELEMENTS) * BLOCK_BYTES;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        x[(u64)blockIdx.x * width + i] = token < count ? element(from, i) : 0.0f;
    }
}

// x (rows, width) += the rows of a table for the position of each row plus `offset`
extern "C" __global__ void embed_positions(
    const Row* rows, u32 offset, u32 type_rows, int width, const u8* table, float* x) {
    Row row = rows[blockIdx.x];
    u32 position = row.position + offset + (row.flags >> ROW_TYPE_SHIFT) * type_rows;
    const u8* from = table + (u64)position * (width / BLOCK_ELEMENTS) * BLOCK_BYTES;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        u64 at = (u64)blockIdx.x * width + i;
        x[at] = x[at] + element(from, i);
    }
}
