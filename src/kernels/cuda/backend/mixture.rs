//! Mixtures of experts.
//!
//! The GPU chooses the experts of each row. The host groups these choices by expert, and the experts run one
//! after another, each for all of its rows.
//!
//! Invariant: results of experts are added in the order of experts.

use super::CudaBackend;
use super::launch::{Device, THREADS, blocks_for, f32_bytes};
use super::products::Products;
use super::program::KernelName;
use super::row_ops;
use super::scratch::Scratch;
use crate::backend::{
    DeviceError, Epilogue, Expert, Experts, Gemm, GroupScore, HeldShapes, MoeShape, Scoring, StepLimits,
    Weight,
};
use crate::cuda::{Arguments, CudaBuf};
use std::ops::Range;

/// Number of scratch buffers: choices and their scores (rows, top_k), inputs and results of an expert (rows,
/// hidden), what is between (rows, width), for the gate and for `up`, and the numbers by which experts and
/// groups are chosen (rows, experts + groups).
pub(super) const BUFFERS: usize = 7;

/// Bytes of the number of an expert or of a choice.
const NUMBER_BYTES: usize = size_of::<u32>();

/// Returns the bytes of the scratch buffers.
pub(super) fn scratch_bytes(limits: &StepLimits, shapes: &HeldShapes) -> [usize; BUFFERS] {
    let rows = limits.rows_at_once();
    let largest = |width: fn(&(MoeShape, usize)) -> usize| {
        f32_bytes(rows * shapes.mixtures.iter().map(width).max().unwrap_or(0))
    };
    let choices = largest(|(shape, _)| shape.top_k);
    let (hidden, width) = (largest(|(_, hidden)| *hidden), largest(|(shape, _)| shape.width));
    let numbers = largest(|(shape, _)| shape.experts + group_count(shape));
    [choices, choices, hidden, hidden, width, width, numbers]
}

/// Returns the number of groups that rows choose among.
fn group_count(shape: &MoeShape) -> usize {
    shape.groups.map_or(0, |division| division.groups)
}

/// The choices of experts on the host. A choice has the number `row * top_k + rank`.
#[derive(Default)]
pub(super) struct Choices {
    /// The expert of each choice; then the choices by expert, ascending within one. As the GPU has them.
    bytes: Vec<u8>,
    by_expert: Vec<u8>,
    /// The end of each expert's choices.
    ends: Vec<usize>,
    /// The experts of this device that rows chose, ascending, by their index on it.
    chosen: Vec<u32>,
}

impl Choices {
    /// Allocates memory for steps within `limits`.
    pub fn reserve(&mut self, limits: &StepLimits, shapes: &HeldShapes) {
        let bytes = scratch_bytes(limits, shapes)[0];
        let experts = shapes.mixtures.iter().map(|(shape, _)| shape.experts).max().unwrap_or(0);
        self.bytes.reserve(bytes.saturating_sub(self.bytes.len()));
        self.by_expert.reserve(bytes.saturating_sub(self.by_expert.len()));
        self.ends.reserve(experts.saturating_sub(self.ends.len()));
        self.chosen.reserve(experts.saturating_sub(self.chosen.len()));
    }

    /// Groups the choices in `bytes` by expert.
    fn group(&mut self, shape: &MoeShape, held: Range<usize>) {
        self.ends.clear();
        self.ends.resize(shape.experts, 0);
        let experts = self.bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes) as usize);
        experts.clone().for_each(|expert| self.ends[expert] += 1);
        let mut start = 0;
        for end in &mut self.ends {
            // The expert's start until its choices are placed.
            start += std::mem::replace(end, start);
        }
        self.by_expert.resize(self.bytes.len(), 0);
        let places = self.by_expert.as_chunks_mut().0;
        for (choice, expert) in experts.enumerate() {
            places[self.ends[expert]] = (choice as u32).to_le_bytes();
            self.ends[expert] += 1;
        }
        self.chosen.clear();
        for (index, expert) in held.enumerate() {
            if !self.of(expert).is_empty() {
                self.chosen.push(index as u32);
            }
        }
    }

    /// Returns the range of an expert's choices.
    fn of(&self, expert: usize) -> Range<usize> {
        expert.checked_sub(1).map_or(0, |before| self.ends[before])..self.ends[expert]
    }
}

