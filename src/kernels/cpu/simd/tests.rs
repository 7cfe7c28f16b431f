use super::*;

fn levels() -> Vec<Level> {
    let isas = [Isa::Avx512, Isa::Avx512F, Isa::Avx2, Isa::Portable];
    let found = isas.map(|isa| (isa, Level::new(isa))).into_iter().filter_map(|(isa, level)| {
        level.inspect_err(|error| eprintln!("skipped: {}: {error}", isa.name())).ok()
    });
    found.collect()
}

/// Levels with fused multiply-add: these must agree to the bit.
fn fused_levels() -> Vec<Level> {
    levels().into_iter().filter(|level| level.isa() != Isa::Portable).collect()
}

/// Returns numbers of all magnitudes, from a fixed generator.
fn numbers<const N: usize>(seed: u64) -> [f32; N] {
    std::array::from_fn(|i| {
        let [mantissa, exponent, sign, _] =
            crate::random::philox([i as u32, 0, 0, 0], [seed as u32, (seed >> 32) as u32]);
        let value = (1.0 + mantissa as f32 / u32::MAX as f32) * 2f32.powi((exponent % 20) as i32 - 10);
        if sign % 2 == 0 { value } else { -value }
    })
}

/// Defines a function that applies a kernel function to each element.
macro_rules! of_all {
    ($name:ident, $function:ident) => {
        fn $name(level: Level, x: &[f32]) -> Vec<f32> {
            struct All<'a>(&'a mut [f32]);
            impl Kernel for All<'_> {
                type Out = ();

                #[inline(always)]
                fn run<S: Simd>(self, simd: S) {
                    for x in self.0.as_chunks_mut::<LANES>().0 {
                        simd.store($function(simd, simd.load(x)), x);
                    }
                }
            }
            let mut y = x.to_vec();
            y.resize(x.len().next_multiple_of(LANES), 0.0);
            level.run(All(&mut y));
            y.truncate(x.len());
            y
        }
    };
}
of_all!(exps, exp);
of_all!(sigmoids, sigmoid);
of_all!(tanhs, tanh);
of_all!(tails, normal_tail);

/// Asserts that each result is within so many units in its last place of the exact one.
fn assert_within(units: impl Fn(f64) -> f64, x: &[f32], got: Vec<f32>, exact: impl Fn(f64) -> f64) {
    for (x, y) in x.iter().zip(got) {
        let exact = exact(f64::from(*x));
        let unit = f64::from(f32::EPSILON) * exact.abs().max(f64::from(f32::MIN_POSITIVE));
        let allowed = units(f64::from(*x)) * unit;
        assert!((f64::from(y) - exact).abs() <= allowed, "at {x}: {y:e}, not {exact:e}");
    }
}

#[test]
fn exp_is_within_two_units_in_the_last_place() {
    let x: Vec<f32> = (-105_000..90_000).map(|i| i as f32 * 1e-3 + 3e-7).collect();
    for level in levels() {
        for (x, y) in x.iter().zip(exps(level, &x)) {
            let exact = f64::from(*x).exp();
            let unit = f64::from(f32::EPSILON) * exact.max(f64::from(f32::MIN_POSITIVE));
            if exact > f64::from(f32::MAX) {
                assert_eq!(y, f32::INFINITY, "exp({x})");
            } else {
                assert!((f64::from(y) - exact).abs() <= 2.0 * unit, "exp({x}) = {y:e}, not {exact:e}");
            }
        }
    }
}

#[test]
fn tanh_and_sigmoid_are_within_four_units_in_the_last_place() {
    let x: Vec<f32> = (-60_000..60_000).map(|i| i as f32 * 3e-4 + 1e-7).collect();
    let tiny: Vec<f32> = (-40..40).map(|i| (i as f32 * 0.5).exp2() * 1e-6).collect();
    for level in levels() {
        for x in [&x, &tiny] {
            assert_within(|_| 4.0, x, tanhs(level, x), f64::tanh);
            assert_within(|_| 4.0, x, sigmoids(level, x), |x| 1.0 / (1.0 + (-x).exp()));
        }
    }
}

