// Mixtures of experts: the choice of experts, and the rows of an expert.

__device__ __forceinline__ float nan_to_lowest(float value) {
    return value != value ? -INFINITY_F32 : value;
}

// Replaces the numbers of experts that are not in the top_groups groups with the largest scores, ties by number, by
// NaN. The score of a group is its largest number, or the sum of the two largest ones. scores (groups) is scratch.
__device__ void exclude_groups(int experts, int groups, int top_groups, int sums, float* numbers, float* scores) {
    int lane = threadIdx.x, size = experts / groups;
    for (int group = lane; group < groups; group += WARP) {
        float first = -INFINITY_F32, second = -INFINITY_F32;
        for (int i = group * size; i < (group + 1) * size; i++) {
            float number = numbers[i];
            if (number > first) {
                second = first;
                first = number;
            } else if (number > second) {
                second = number;
            }
        }
        scores[group] = sums && size > 1 ? first + second : first;
    }
    __syncwarp();
    for (int i = lane; i < experts; i += WARP) {
        int group = i / size, rank = 0;
        for (int other = 0; other < groups; other++) {
            rank += scores[other] > scores[group] || (scores[other] == scores[group] && other < group);
        }
        if (rank >= top_groups) numbers[i] = NAN_F32;
    }
}

// The softmax at an expert's logit over those that are not chosen before it and are near it.
__device__ float nearby_score(int experts, float tolerance, const float* logits, int expert) {
    float own = nan_to_lowest(logits[expert]), sum = 0.0f;
    if (own == -INFINITY_F32) return 0.0f;
    for (int other = 0; other < experts; other++) {
        float logit = nan_to_lowest(logits[other]);
        bool is_before = logit > own || (logit == own && other < expert);
        bool is_far = (own - logit) / fmaxf(fabsf(logit), own) > tolerance;
        if (!is_before && !is_far) sum += expf(logit - own);
    }
    return 1.0f / sum;
}

// Chooses the experts with the top_k largest numbers of each row, ties by number of the expert, in descending order:
// chosen (rows, top_k), with their scores. The numbers are the logits, or the scores plus the correction, and are kept
// in numbers (rows, experts + groups). Of several groups, experts of the top_groups best are chosen. A warp for a row.
extern "C" __global__ void route(
    int experts, int top_k, int groups, int top_groups, int sums, int scoring, float tolerance, int by_score,
    int is_normalized, float factor, const float* logits, const float* correction, float* numbers, u32* chosen,
    float* scores
) {
    int lane = threadIdx.x;
    logits += (u64)blockIdx.x * experts;
    numbers += (u64)blockIdx.x * (experts + groups);
    chosen += (u64)blockIdx.x * top_k;
    scores += (u64)blockIdx.x * top_k;
    bool is_sigmoid = scoring == 1, is_nearby = scoring == 2;
    float largest = -INFINITY_F32, sum = 0.0f;
    if (scoring == 0) {
        for (int i = lane; i < experts; i += WARP) largest = fmaxf(largest, nan_to_lowest(logits[i]));
        largest = warp_max(largest);
        for (int i = lane; i < experts; i += WARP) sum += expf(nan_to_lowest(logits[i]) - largest);
        sum = warp_sum(sum);
    }
    for (int i = lane; i < experts; i += WARP) {
        float logit = nan_to_lowest(logits[i]);
        float number = logit;
        if (by_score) {
            number = nan_to_lowest(is_sigmoid ? sigmoid(logit) : expf(logit - largest) / sum);
            if (correction) number += correction[i];
        }
        numbers[i] = number;
    }
    __syncwarp();
    if (groups) exclude_groups(experts, groups, top_groups, sums, numbers, numbers + experts);
    __syncwarp();
    for (int i = lane; i < experts; i += WARP) {
        float own = numbers[i];
        int rank = 0;
        for (int other = 0; other < experts; other++) {
            rank += numbers[other] > own || (numbers[other] == own && other < i);
        }
        if (own != own || rank >= top_k) continue;
        float logit = nan_to_lowest(logits[i]);
        chosen[rank] = i;
        if (is_nearby) {
            scores[rank] = nearby_score(experts, tolerance, logits, i);
        } else {
            scores[rank] = is_sigmoid ? sigmoid(logit) : expf(logit - largest) / sum;
        }
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
// With scores, each row is multiplied by its own.
extern "C" __global__ void gather_choices(
    u64 n, int width, int top_k, const u32* choices, const float* scores, const float* x, float* y
) {
    u64 i = GLOBAL_INDEX;
    if (i >= n) return;
    u32 choice = choices[i / width];
    float value = x[(u64)(choice / top_k) * width + i % width];
    y[i] = scores ? scores[choice] * value : value;
}

// y += results of an expert x (n / width, width), in the rows of its choices. With scores, each is multiplied by its
// own.
extern "C" __global__ void add_choices(
    u64 n, int width, int top_k, const u32* choices, const float* scores, const float* x, float* y
) {
    u64 i = GLOBAL_INDEX;
    if (i >= n) return;
    u32 choice = choices[i / width];
    float* to = y + (u64)(choice / top_k) * width + i % width;
    *to = fmaf(scores ? scores[choice] : 1.0f, x[i], *to);
}
