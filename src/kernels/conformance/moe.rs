//! Tests of mixtures of experts, against the reference backend and for batch invariance.

use super::Bounds;
use super::inputs::*;
use super::memo::ORACLE_VALUES;
use super::rig::*;
use mainstem_kernels::backend::{
    Activation, Backend, DeviceError, Expert, ExpertBiases, ExpertGroups, ExpertSource, Experts, GroupScore,
    MoeShape, Scoring, StepLimits, Weight,
};
use mainstem_kernels::quant::{OperandFormat, QuantType};
use mainstem_kernels::reference::{Reference, route};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Tests mixtures with every scoring function, from one expert to many, with ties and NaN among the logits.
pub fn moe<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let (device, oracle) = &mut rigs(make, 32);
    for ty in few_types() {
        for mixture in MoeCase::all(ty) {
            let (want, magnitudes) =
                (mixture.oracle_result(oracle), mixture.magnitudes().oracle_result(oracle));
            // The last bit of a number may change its quant.
            let bound = match ty.operand_format(device.backend.activation_precision()) {
                OperandFormat::F32 | OperandFormat::Bf16Pair => 6.0 * (bounds.matmul)(ty),
                OperandFormat::Int8 | OperandFormat::Bf16 => 0.01,
            };
            assert_close(format_args!("{mixture:?}"), &mixture.run(device), &want, bound, |i| magnitudes[i]);
        }
    }
}

/// Tests that the result of a row depends neither on the other rows nor on their experts, even if the logits
/// of another one are not finite.
pub fn moe_batch_invariance<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let mut rig = Rig::new(make(), limits(32));
    for ty in few_types() {
        for mixture in MoeCase::all(ty) {
            let whole = mixture.run(&mut rig);
            for (first, rows) in [(0, 1), (1, 1), (0, 7), (MAX_ROWS - 17, 17), (40, 20)] {
                let got = MoeCase { first, rows, ..mixture }.run(&mut rig);
                let what = format_args!("{mixture:?}, rows {first}.. alone");
                let hidden = mixture.hidden;
                assert_same(what, &got, &whole[first * hidden..][..rows * hidden], bounds.batch_invariance);
            }
            for damage in [Damage::AllNan, Damage::OneInfinite] {
                let got = MoeCase { damage, rows: 7, ..mixture }.run(&mut rig);
                let what = format_args!("{mixture:?} with {damage:?}");
                for row in [0, 2, 3, 4, 5, 6] {
                    let of_row = row * mixture.hidden..(row + 1) * mixture.hidden;
                    assert_same(what, &got[of_row.clone()], &whole[of_row], bounds.batch_invariance);
                }
            }
        }
    }
}

/// Tests that mixtures can be prepared in any order: before the limits are set, a smaller one after a larger
/// one, and again for more rows.
pub fn moe_preparation<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let mixtures: Vec<MoeCase> = MoeCase::all(QuantType::F32).collect();
    let want: Vec<Vec<f32>> =
        mixtures.iter().map(|mixture| mixture.run(&mut Rig::new(make(), limits(32)))).collect();
    let mut backend = make();
    for mixture in &mixtures {
        backend.prepare_moe(&mixture.shape, mixture.hidden).expect("memory for a small mixture");
    }
    let few = StepLimits { rows: 1, logit_rows: 1, slots: 1, encoder_positions: 0, ..limits(32) };
    backend.prepare(&few).expect("memory for a small step");
    let mut rig = Rig::new(backend, limits(32));
    for (mixture, want) in mixtures.iter().zip(&want) {
        let experts = mixture.experts(&mut rig);
        assert_same(
            format_args!("{mixture:?}, prepared first"),
            &mixture.run_experts(&mut rig, &experts),
            want,
            bounds.batch_invariance,
        );
    }
}

