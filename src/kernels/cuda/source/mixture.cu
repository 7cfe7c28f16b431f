// Mixtures of experts: the choice of experts, and the rows of an expert.

__device__ __forceinline__ float nan_to_lowest(float value) {
    return value != value ? -INFINITY_F32 : value;
}

// Chooses the experts with the top_k largest logits of each row, ties by number, in descending order: chosen (rows,
// top_k), with their scores. A warp for each row.
extern "C" __global__ void route(
    int experts, int top_k, int is_sigmoid, int is_normalized, float factor, const float* logits, u32* chosen,
    float* scores
) {
    int lane = threadIdx.x;
    logits += (u64)blockIdx.x * experts;
    chosen += (u64)blockIdx.x * top_k;
    scores += (u64)blockIdx.x * top_k;
    float largest = -INFINITY_F32, sum = 0.0f;
    if (!is_sigmoid) {
        for (int i = lane; i < experts; i += WARP) largest = fmaxf(largest, nan_to_lowest(logits[i]));
        largest = warp_max(largest);
        for (int i = lane; i < experts; i += WARP) sum += expf(nan_to_lowest(logits[i]) - largest);
        sum = warp_sum(sum);
    }
    for (int i = lane; i < experts; i += WARP) {
        float own = nan_to_lowest(logits[i]);
        int rank = 0;
        for (int other = 0; other < experts; other++) {
            float logit = nan_to_lowest(logits[other]);
            rank += logit > own || (logit == own && other < i);
        }
        if (rank >= top_k) continue;
        chosen[rank] = i;
        scores[rank] = is_sigmoid ? sigmoid(own) : expf(own - largest) / sum;
    }
    __syncwarp();
    float total = 1.0f;
    if (is_normalized) {
        total = 0.0f;
        for (int i = lane; i < top_k; i += WARP) total += scores[i];
        total = warp_sum(total);
    }
    for (int i = lane; i < top_k; i += WARP) scores[i] = scores[i] / total * factor;
}

extern "C" __global__ void clear(u64 n, float* x) {
    u64 i = GLOBAL_INDEX;
    if (i < n) x[i] = 0.0f;
}

// y (n / width, width) = the rows of x of an expert: those with the choices `choices`, numbered row * top_k + rank.
extern "C" __global__ void gather_choices(
    u64 n, int width, int top_k, const u32* choices, const float* x, float* y
) {
    u64 i = GLOBAL_INDEX;
    if (i < n) y[i] = x[(u64)(choices[i / width] / top_k) * width + i % width];
}

// y += results of an expert x (n / width, width), each multiplied by its score, in the rows of its choices.
extern "C" __global__ void add_choices(
    u64 n, int width, int top_k, const u32* choices, const float* scores, const float* x, float* y
) {
    u64 i = GLOBAL_INDEX;
    if (i >= n) return;
    u32 choice = choices[i / width];
    float* to = y + (u64)(choice / top_k) * width + i % width;
    *to = fmaf(scores[choice], x[i], *to);
}
