//! The operations of latent attention around [`super::forward::attention`]: see [`super::spec::latent`].
//!
//! Invariant: all rows of a row batch of openings ([`mainstem_kernels::Span::is_opening`]) attend to keys and
//! values of all heads, if these are loaded; all other rows attend to latents, of prompts or generated.

use super::activations::{Activations, LatentActivations};
use super::gemm_terms::run_gemms;
use super::spec::AttentionSpec;
use super::spec::latent::LatentSpec;
use super::weights::{Attention, Latent, Stack};
use mainstem_kernels::{AttentionShape, Backend, Epilogue, InputOperand, KvTable, OutputColumns};

/// The buffers of a latent attention.
pub struct LatentBuffers<'a, Buf> {
    /// Queries (rows, heads, k_dim), and keys (rows, k_dim).
    pub q: &'a mut Buf,
    pub k: &'a mut Buf,
    /// The latent, (rows, v_dim).
    pub latent: &'a mut Buf,
    pub between: &'a mut LatentActivations<Buf>,
    /// The rotations of the rows.
    pub angles: &'a [Buf],
}

/// Computes q, and k, the latent with the rotated part, from the layer's input. Queries have absorbed the
/// matrices of keys, except those of openings that attend to keys of all heads.
pub fn project<B: Backend>(
    b: &mut B,
    rows: usize,
    (spec, latent_spec): (&AttentionSpec, &LatentSpec),
    (weights, latent): (&Attention<B::Buf>, &Latent<B::Buf>),
    stack: &Stack<B::Buf>,
    input: InputOperand<B::Buf>,
    room: LatentBuffers<B::Buf>,
) {
    let AttentionSpec { heads, k_dim, v_dim: width, .. } = *spec;
    let LatentBuffers { q, k, latent: c, between, angles } = room;
    let LatentActivations { q_a, heads: q_nope, q_rope, k_rope, is_open, .. } = between;
    let of_keys = [(&weights.k, Epilogue::Set(&mut *c)), (&latent.k_rope, Epilogue::Set(&mut *k_rope))];
    let of_queries =
        [(&weights.q, Epilogue::Set(&mut *q_nope)), (&latent.q_rope, Epilogue::Set(&mut *q_rope))];
    let [first, second] = of_keys;
    match &latent.q_a {
        None => {
            let [third, fourth] = of_queries;
            run_gemms(b, rows, input, [first, second, third, fourth]);
        }
        Some((linear, norm)) => {
            run_gemms(b, rows, input, [first, second, (linear, Epilogue::Set(&mut *q_a))]);
            b.norm_in_place(rows, norm, q_a);
            run_gemms(b, rows, InputOperand::Given(q_a), of_queries);
        }
    }
    b.norm_in_place(rows, &latent.norm, c);
    let rope_dim = latent_spec.rope_dim;
    if let Some(rope) = spec.rope {
        let (rope, angles) = (&stack.ropes[rope], &angles[rope]);
        b.rope(rope, angles, heads, rope_dim, q_rope);
        b.rope(rope, angles, 1, rope_dim, k_rope);
    }
    let [first, rotated] = [0, width].map(|first| OutputColumns { first, of: k_dim });
    b.copy_columns((rows, 1), (width, 0..width, &*c), (first, &mut *k));
    b.copy_columns((rows, 1), (rope_dim, 0..rope_dim, &*k_rope), (rotated, &mut *k));
    if *is_open {
        let width = latent_spec.nope_dim;
        let [first, rotated] = [0, width].map(|first| OutputColumns { first, of: width + rope_dim });
        b.copy_columns((rows * heads, 1), (width, 0..width, &*q_nope), (first, &mut *q));
        return b.copy_columns((rows * heads, 1), (rope_dim, 0..rope_dim, &*q_rope), (rotated, q));
    }
    b.matmul_heads(rows, heads, (&latent.absorbed.weight, first), q_nope, &mut *q);
    b.copy_columns((rows * heads, 1), (rope_dim, 0..rope_dim, &*q_rope), (rotated, q));
}

/// Computes a, the attention of q, of openings, over keys and values of all heads, which are made from their
/// latents in v. k is overwritten.
pub fn attend_to_heads<B: Backend>(
    b: &mut B,
    rows: usize,
    (spec, latent_spec): (&AttentionSpec, &LatentSpec),
    (weights, latent): (&Attention<B::Buf>, &Latent<B::Buf>),
    act: &mut Activations<B::Buf>,
) {
    let (heads, nope_dim, rope_dim) = (spec.heads, latent_spec.nope_dim, latent_spec.rope_dim);
    let Activations { q, k, v: c, a, latent: LatentActivations { heads: made, k_rope, opened, .. }, .. } =
        act;
    let (keys, cache) = latent.keys.as_ref().zip(opened.as_mut()).expect("both exist or none; this is a bug");
    let (width, columns) = (nope_dim + rope_dim, |first, of| OutputColumns { first, of });
    b.matmul(rows, &keys.weight, None, c, made);
    b.copy_columns((rows * heads, 1), (nope_dim, 0..nope_dim, &*made), (columns(0, width), &mut *k));
    b.copy_columns((rows, heads), (rope_dim, 0..rope_dim, &*k_rope), (columns(nope_dim, width), &mut *k));
    b.matmul(rows, &weights.v.weight, None, c, made);
    b.store_kv(KvTable::Scratch, k, made, cache);
    let (scale, mask, table) = (spec.scale, spec.mask, KvTable::Scratch);
    let shape = AttentionShape::plain(heads, scale, mask, table);
    b.attention(&shape, q, cache, a);
}

/// Computes and returns the values of all heads from the sums of latents. Openings that attend to keys and
/// values of all heads have sums of values.
pub fn values<'a, B: Backend>(
    b: &mut B,
    rows: usize,
    weights: &Attention<B::Buf>,
    heads: usize,
    (sums, between): (&'a B::Buf, &'a mut LatentActivations<B::Buf>),
) -> &'a B::Buf {
    if between.is_open {
        return sums;
    }
    let w = &weights.v.weight;
    b.matmul_heads(rows, heads, (w, OutputColumns::all(w.n / heads)), sums, &mut between.heads);
    &between.heads
}