/// Tests that a device with some of the experts returns their part of the sum, and zeros for rows that
/// selected none of them.
pub fn moe_expert_subsets<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let (device, oracle) = &mut rigs(make, 32);
    for mixture in MoeCase::all(QuantType::F32).filter(|mixture| mixture.shape.experts > 1) {
        let magnitudes = mixture.magnitudes().oracle_result(oracle);
        let (ours, theirs) = (mixture.experts(device), mixture.experts(oracle));
        device.backend.prepare_moe(&mixture.shape, mixture.hidden).expect("memory for a small mixture");
        let experts = mixture.shape.experts;
        for (first, end) in [(0, 1), (1, experts), (experts / 2, experts / 2 + 1), (experts - 1, experts)] {
            let part = MoeCase { shape: MoeShape { first_expert: first, ..mixture.shape }, ..mixture };
            let (got, want) =
                (part.run_experts(device, &ours[first..end]), part.run_experts(oracle, &theirs[first..end]));
            let bound = 6.0 * (bounds.matmul)(mixture.ty);
            assert_close(format_args!("{part:?} up to {end}"), &got, &want, bound, |i| magnitudes[i]);
        }
    }
}

/// Tests that a device takes experts from a source in ascending order, each that a row selected and no other,
/// and that an expert that cannot be read fails the operation.
pub fn moe_expert_source<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let device = &mut rigs(make, 32).0;
    for mixture in MoeCase::all(QuantType::F32) {
        let mixture = MoeCase { rows: mixture.rows.min(3), first: 4, ..mixture };
        let experts = mixture.experts(device);
        device.backend.prepare_moe(&mixture.shape, mixture.hidden).expect("memory for a small mixture");
        let want = mixture.run_experts(device, &experts);
        let empty = |w: &Weight<B::Buf>, buf| Weight { id: None, buf, ty: w.ty, n: w.n, k: w.k };
        let mut stand_in = |w| empty(w, device.backend.alloc(0).expect("nothing is allocated"));
        let stand_ins = experts.iter().map(|Expert { gate, up, down }| Expert {
            gate: stand_in(gate),
            up: up.as_ref().map(&mut stand_in),
            down: stand_in(down),
        });
        let held: Vec<_> = stand_ins.collect();
        let source = CheckedSource { experts, used: Mutex::default(), failing: AtomicU32::new(u32::MAX) };
        let given = || Experts { source: Some(&source), ..Experts::in_memory(&held) };
        let got = mixture.run_given(device, given()).expect("all experts can be read");
        assert_same(format_args!("{mixture:?}, from a source"), &got, &want, bounds.batch_invariance);
        let used = std::mem::take(&mut *source.used.lock().expect("no test has panicked"));
        let selected = selected_experts(&mixture);
        assert_eq!(used, selected, "{mixture:?}");
        source.failing.store(selected[selected.len() / 2], Ordering::Relaxed);
        assert!(mixture.run_given(device, given()).is_err(), "{mixture:?}");
        source.failing.store(u32::MAX, Ordering::Relaxed);
        let got = mixture.run_given(device, given()).expect("all experts can be read again");
        assert_same(format_args!("{mixture:?}, after an error"), &got, &want, bounds.batch_invariance);
    }
}

/// A source that notes the experts that are used, and fails at one of them.
struct CheckedSource<Buf> {
    experts: Vec<Expert<Buf>>,
    used: Mutex<Vec<u32>>,
    failing: AtomicU32,
}

impl<Buf: Send + Sync> ExpertSource<Buf> for CheckedSource<Buf> {
    fn for_each(
        &self,
        held: &[Expert<Buf>],
        chosen: &[u32],
        compute: &mut dyn FnMut(usize, &Expert<Buf>),
    ) -> Result<(), DeviceError> {
        assert_eq!(held.len(), self.experts.len());
        for index in chosen {
            if *index == self.failing.load(Ordering::Relaxed) {
                return Err(DeviceError::Fault("an expert cannot be read".into()));
            }
            self.used.lock().expect("no test has panicked").push(*index);
            compute(*index as usize, &self.experts[*index as usize]);
        }
        Ok(())
    }
}

