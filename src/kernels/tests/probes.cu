// One instruction each, on numbers of one warp: in has 256 words, and each lane writes its results to out (32, 4).
// What the GPU gives is compared with what the emulator gave, so that a misread manual is noticed.

typedef unsigned int u32;
typedef unsigned long long u64;

#define LANE threadIdx.x
#define PROBE(name) extern "C" __global__ void name(const u32* in, u32* out)
#define WORD(i) in[LANE * 8 + (i)]
// A number of moderate size, and one of any size.
#define NUMBER(i) ((float)(int)WORD(i) * 0x1p-28f)
#define ANY_NUMBER(i) __uint_as_float(WORD(i))
#define PUT(i, bits) out[LANE * 4 + (i)] = (bits)
// NaN has one form here, as its bits differ between instructions.
#define PUT_F32(i, value) PUT(i, (value) != (value) ? 0x7fffffffu : __float_as_uint(value))

PROBE(fused_multiply_add) {
    PUT_F32(0, fmaf(NUMBER(0), NUMBER(1), NUMBER(2)));
    PUT_F32(1, fmaf(ANY_NUMBER(0), ANY_NUMBER(1), ANY_NUMBER(2)));
    PUT_F32(2, NUMBER(0) * NUMBER(1) + NUMBER(2));
    PUT_F32(3, ANY_NUMBER(3) * 0x1p-120f * 0x1p-20f);
}

PROBE(division_and_root) {
    PUT_F32(0, NUMBER(0) / NUMBER(1));
    PUT_F32(1, ANY_NUMBER(2) / ANY_NUMBER(3));
    PUT_F32(2, sqrtf(fabsf(NUMBER(4))));
    PUT_F32(3, sqrtf(fabsf(ANY_NUMBER(5))));
}

PROBE(f16_conversion) {
    unsigned short bits;
    float back;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(NUMBER(0) * 0x1p-16f));
    asm("cvt.f32.f16 %0, %1;" : "=f"(back) : "h"(bits));
    PUT(0, bits);
    PUT_F32(1, back);
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(NUMBER(1) * 0x1p12f));
    PUT(2, bits);
    asm("cvt.f32.f16 %0, %1;" : "=f"(back) : "h"((unsigned short)WORD(2)));
    PUT_F32(3, back);
}

PROBE(integer_dots) {
    int sum;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(WORD(0)), "r"(WORD(1)), "r"(WORD(2)));
    PUT(0, (u32)sum);
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(WORD(0)), "r"(WORD(1)), "r"(WORD(2)));
    PUT(1, (u32)sum);
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(WORD(3)), "r"(WORD(4)), "r"(WORD(5)));
    PUT(2, (u32)sum);
    PUT(3, __umulhi(WORD(6), WORD(7)));
}

// The last bits of these are the hardware's own.
PROBE(approximate_functions) {
    PUT_F32(0, expf(NUMBER(0)));
    PUT_F32(1, tanhf(NUMBER(1)));
    PUT_F32(2, erfcf(NUMBER(2) * 0.25f));
    PUT_F32(3, logf(fabsf(NUMBER(3)) + 0x1p-20f));
}

PROBE(exchanges) {
    PUT(0, __shfl_xor_sync(~0u, WORD(0), 5));
    PUT(1, __shfl_up_sync(~0u, WORD(1), 3));
    PUT(2, __shfl_down_sync(~0u, WORD(2), 7, 8));
    PUT(3, __shfl_sync(~0u, WORD(3), WORD(4) & 31));
}

PROBE(votes) {
    u32 sum;
    PUT(0, __ballot_sync(~0u, WORD(0) & 1));
    PUT(1, __match_any_sync(~0u, WORD(1) & 3));
    asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(WORD(2)));
    PUT(2, sum);
    PUT(3, __popc(WORD(3)) << 8 | __clz(WORD(4)));
}

PROBE(shared_atomics) {
    __shared__ u64 sums[4];
    __shared__ u32 most[4];
    if (LANE < 4) sums[LANE] = 0, most[LANE] = 0;
    __syncthreads();
    atomicAdd(&sums[WORD(0) & 3], (u64)WORD(1) << 16);
    atomicMax(&most[WORD(0) & 3], WORD(2));
    __syncthreads();
    PUT(0, (u32)sums[LANE & 3]);
    PUT(1, (u32)(sums[LANE & 3] >> 32));
    PUT(2, most[LANE & 3]);
    PUT(3, 0);
}

PROBE(double_precision) {
    double sum = (double)NUMBER(0) * (double)NUMBER(1) + (double)NUMBER(2);
    u64 bits = (u64)__double_as_longlong(sum), root = (u64)__double_as_longlong(sqrt(fabs(sum)));
    PUT(0, (u32)bits);
    PUT(1, (u32)(bits >> 32));
    PUT(2, (u32)root);
    PUT(3, (u32)(root >> 32));
}

// Sums of small integers are exact in any order: what is compared is the place of each element.
__device__ u32 small_f16(u32 word) {
    const u32 numbers[4] = {0x3c00, 0xbc00, 0x4000, 0x4200};
    return numbers[word & 3] | numbers[word >> 2 & 3] << 16;
}

PROBE(matrices_f16) {
    u32 a[4], b[2];
    float c[4] = {0, 1, 2, 3};
    for (int i = 0; i < 4; i++) a[i] = small_f16(WORD(i));
    for (int i = 0; i < 2; i++) b[i] = small_f16(WORD(4 + i));
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    for (int i = 0; i < 4; i++) PUT_F32(i, c[i]);
}

PROBE(matrices_int8) {
    int c[4] = {0, 1, 2, 3};
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(WORD(0)), "r"(WORD(1)), "r"(WORD(2)), "r"(WORD(3)), "r"(WORD(4)), "r"(WORD(5)));
    for (int i = 0; i < 4; i++) PUT(i, (u32)c[i]);
}

PROBE(matrix_loads) {
    __shared__ u32 tile[128];
    for (int i = 0; i < 4; i++) tile[LANE * 4 + i] = WORD(i);
    __syncthreads();
    u32 at = (u32)__cvta_generic_to_shared(tile + LANE * 4), r[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
    for (int i = 0; i < 4; i++) PUT(i, r[i]);
}

PROBE(asynchronous_copies) {
    __shared__ __align__(16) u32 tile[128];
    u32 at = (u32)__cvta_generic_to_shared(tile + LANE * 4);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(in + LANE * 8));
    asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.wait_group 0;");
    __syncthreads();
    for (int i = 0; i < 4; i++) PUT(i, tile[(LANE * 4 + 37 * i) % 128]);
}