/// Loads the kernels of mixtures.
pub(super) fn load(device: &mut Device) -> Result<(), DeviceError> {
    ["route", "clear", "gather_choices", "add_choices", "activate"]
        .into_iter()
        .try_for_each(|entry| device.load(KernelName::rows(entry)))
}

/// A mixture whose rows have chosen their experts.
struct Mixture<'a> {
    products: Products<'a>,
    scratch: &'a mut Scratch<BUFFERS>,
    shape: &'a MoeShape,
    rows: usize,
    hidden: usize,
    x: &'a CudaBuf,
    y: &'a mut CudaBuf,
}

impl Mixture<'_> {
    /// Chooses the experts of each row, on the GPU.
    fn route(&mut self, router: &CudaBuf, correction: Option<&CudaBuf>) -> Result<(), DeviceError> {
        let MoeShape { experts, top_k, scoring, normalize_scores, scale, .. } = *self.shape;
        let Scratch([choices, scores, .., numbers]) = self.scratch;
        let groups = group_count(self.shape);
        let arguments = Arguments::default().int(experts).int(top_k);
        let arguments =
            arguments.int(groups).int(self.shape.groups.map_or(0, |division| division.top_groups));
        let sums = self.shape.groups.is_some_and(|division| division.score == GroupScore::TopTwo);
        let arguments = arguments.int(usize::from(sums));
        let (code, tolerance) = match scoring {
            Scoring::Softmax => (0, 0.0),
            Scoring::Sigmoid => (1, 0.0),
            Scoring::Nearby { tolerance } => (2, tolerance),
        };
        let arguments = arguments.int(code).float(tolerance);
        let arguments = arguments.int(usize::from(self.shape.chooses_by_score(correction.is_some())));
        let arguments = arguments.int(usize::from(normalize_scores)).float(scale);
        let arguments = arguments.buf(router, f32_bytes(self.rows * experts));
        let arguments = arguments.optional(correction, f32_bytes(experts));
        let arguments = arguments.buf(numbers, f32_bytes(self.rows * (experts + groups)));
        let arguments = arguments.buf(choices, self.rows * top_k * NUMBER_BYTES);
        let arguments = arguments.buf(scores, f32_bytes(self.rows * top_k));
        self.products.device.launch(KernelName::rows("route"), ([self.rows, 1, 1], 32), arguments)
    }

    /// Adds the results of an expert for the rows of these choices.
    fn add_expert(
        &mut self,
        (expert, [gate_bias, up_bias, down_bias]): (&Expert<CudaBuf>, [Option<&CudaBuf>; 3]),
        choices: Range<usize>,
    ) -> Result<(), DeviceError> {
        let (rows, n) = (choices.len(), choices.len() * self.hidden);
        let of_rows = |arguments: Arguments, list: &CudaBuf| {
            let arguments = arguments.long(n).int(self.hidden).int(self.shape.top_k);
            arguments.buf_at(list, choices.start * NUMBER_BYTES, rows * NUMBER_BYTES)
        };
        let Scratch([list, scores, inputs, results, gate, up, _]) = self.scratch;
        let device = &mut *self.products.device;
        let score_bytes = f32_bytes(self.rows * self.shape.top_k);
        let arguments = of_rows(Arguments::default(), list);
        let arguments = arguments.optional(self.shape.weighs_input.then_some(&*scores), score_bytes);
        let arguments = arguments.buf(self.x, f32_bytes(self.rows * self.hidden)).buf(inputs, f32_bytes(n));
        device.launch(KernelName::rows("gather_choices"), (blocks_for(n), THREADS), arguments)?;

        let gate_gemm = gemm((&expert.gate, gate_bias), gate);
        match &expert.up {
            Some(w) => self.products.multiply_all(rows, inputs, &[gate_gemm, gemm((w, up_bias), up)])?,
            None => self.products.multiply_all(rows, inputs, &[gate_gemm])?,
        }
        let up = expert.up.as_ref().map(|_| &*up);
        let MoeShape { width, activation, .. } = *self.shape;
        row_ops::activate(self.products.device, rows * width, activation, gate, up)?;
        self.products.multiply_all(rows, gate, &[gemm((&expert.down, down_bias), results)])?;

        let arguments = of_rows(Arguments::default(), list);
        let arguments = arguments.optional((!self.shape.weighs_input).then_some(&*scores), score_bytes);
        let arguments = arguments.buf(results, f32_bytes(n)).buf(self.y, f32_bytes(self.rows * self.hidden));
        let name = KernelName::rows("add_choices");
        self.products.device.launch(name, (blocks_for(n), THREADS), arguments)
    }
}

