//! A backend that records the inputs of its GEMMs.
//!
//! Invariant: an observed backend gives the results of the backend that it wraps. It allocates in steps, and
//! is slow: it downloads every input.

use super::importance_matrix::Observations;
use mainstem_kernels::reference::route;
use mainstem_kernels::{
    ActivationType, Backend, Collective, DeviceError, Experts, Gemm, InputOperand, MatrixId, MoeShape,
    OutputColumns, Weight, delegate_backend,
};
use std::sync::Arc;

/// A backend that adds the input of each GEMM to [`Observations`], under the id of the weight. GEMMs whose
/// weight has no id are not recorded. Of an expert, the input of gate and up is recorded, but not that of
/// down, which only the backend sees.
pub struct Observed<B> {
    inner: B,
    observations: Arc<Observations>,
    /// Downloaded rows: as bytes, and as numbers.
    bytes: Vec<u8>,
    inputs: Vec<f32>,
    logits: Vec<f32>,
}

impl<B: Backend> Observed<B> {
    /// Wraps a backend whose inputs are added to `observations`.
    pub fn new(inner: B, observations: Arc<Observations>) -> Observed<B> {
        Observed { inner, observations, bytes: Vec::new(), inputs: Vec::new(), logits: Vec::new() }
    }

    /// Records x (rows, width) as the input of the matrices `ids`. Equal ids are adjacent: they are parts of
    /// one fused matrix.
    fn observe<'a>(
        &mut self,
        (rows, width): (usize, usize),
        x: &B::Buf,
        ids: impl Iterator<Item = &'a MatrixId>,
    ) {
        let mut ids: Vec<_> = ids.collect();
        ids.dedup();
        if !ids.is_empty() {
            download(&mut self.inner, rows * width, x, (&mut self.bytes, &mut self.inputs));
        }
        for id in ids {
            self.observations.add(id, width, self.inputs.chunks_exact(width));
        }
    }

    /// Records the rows of x (rows, hidden) as inputs of the experts of this device that they are routed to.
    fn observe_experts(
        &mut self,
        rows: usize,
        shape: &MoeShape,
        router: &B::Buf,
        experts: &Experts<B::Buf>,
        x: &B::Buf,
    ) {
        let Some(width) = experts.held.first().map(|expert| expert.gate.k) else { return };
        let correction = experts.correction.map(|correction| {
            // Unlike activations, it is F32.
            self.bytes.resize(shape.experts * size_of::<f32>(), 0);
            self.inner.download(correction, 0, &mut self.bytes);
            let mut values = Vec::new();
            ActivationType::F32.decode(&self.bytes, &mut values);
            values
        });
        download(&mut self.inner, rows * width, x, (&mut self.bytes, &mut self.inputs));
        download(&mut self.inner, rows * shape.experts, router, (&mut self.bytes, &mut self.logits));
        let logits = self.logits.chunks_exact(shape.experts);
        let routed: Vec<_> = logits.map(|row| route(shape, row, correction.as_deref())).collect();
        for (number, expert) in (shape.first_expert..).zip(experts.held) {
            let own = || {
                let rows = self.inputs.chunks_exact(width).zip(&routed);
                rows.filter(|(_, to)| to.iter().any(|(expert, _)| *expert == number)).map(|(row, _)| row)
            };
            let mut ids: Vec<_> =
                [Some(&expert.gate), expert.up.as_ref()].into_iter().flatten().map(|w| &w.id).collect();
            ids.dedup();
            for id in ids.into_iter().flatten() {
                self.observations.add(id, width, own());
            }
        }
    }
}

/// Replaces the contents of `values` by `count` activations.
fn download<B: Backend>(
    b: &mut B,
    count: usize,
    from: &B::Buf,
    (bytes, values): (&mut Vec<u8>, &mut Vec<f32>),
) {
    let ty = b.activation_type();
    bytes.resize(count * ty.size(), 0);
    b.download(from, 0, bytes);
    ty.decode(bytes, values);
}

impl<B: Backend> Backend for Observed<B> {
    type Buf = B::Buf;

    delegate_backend!(
        inner:
        sizes, describe, activation_type, threads, allocated_bytes, activation_precision, rank_and_count,
        alloc, upload, download, upload_weight, prepare_weight, refill_weight, alloc_kv, alloc_host_kv,
        prepare, begin_step, map_rows, end_step, row_batches, select_rows, copy_pages, embed,
        embed_positions, norm, norm_in_place, rope_angles, rope, store_kv, attention, fetches_values,
        attention_fetching_values, activate, add, scale, softcap, clamp, gate_rows, prepare_moe, all_reduce,
        all_gather, copy_columns, gather_output_rows, append_hidden, sample, page_table,
    );

