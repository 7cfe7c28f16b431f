// Operations on rows of numbers, and the page tables of the slots.

#define GLOBAL_INDEX ((u64)blockIdx.x * blockDim.x + threadIdx.x)

// x += factor * y
extern "C" __global__ void add(u64 n, float factor, float* x, const float* y) {
    u64 i = GLOBAL_INDEX;
    if (i < n) x[i] = x[i] + factor * y[i];
}

extern "C" __global__ void scale(u64 n, float factor, float* x) {
    u64 i = GLOBAL_INDEX;
    if (i < n) x[i] = x[i] * factor;
}

extern "C" __global__ void softcap(u64 n, float cap, float* x) {
    u64 i = GLOBAL_INDEX;
    if (i < n) x[i] = cap * tanhf(x[i] / cap);
}

extern "C" __global__ void clamp(u64 n, float bound, float* x) {
    u64 i = GLOBAL_INDEX;
    // NaN stays NaN.
    if (i < n) x[i] = x[i] > bound ? bound : x[i] < -bound ? -bound : x[i];
}

__device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

// x (rows, width) *= sigmoid(gate (rows))
extern "C" __global__ void gate_rows(u64 n, int width, const float* gate, float* x) {
    u64 i = GLOBAL_INDEX;
    if (i < n) x[i] = x[i] * sigmoid(gate[i / width]);
}

// The numbers of an activation.
struct Xielu {
    float positive, negative, linear, bound;
};

__device__ __forceinline__ float xielu(Xielu numbers, float x) {
    if (x > 0.0f) return (numbers.positive * x + numbers.linear) * x;
    float bounded = x > numbers.bound ? numbers.bound : x;
    float excess = expm1f(bounded) - bounded + (bounded - x);
    return numbers.negative * excess + numbers.linear * x;
}

__device__ __forceinline__ float activation(int act, Xielu numbers, float x) {
    switch (act) {
    case 0: return x > 0.0f ? x : (x != x ? x : 0.0f);
    case 1: return x > 0.0f ? x * x : (x != x ? x : 0.0f);
    case 2: return 0.5f * x * erfcf(-x * 0.70710678118654752f);
    // 2 sqrt(2 / pi)
    case 3: return x * sigmoid(1.5957691216057308f * (x + 0.044715f * (x * x * x)));
    case 4: return x * sigmoid(1.702f * x);
    case 5: return x * sigmoid(x);
    case 6: return tanhf(x);
    case 8: return xielu(numbers, x);
    default:
        x = x > 7.0f ? 7.0f : x;
        return x * sigmoid(1.702f * x);
    }
}

// The factor of an activated number.
__device__ __forceinline__ float activation_factor(int act, float up) {
    if (act != 7) return up;
    return 1.0f + (up > 7.0f ? 7.0f : (up < -7.0f ? -7.0f : up));
}

// gate = act(gate) * up; without `up`, gate = act(gate)
extern "C" __global__ void activate(
    u64 n, int act, float positive, float negative, float linear, float bound, float* gate, const float* up
) {
    u64 i = GLOBAL_INDEX;
    if (i >= n) return;
    float activated = activation(act, {positive, negative, linear, bound}, gate[i]);
    gate[i] = up ? activated * activation_factor(act, up[i]) : activated;
}

// y (rows, width) = norm(x), a block for each row; weight and bias (sets, width), a row of which is for every
// `sets`-th row of x
extern "C" __global__ void normalize(
    int width, int sets, float eps, int is_layer_norm, const float* weight, const float* bias, const float* x,
    float* y
) {
    __shared__ float partial[WARP];
    x += (u64)blockIdx.x * width;
    y += (u64)blockIdx.x * width;
    int first = blockIdx.x % sets * width;
    float mean = 0.0f;
    if (is_layer_norm) {
        float sum = 0.0f;
        for (int i = threadIdx.x; i < width; i += blockDim.x) sum += x[i];
        mean = block_sum(sum, partial) / width;
    }
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float centered = x[i] - mean;
        sum = fmaf(centered, centered, sum);
    }
    float deviation = sqrtf(block_sum(sum, partial) / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float value = (x[i] - mean) / deviation;
        if (weight) value = value * weight[first + i];
        if (bias) value = value + bias[first + i];
        y[i] = value;
    }
}

// angles (rows, dims) = the row of the table for the position of each row, for those whose reserved length is in
// least..=most
extern "C" __global__ void rope_angles(
    const Row* rows, int dims, u32 least, u32 most, const float* table, float* angles
) {
    Row row = rows[blockIdx.x];
    if (row.reserved < least || row.reserved > most) return;
    for (int i = threadIdx.x; i < dims; i += blockDim.x) {
        angles[(u64)blockIdx.x * dims + i] = table[(u64)row.position * dims + i];
    }
}

// Rotates the first `dims` dimensions of each head of x (rows, heads, head_dim); a block for each row.
extern "C" __global__ void rope(
    int heads, int head_dim, int dims, int adjacent, const float* angles, float* x
) {
    int half = dims / 2;
    x += (u64)blockIdx.x * heads * head_dim;
    angles += (u64)blockIdx.x * dims;
    for (int at = threadIdx.x; at < heads * half; at += blockDim.x) {
        int pair = at % half;
        float* head = x + (u64)(at / half) * head_dim;
        int first = adjacent ? 2 * pair : pair, second = adjacent ? 2 * pair + 1 : pair + half;
        float cosine = angles[2 * pair], sine = angles[2 * pair + 1];
        float u = head[first], v = head[second];
        head[first] = u * cosine - v * sine;
        head[second] = u * sine + v * cosine;
    }
}

// columns of y (rows * copies, of) from `to` on = columns of x (rows, width) from `first` on
extern "C" __global__ void copy_columns(
    u64 n, int copies, int width, int first, int columns, int of, int to, const float* x, float* y
) {
    u64 i = GLOBAL_INDEX, row = i / columns;
    if (i < n) y[row * of + to + i % columns] = x[row / copies * width + first + i % columns];
}

// y (n / width, width) = the rows of x with the numbers `rows`
extern "C" __global__ void gather_rows(u64 n, int width, const u32* rows, const float* x, float* y) {
    u64 i = GLOBAL_INDEX;
    if (i < n) y[i] = x[(u64)rows[i / width] * width + i % width];
}

// Gives the rows that take it the last token of their slot.
extern "C" __global__ void take_last_tokens(u64 n, const u32* last_tokens, Row* rows) {
    u64 i = GLOBAL_INDEX;
    if (i < n && rows[i].flags & ROW_TAKES_LAST) rows[i].token = last_tokens[rows[i].slot];
}

// Copies page tables (slots, length) of slots to other slots: pairs of slots, from and to, which do not overlap.
extern "C" __global__ void move_tables(int count, const u32* moves, int length, u32* tables) {
    for (int at = threadIdx.x; at < count * length; at += blockDim.x) {
        const u32* move = moves + 2 * (at / length);
        tables[move[1] * length + at % length] = tables[move[0] * length + at % length];
    }
}

// Writes entries of a page table, pairs of index and page, in order: one thread, as an entry may change twice.
extern "C" __global__ void write_entries(int count, const u32* updates, u32* tables) {
    for (int i = 0; i < count; i++) tables[updates[2 * i]] = updates[2 * i + 1];
}