/// Returns the GEMM of an expert's weight with its bias.
fn gemm<'a>((w, bias): (&'a Weight<CudaBuf>, Option<&'a CudaBuf>), y: &'a mut CudaBuf) -> Gemm<'a, CudaBuf> {
    Gemm { w, rest: &[], bias, epilogue: Epilogue::Set(y) }
}

impl CudaBackend {
    /// Computes [`crate::Backend::moe`].
    pub(super) fn mixture(
        &mut self,
        rows: usize,
        shape: &MoeShape,
        (router, experts): (&CudaBuf, Experts<CudaBuf>),
        (x, y): (&CudaBuf, &mut CudaBuf),
    ) -> Result<(), DeviceError> {
        shape.check(experts.held.len());
        let held = shape.first_expert..shape.first_expert + experts.held.len();
        let hidden = experts.held[0].down.n;
        let n = rows * hidden;
        let arguments = Arguments::default().long(n).buf(y, f32_bytes(n));
        self.device.launch(KernelName::rows("clear"), (blocks_for(n), THREADS), arguments)?;

        let CudaBackend { device, sizes, product_scratch, mixture_scratch: scratch, choices, .. } = self;
        let products = Products { device, scratch: product_scratch, precision: sizes.precision };
        let mut mixture = Mixture { products, scratch, shape, rows, hidden, x, y };
        mixture.route(router, experts.correction)?;
        choices.bytes.resize(rows * shape.top_k * NUMBER_BYTES, 0);
        let context = &mut mixture.products.device.context;
        context.download(&mixture.scratch.0[0], 0, &mut choices.bytes)?;
        choices.group(shape, held.clone());
        context.upload(&mut mixture.scratch.0[0], 0, &choices.by_expert)?;
        let mut outcome = Ok(());
        experts.for_each(&choices.chosen, &mut |index, expert| {
            if outcome.is_ok() {
                let own = choices.of(held.start + index);
                outcome = mixture.add_expert((expert, experts.biases_of(index)), own);
            }
        })?;
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Activation;

    #[test]
    fn choices_are_grouped_by_expert_in_the_order_of_rows() {
        let shape = MoeShape {
            experts: 5,
            first_expert: 1,
            top_k: 2,
            scoring: Scoring::Softmax,
            groups: None,
            normalize_scores: true,
            scale: 1.0,
            weighs_input: false,
            width: 8,
            activation: Activation::Silu,
        };
        let mut choices = Choices::default();
        for _ in 0..2 {
            choices.bytes = [4u32, 1, 0, 4, 1, 3].iter().flat_map(|expert| expert.to_le_bytes()).collect();
            choices.group(&shape, 1..4);
            let list: Vec<u32> =
                choices.by_expert.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
            assert_eq!(list, [2, 1, 4, 5, 0, 3]);
            assert_eq!([0, 1, 2, 3, 4].map(|expert| choices.of(expert)), [0..1, 1..3, 3..3, 3..4, 4..6]);
            assert_eq!(choices.chosen, [0, 2]);
        }
    }
}
