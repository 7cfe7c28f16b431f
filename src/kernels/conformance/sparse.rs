//! Tests of top-k sparse attention, against the reference backend.

use super::Bounds;
use super::heads::*;
use super::inputs::*;
use super::pieces::*;
use super::rig::*;
use crate::backend::{Backend, KvTable, Mask, Share, StepLimits};
use crate::batch::Want;
use crate::quant::QuantType;
use crate::reference::Reference;

/// Returns prompts mixed with generated tokens: of sequence 0 from position 37 on, of sequence 1 from its
/// second token on.
fn turns() -> Vec<Vec<Piece>> {
    let mut steps = vec![vec![Piece::given(0, 0, 37), Piece::given(1, 0, 1)]];
    for i in 0..12 {
        steps.push(vec![Piece::given(2, 7 * i, 7), Piece::last(0, 37 + i), Piece::last(1, 1 + i)]);
    }
    steps.push(vec![Piece::sink(5), Piece::given(0, 49, 80), Piece::last(1, 13)]);
    steps.push(vec![Piece::last(0, 129), Piece::given(1, 14, 1)]);
    steps
}

/// Returns the spans of one sequence only.
fn alone(sequence: u32) -> Vec<Vec<Piece>> {
    let own = |pieces: Vec<Piece>| pieces.into_iter().filter(|piece| piece.sequence == sequence).collect();
    turns().into_iter().map(own).filter(|pieces: &Vec<Piece>| !pieces.is_empty()).collect()
}

/// Returns masks with and without window, softcap and bias.
fn looks() -> [Look; 3] {
    let window = |window| Look { mask: Mask::Causal { window: Some(window) }, ..Look::PLAIN };
    [Look::PLAIN, window(20), Look { softcap: Some(2.0), reach: Some(150), ..window(50) }]
}

/// Tests that results are close to the reference in every cache format, and do not depend on the other rows
/// or on the pages; and that a given token, even a single one, uses dense attention.
pub fn attention_of_some<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for (i, ty) in QuantType::cached().enumerate() {
        for (look, fraction) in looks().into_iter().zip([0.1, 0.5, 0.25]) {
            let (heads, k_dim, v_dim) = [(6, 64, 80), (2, 20, 33)][i % 2];
            let case = Heads { ty, kv_heads: 2, heads, k_dim, v_dim, scale: 1.0, look };
            let attended = Share::new(fraction).expect("a valid fraction");
            some(&case, attended, make, bounds);
        }
    }
}

/// Tests one case.
fn some<B: Backend>(case: &Heads, attended: Share, make: &impl Fn() -> B, bounds: &Bounds) {
    let limits = |page_positions| StepLimits { attended, ..limits(page_positions) };
    let what = format_args!("{case:?}, {attended:?}");
    let want = case.of_oracle(&mut Rig::new(Reference::new(), limits(32)), &turns(), Book::scattered(32));
    let all = case.on(&mut Rig::new(make(), super::inputs::limits(32)), &turns(), Book::scattered(32));
    let mut rig = Rig::new(make(), limits(32));
    let got = case.on(&mut rig, &turns(), Book::scattered(32));
    case.close(what, &got, &want, bounds);
    for sequence in [0, 1] {
        let alone = case.on(&mut rig, &alone(sequence), Book::contiguous(32));
        same_answers(format_args!("{what}, alone"), &alone, &got, bounds);
    }
    let paged = case.on(&mut Rig::new(make(), limits(128)), &turns(), Book::scattered(128));
    same_answers(format_args!("{what}, on larger pages"), &paged, &got, bounds);
    // Given tokens use dense attention, whatever else is in the step.
    for place in [(0, 36), (0, 60), (1, 14), (2, 80)] {
        same(format_args!("{what}, {place:?}, given"), &got[&place], &all[&place], bounds.company);
    }
    for place in [(0, 40), (1, 9), (0, 129)] {
        assert_ne!(got[&place], all[&place], "{what}, {place:?}: generated, but attends to all");
    }
}

/// Tests that values of positions that are not selected are not read: neither NaN nor very large numbers have
/// an effect.
pub fn unchosen_values<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    const DIM: usize = 16;
    let attended = Share::new(0.1).expect("a tenth is a valid fraction");
    let selected = [3, 11];
    let value = |position: usize| if selected.contains(&position) { position as f32 } else { f32::NAN };
    let key = |position: usize| if selected.contains(&position) { 1.0 } else { 0.25 };
    let case = Heads {
        ty: QuantType::F32,
        kv_heads: 1,
        heads: 1,
        k_dim: DIM,
        v_dim: DIM,
        scale: 1.0 / DIM as f32,
        look: Look::PLAIN,
    };
    let mut rig = Rig::new(make(), StepLimits { attended, ..limits(32) });
    let (mut cache, mut book) = (case.cache(&mut rig), Book::scattered(32));
    let mut store = |rig: &mut Rig<B>, piece: Piece, k: Vec<f32>, v: Vec<f32>| {
        rig.begin(batch_of(&[piece], Want::None, &mut book));
        let [k, v] = [k, v].map(|numbers| rig.put(&numbers));
        rig.backend.store_kv(KvTable::Own, &k, &v, &mut cache);
    };
    let wide = |of: &dyn Fn(usize) -> f32| (0..20 * DIM).map(|i| of(i / DIM)).collect();
    store(&mut rig, Piece::given(0, 0, 20), wide(&key), wide(&value));
    store(&mut rig, Piece::last(0, 20), vec![0.5; DIM], vec![20.0; DIM]);
    let q = rig.put(&[1.0; DIM]);
    let out = case.attend(&mut rig, &q, &cache, DIM);
    let out = rig.read(&out, DIM, format_args!("attention to 3 of 21"));
    let [large, small, middle] = [1f64, 0.25, 0.5].map(f64::exp);
    let want = (14.0 * large + 20.0 * middle) / (2.0 * large + 18.0 * small + middle);
    close(format_args!("3 of 21"), &out, &[want as f32; DIM], (bounds.attention)(QuantType::F32), |_| 20.0);
}