/// Returns the experts that some row of a case selects, ascending.
fn selected_experts(mixture: &MoeCase) -> Vec<u32> {
    let (router, correction) = (mixture.router(), mixture.correction());
    let rows = router.chunks_exact(mixture.shape.experts);
    let routed = rows.flat_map(|logits| route(&mixture.shape, logits, correction.as_deref()));
    let mut selected: Vec<u32> = routed.map(|(expert, _)| expert as u32).collect();
    selected.sort_unstable();
    selected.dedup();
    selected
}

/// Rows of the largest step of these tests.
const MAX_ROWS: usize = 70;

/// A test case.
#[derive(Clone, Copy, Debug)]
struct MoeCase {
    shape: MoeShape,
    ty: QuantType,
    hidden: usize,
    has_up: bool,
    is_corrected: bool,
    is_biased: bool,
    /// First row of the inputs, and the number of rows.
    first: usize,
    rows: usize,
    /// Whether every weight and input is replaced by its absolute value.
    absolute: bool,
    /// Damage of the logits of row 1.
    damage: Damage,
}

/// Logits of a row that are not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Damage {
    None,
    AllNan,
    OneInfinite,
}

impl MoeCase {
    fn all(ty: QuantType) -> impl Iterator<Item = MoeCase> {
        let groups = |groups, top_groups, score| Some(ExpertGroups { groups, top_groups, score });
        let sizes = [
            (1, 1, 33, 50, None),
            (4, 2, 33, 17, None),
            (8, 3, 64, 50, groups(4, 2, GroupScore::TopTwo)),
            (5, 5, 7, 33, None),
            (40, 18, 33, 16, groups(5, 3, GroupScore::Max)),
            (34, 5, 33, 16, groups(2, 1, GroupScore::Max)),
        ];
        sizes.into_iter().enumerate().flat_map(move |(i, (experts, top_k, hidden, width, groups))| {
            let (hidden, width) = (round_to_blocks(ty, hidden), round_to_blocks(ty, width));
            let scorings = [Scoring::Softmax, Scoring::Sigmoid, Scoring::Nearby { tolerance: 0.4 }];
            let scorings =
                scorings.into_iter().enumerate().filter(move |(at, _)| *at < 2 || groups.is_none());
            scorings.map(move |(at, scoring)| {
                let case = 2 * i + at;
                let activation =
                    [Activation::Silu, Activation::SquaredRelu, Activation::Gelu, Activation::ClampedSwiglu]
                        [case % 4];
                let shape = MoeShape {
                    experts,
                    first_expert: 0,
                    top_k,
                    scoring,
                    groups,
                    normalize_scores: (case / 2).is_multiple_of(2),
                    scale: [1.0, 2.5][case % 2],
                    weighs_input: case % 5 == 2,
                    width,
                    activation,
                };
                let (has_up, is_corrected, is_biased) =
                    (case % 6 < 5, [1, 2, 5].contains(&i) && at < 2, !case.is_multiple_of(3));
                let (first, rows, absolute) = (0, MAX_ROWS, false);
                let damage = Damage::None;
                MoeCase { shape, ty, hidden, has_up, is_corrected, is_biased, first, rows, absolute, damage }
            })
        })
    }

    /// Returns the case of the absolute values, whose results are the sums of the magnitudes of the terms.
    /// The slope of an activation function is at most 1.2, so errors grow no more than that, except that
    /// squaring doubles them.
    fn magnitudes(&self) -> MoeCase {
        let activation = match self.shape.activation {
            Activation::SquaredRelu => Activation::SquaredRelu,
            _ => Activation::Relu,
        };
        MoeCase { absolute: true, shape: MoeShape { activation, ..self.shape }, ..*self }
    }

    fn values(&self, tag: u32, n: usize) -> Vec<f32> {
        let values = noise(tag, n);
        if self.absolute { values.iter().map(|v| v.abs()).collect() } else { values }
    }