#[test]
fn the_normal_tail_is_as_exact_as_its_exponent() {
    let x: Vec<f32> = (0..145_000).map(|i| i as f32 * 1e-4).collect();
    for level in levels() {
        let exact = |x: f64| 0.5 * crate::reference::erfc(x * std::f64::consts::FRAC_1_SQRT_2);
        assert_within(|x| 4.0 + x * x / 2.0, &x, tails(level, &x), exact);
        assert!(tails(level, &[f32::NAN])[0].is_nan());
        assert_eq!(tails(level, &[16.0, 0.0]), [0.0, 0.5]);
    }
}

#[test]
fn tanh_has_its_special_values() {
    for level in levels() {
        let y = tanhs(level, &[0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, 20.0, -1e30, f32::NAN]);
        assert_eq!(y[..6], [0.0, 0.0, 1.0, -1.0, 1.0, -1.0]);
        assert!(y[6].is_nan());
    }
}

#[test]
fn exp_has_its_special_values() {
    let x = [0.0, -0.0, f32::NEG_INFINITY, f32::INFINITY, f32::NAN, f32::MIN, f32::MAX, -104.5, 88.75];
    for level in levels() {
        let y = exps(level, &x);
        assert_eq!(y[..4], [1.0, 1.0, 0.0, f32::INFINITY]);
        assert!(y[4].is_nan());
        assert_eq!(y[5..], [0.0, f32::INFINITY, 0.0, f32::INFINITY]);
    }
}

/// Kernel that returns the results of every operation, one after another.
struct Everything([[f32; LANES]; 3]);

impl Kernel for Everything {
    type Out = Vec<u32>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Vec<u32> {
        let [a, b, c] = self.0.map(|x| simd.load(&x));
        let codes = self.0[0].map(|x| half::f16::from_f32(x).to_bits());
        let mut vectors = vec![
            simd.add(a, b),
            simd.sub(a, b),
            simd.mul(a, b),
            simd.div(a, b),
            simd.mul_add(a, b, c),
            simd.min(a, b),
            simd.max(a, b),
            exp(simd, a),
            tanh(simd, a),
            sigmoid(simd, a),
            normal_tail(simd, simd.max(a, b)),
            simd.where_less(a, b, c, a),
            simd.load_f16(&codes),
            simd.load_bf16(&codes),
            load_partial::<S, F32>(simd, &self.0[0][..5]),
        ];
        for n in 0..=LANES {
            vectors.push(simd.select_first(n, a, b));
        }
        let mut bits = vec![simd.sum(a).to_bits(), simd.largest(a).to_bits()];
        bits.extend(simd.sum4([a, b, c, a]).map(f32::to_bits));
        for v in vectors {
            let mut lanes = [0.0; LANES];
            simd.store(v, &mut lanes);
            bits.extend(lanes.map(f32::to_bits));
        }
        bits
    }
}

#[test]
fn fused_levels_agree_to_the_bit() {
    for seed in 0..200 {
        let operands = [numbers(3 * seed), numbers(3 * seed + 1), numbers(3 * seed + 2)];
        let results: Vec<_> = fused_levels().iter().map(|level| level.run(Everything(operands))).collect();
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{operands:?}");
    }
}

#[test]
fn sums_follow_their_tree_and_lanes_are_chosen() {
    struct Sums([f32; LANES]);
    impl Kernel for Sums {
        type Out = (f32, [f32; 4], [f32; LANES], [f32; LANES]);
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Self::Out {
            let v = simd.load(&self.0);
            let mut first = [0.0; LANES];
            simd.store(simd.select_first(5, v, simd.splat(7.0)), &mut first);
            let (one, two, mut less) = (simd.splat(1.0), simd.splat(2.0), [0.0; LANES]);
            simd.store(simd.where_less(v, one, one, two), &mut less);
            (simd.sum(v), simd.sum4([v, one, two, v]), first, less)
        }
    }
    for seed in 0..50 {
        let x: [f32; LANES] = numbers(seed);
        let mut tree = x;
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                tree[i] += tree[i + half];
            }
        }
        for level in levels() {
            let (sum, sum4, first, less) = level.run(Sums(x));
            assert_eq!(sum.to_bits(), tree[0].to_bits());
            assert_eq!(sum4, [sum, 16.0, 32.0, sum]);
            assert_eq!((&first[..5], &first[5..]), (&x[..5], &[7.0; 11][..]));
            assert_eq!(less, x.map(|x| if x < 1.0 { 1.0 } else { 2.0 }));
        }
    }
}