    fn host_bytes(buf: &mut B::Buf) -> Option<&mut [u8]> {
        B::host_bytes(buf)
    }

    /// Panics if the stage has other ranks, since each of them sees some columns of an input only.
    fn join_stage(&mut self, stage: Box<dyn Collective>) {
        assert_eq!(stage.rank_count(), 1, "inputs cannot be observed on a split model; this is a bug");
        self.inner.join_stage(stage);
    }

    fn matmul_to(
        &mut self,
        rows: usize,
        (w, columns): (&Weight<B::Buf>, OutputColumns),
        bias: Option<&B::Buf>,
        x: &B::Buf,
        y: &mut B::Buf,
    ) {
        self.observe((rows, w.k), x, w.id.iter());
        self.inner.matmul_to(rows, (w, columns), bias, x, y);
    }

    /// Records the inputs of all heads.
    fn matmul_heads(
        &mut self,
        rows: usize,
        heads: usize,
        (w, columns): (&Weight<B::Buf>, OutputColumns),
        x: &B::Buf,
        y: &mut B::Buf,
    ) {
        self.observe((rows * heads, w.k), x, w.id.iter());
        self.inner.matmul_heads(rows, heads, (w, columns), x, y);
    }

    fn gemms(&mut self, rows: usize, input: InputOperand<B::Buf>, gemms: &mut [Gemm<B::Buf>]) {
        let Some(k) = gemms.first().map(|gemm| gemm.w.k) else { return };
        let x = input.materialize(&mut self.inner, rows, k);
        self.observe((rows, k), x, gemms.iter().flat_map(|gemm| &gemm.w.id));
        self.inner.gemms(rows, InputOperand::Given(x), gemms);
    }