    /// Returns router logits: spread, tied, with NaN, and far apart.
    fn router(&self) -> Vec<f32> {
        let experts = self.shape.experts;
        let mut logits = scaled(400, MAX_ROWS * experts, 3.0);
        for (row, logits) in logits.chunks_exact_mut(experts).enumerate() {
            match row % 5 {
                1 => logits.iter_mut().for_each(|logit| *logit = logit.round()),
                2 if experts > self.shape.top_k => logits[row % experts] = f32::NAN,
                3 => logits.iter_mut().for_each(|logit| *logit *= 8.0),
                4 => logits.fill(0.5),
                _ => {}
            }
        }
        match self.damage {
            Damage::None => {}
            Damage::AllNan => logits[experts..2 * experts].fill(f32::NAN),
            Damage::OneInfinite => logits[experts] = f32::INFINITY,
        }
        logits[self.first * experts..][..self.rows * experts].to_vec()
    }

    /// Returns a number for each expert that is added to its score.
    fn correction(&self) -> Option<Vec<f32>> {
        self.is_corrected.then(|| scaled(402, self.shape.experts, 0.3))
    }

    /// Returns the biases of so many experts from number `first` on.
    fn biases<B: Backend>(&self, rig: &mut Rig<B>, count: usize) -> Vec<ExpertBiases<B::Buf>> {
        let count = if self.is_biased { count } else { 0 };
        let mut bias = |tag: usize, n: usize| Some(rig.constant(&self.values(tag as u32, n)));
        let numbers = self.shape.first_expert..self.shape.first_expert + count;
        let biases = numbers.map(|expert| ExpertBiases {
            gate: bias(5000 + 10 * expert, self.shape.width),
            up: bias(5001 + 10 * expert, self.shape.width),
            down: bias(5002 + 10 * expert, self.hidden),
        });
        biases.collect()
    }

    fn experts<B: Backend>(&self, rig: &mut Rig<B>) -> Vec<Expert<B::Buf>> {
        let (hidden, width) = (self.hidden, self.shape.width);
        let mut weight = |tag: u32, n: usize, k: usize| rig.weight(self.ty, n, &self.values(tag, n * k));
        let experts = (0..self.shape.experts as u32).map(|expert| Expert {
            gate: weight(500 + 10 * expert, width, hidden),
            up: self.has_up.then(|| weight(501 + 10 * expert, width, hidden)),
            down: weight(502 + 10 * expert, hidden, width),
        });
        experts.collect()
    }

    fn run<B: Backend>(&self, rig: &mut Rig<B>) -> Vec<f32> {
        let experts = self.experts(rig);
        rig.backend.prepare_moe(&self.shape, self.hidden).expect("memory for a small mixture");
        self.run_experts(rig, &experts)
    }

    fn oracle_result(&self, oracle: &mut Rig<Reference>) -> Arc<Vec<f32>> {
        ORACLE_VALUES.get(oracle.memo_key(self), || self.run(oracle))
    }

    /// Runs the mixture with the given experts.
    fn run_experts<B: Backend>(&self, rig: &mut Rig<B>, experts: &[Expert<B::Buf>]) -> Vec<f32> {
        self.run_given(rig, Experts::in_memory(experts)).expect("all experts are in memory")
    }

    fn run_given<B: Backend>(
        &self,
        rig: &mut Rig<B>,
        experts: Experts<B::Buf>,
    ) -> Result<Vec<f32>, DeviceError> {
        let (rows, hidden) = (self.rows, self.hidden);
        rig.begin_rows(rows);
        let x = self.values(401, MAX_ROWS * hidden)[self.first * hidden..][..rows * hidden].to_vec();
        let (router, x, mut y) = (rig.input(&self.router()), rig.input(&x), rig.output(rows * hidden));
        let correction = self.correction().map(|correction| rig.constant(&correction));
        let biases = self.biases(rig, experts.held.len());
        let experts = Experts { biases: &biases, correction: correction.as_ref(), ..experts };
        rig.backend.moe(rows, &self.shape, &router, experts, &x, &mut y)?;
        Ok(rig.read(&y, rows * hidden, format_args!("{self:?}")))
    }
}