#[test]
fn half_precision_codes_have_the_values_of_their_format() {
    struct Widen([u16; LANES]);
    impl Kernel for Widen {
        type Out = [[f32; LANES]; 2];
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Self::Out {
            let mut values = [[0.0; LANES]; 2];
            simd.store(simd.load_f16(&self.0), &mut values[0]);
            simd.store(simd.load_bf16(&self.0), &mut values[1]);
            values
        }
    }
    let is_same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    for level in levels() {
        for first in (0..=u16::MAX).step_by(LANES) {
            let codes: [u16; LANES] = std::array::from_fn(|i| first + i as u16);
            let [f16s, bf16s] = level.run(Widen(codes));
            for (i, code) in codes.into_iter().enumerate() {
                assert!(is_same(f16s[i], half::f16::from_bits(code).to_f32()), "F16 {code:#x}");
                assert!(is_same(bf16s[i], half::bf16::from_bits(code).to_f32()), "BF16 {code:#x}");
            }
        }
    }
}

#[test]
fn bytes_and_half_bytes_are_widened_exactly() {
    struct Widen([u8; LANES]);
    impl Kernel for Widen {
        type Out = [[f32; LANES]; 3];
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Self::Out {
            let mut values = [[0.0; LANES]; 3];
            let [low, high] = simd.load_nibbles(&self.0);
            simd.store(low, &mut values[0]);
            simd.store(high, &mut values[1]);
            simd.store(simd.load_i8(&self.0.map(|x| x as i8)), &mut values[2]);
            values
        }
    }
    for level in levels() {
        for first in (0..=u8::MAX).step_by(LANES) {
            let bytes: [u8; LANES] = std::array::from_fn(|i| first + i as u8);
            let [low, high, signed] = level.run(Widen(bytes));
            for (i, byte) in bytes.into_iter().enumerate() {
                let whole = low[i] + 16.0 * high[i];
                assert_eq!((whole, low[i] < 16.0), (f32::from(byte), true), "{byte} on {:?}", level.isa());
                assert_eq!(signed[i], f32::from(byte as i8), "{:?}", level.isa());
            }
        }
    }
}

/// Kernel that returns the results of the integer operations for every byte.
struct IntOperations;

impl IntKernel for IntOperations {
    type Out = Vec<f32>;

    #[inline(always)]
    fn run<S: Ints>(self, simd: S) -> Vec<f32> {
        let mut all = Vec::new();
        for first in (0..=255u8).step_by(64) {
            let bytes: [u8; BYTES] = std::array::from_fn(|i| first + i as u8);
            for x in [[127i8, 127, 127, 127], [-127, -127, -127, -127], [1, -2, 64, -128], [0, 99, -99, 3]] {
                let x = x.map(|x| x as u8);
                // SAFETY: both arrays are as long as what is read.
                let (w, x) = unsafe { (simd.load_bytes(bytes.as_ptr()), simd.broadcast_word(x.as_ptr())) };
                let [rest, divided] = simd.div_rem_11(simd.bits(w, 0, 7));
                let joined = simd.or_shifted(rest, simd.bits(w, 7, 1), 4);
                let tops = simd.bits(simd.gather_top_bits([w, joined, rest, w, divided, joined, w]), 0, 7);
                let tops_of_others =
                    simd.bits(simd.gather_top_bits([rest, rest, w, joined, w, w, divided]), 0, 7);
                for quants in [w, rest, divided, simd.bits(w, 4, 4), joined, tops, tops_of_others] {
                    let mut sums = [0.0; LANES];
                    simd.store(simd.to_float(simd.dot(simd.shift_left(x, 1), quants, x)), &mut sums);
                    all.extend(sums);
                }
            }
        }
        all
    }
}

#[test]
fn whole_numbers_are_the_same_on_every_instruction_set() {
    let expected = IntOperations.run(portable::Portable);
    for level in levels() {
        assert!(level.run_ints(IntOperations) == expected, "{:?}", level.isa());
    }
}