    fn moe(
        &mut self,
        rows: usize,
        shape: &MoeShape,
        router: &B::Buf,
        experts: Experts<B::Buf>,
        x: &B::Buf,
        y: &mut B::Buf,
    ) -> Result<(), DeviceError> {
        self.observe_experts(rows, shape, router, &experts, x);
        self.inner.moe(rows, shape, router, experts, x, y)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstem_kernels::reference::Reference;
    use mainstem_kernels::{Activation, Epilogue, Expert, HostBuf, QuantType, Scoring};

    type Device = Observed<Reference>;

    fn device() -> (Device, Arc<Observations>) {
        let seen = Arc::<Observations>::default();
        (Observed::new(Reference::new(), seen.clone()), seen)
    }

    fn buf(b: &mut Device, values: &[f32]) -> HostBuf {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut buf = b.alloc(bytes.len()).expect("the reference backend allocates");
        b.upload(&mut buf, 0, &bytes);
        buf
    }

    /// Returns a matrix (n, k) of zeros.
    fn matrix(b: &mut Device, id: &MatrixId, n: usize, k: usize) -> Weight<HostBuf> {
        let weight = b.upload_weight(QuantType::F32, n, k, &vec![0; 4 * n * k]);
        Weight { id: Some(id.clone()), ..weight.expect("the reference backend allocates") }
    }

    fn means(seen: &Observations, name: &str, plane: usize) -> Option<Vec<f64>> {
        seen.mean_squares(&MatrixId::new(name, plane))
    }

    /// Multiplies x (rows, k) by one output of each matrix, in one operation.
    fn multiply(b: &mut Device, rows: usize, x: &[f32], k: usize, ids: &[&MatrixId]) {
        let weights: Vec<_> = ids.iter().map(|id| matrix(b, id, 1, k)).collect();
        let mut results: Vec<_> = ids.iter().map(|_| buf(b, &vec![0.0; rows])).collect();
        let each = weights.iter().zip(&mut results);
        let mut gemms: Vec<_> =
            each.map(|(w, y)| Gemm { w, rest: &[], bias: None, epilogue: Epilogue::Set(y) }).collect();
        let x = buf(b, x);
        b.gemms(rows, InputOperand::Given(&x), &mut gemms);
    }

    /// Computed by hand: a step of two rows and a step of one. The third row of the buffer is not part of the
    /// first step.
    #[test]
    fn squares_are_averaged_over_the_rows_of_all_steps() {
        let (mut b, seen) = device();
        let (q, o) = (MatrixId::new("qkv", 0), MatrixId::new("o", 0));
        // The three parts of a fused matrix have the same input.
        multiply(&mut b, 2, &[1.0, -2.0, 0.0, 3.0, 4.0, 0.0, 9.0, 9.0, 9.0], 3, &[&q, &q, &q]);
        assert_eq!(seen.mean_squares(&q), Some(vec![5.0, 10.0, 0.0]));
        multiply(&mut b, 1, &[0.0, 1.0, 0.0], 3, &[&q, &o]);
        assert_eq!(seen.mean_squares(&q), Some(vec![10.0 / 3.0, 7.0, 0.0]));
        assert_eq!(seen.mean_squares(&o), Some(vec![0.0, 1.0, 0.0]));
        let importance = seen.importance_matrix().unwrap();
        let mean = (10.0 / 3.0 + 7.0) / 3.0;
        // Three observed rows, and eight rows of the prior.
        let expected = [10.0 / 3.0, 7.0, 0.0].map(|x: f64| ((3.0 * x + 8.0 * mean) / (11.0 * mean)) as f32);
        let found = importance.column_weights(&q, None).unwrap();
        assert!(found.iter().zip(expected).all(|(found, x)| (found - x).abs() < 1e-6), "{found:?}");
        assert_eq!(importance.column_weights(&q, Some(1..3)), Some(&found[1..]));
        assert!(importance.column_weights(&MatrixId::new("k", 0), None).is_none());
    }

    /// Each of the two rows has two heads.
    #[test]
    fn inputs_of_all_heads_are_recorded() {
        let (mut b, seen) = device();
        let w = matrix(&mut b, &MatrixId::new("kv_b", 0), 2, 2);
        let (x, mut y) = (buf(&mut b, &[1.0, 0.0, 2.0, 4.0, 3.0, 0.0, 0.0, 2.0]), buf(&mut b, &[0.0; 4]));
        b.matmul_heads(2, 2, (&w, OutputColumns::all(1)), &x, &mut y);
        assert_eq!(means(&seen, "kv_b", 0), Some(vec![14.0 / 4.0, 20.0 / 4.0]));
    }

    /// Each row goes to the two experts with the largest logits; the local experts start at number 1.
    #[test]
    fn experts_see_the_rows_that_are_routed_to_them() {
        let (mut b, seen) = device();
        let shape = MoeShape {
            experts: 4,
            first_expert: 1,
            top_k: 2,
            scoring: Scoring::Softmax,
            groups: None,
            normalize_scores: true,
            scale: 1.0,
            weighs_input: false,
            width: 1,
            activation: Activation::Silu,
        };
        let id = MatrixId::new;
        let mut expert = |gate: MatrixId, up: Option<MatrixId>| Expert {
            gate: matrix(&mut b, &gate, 1, 2),
            up: up.map(|up| matrix(&mut b, &up, 1, 2)),
            down: matrix(&mut b, &id("down", 0), 2, 1),
        };
        let experts = [
            expert(id("gate", 1), Some(id("up", 1))),
            expert(id("both", 2), Some(id("both", 2))),
            expert(id("gate", 3), None),
        ];
        let idle = expert(id("idle", 3), None);
        // Experts 0 and 2, then 2 and 3, then 0 and 1 because all four logits are equal.
        let router = buf(&mut b, &[9.0, 1.0, 5.0, 2.0, -3.0, -4.0, -1.0, -2.0, 7.0, 7.0, 7.0, 7.0]);
        let x = buf(&mut b, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let mut y = buf(&mut b, &[0.0; 6]);
        b.moe(3, &shape, &router, Experts::in_memory(&experts), &x, &mut y).unwrap();
        assert_eq!(means(&seen, "gate", 1), Some(vec![25.0, 36.0]));
        assert_eq!(means(&seen, "up", 1), Some(vec![25.0, 36.0]));
        assert_eq!(means(&seen, "both", 2), Some(vec![5.0, 10.0]));
        assert_eq!(means(&seen, "gate", 3), Some(vec![9.0, 16.0]));
        assert_eq!(means(&seen, "gate", 0), None);
        // The only local expert is the last one, and the row is routed to others.
        let (router, x) = (buf(&mut b, &[9.0, 0.0, 8.0, 0.0]), buf(&mut b, &[1.0, 1.0]));
        let last = MoeShape { first_expert: 3, ..shape };
        b.moe(1, &last, &router, Experts::in_memory(&[idle]), &x, &mut y).unwrap();
        assert_eq!(means(&seen, "idle", 3), None);
        assert!(seen.importance_matrix().unwrap().column_weights(&id("idle", 3), None).is_none());
    }

    #[test]
    fn what_is_no_number_is_an_error_and_what_is_all_zero_counts_alike() {
        let (mut b, seen) = device();
        let (dead, strange) = (MatrixId::new("dead", 0), MatrixId::new("strange", 0));
        multiply(&mut b, 1, &[0.0, 0.0], 2, &[&dead]);
        assert!(seen.importance_matrix().unwrap().column_weights(&dead, None).is_none());
        multiply(&mut b, 1, &[1.0, f32::NAN], 2, &[&strange]);
        assert!(seen.importance_matrix().unwrap_err().to_string().contains("'strange'"));
    }
}
