//! The cache and attention over it, against the oracle.

use super::Bounds;
use super::inputs::*;
use super::rig::*;
use crate::backend::{AttentionShape, Backend, KvLayer, KvLayout};
use crate::batch::{PageCopy, StepBatch, TableUpdate, Want};
use crate::quant::QuantType;
use crate::reference::Reference;
use std::fmt::Arguments;

/// Attention of every head shape and cache type, over mixed spans and scattered pages.
pub fn attention<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let turns = [
        vec![Piece::given(0, 0, 37), Piece::given(1, 0, 1), Piece::given(2, 0, 5)],
        vec![Piece::last(1, 1), Piece::given(0, 37, 30), Piece::sink(5), Piece::given(3, 0, 33)],
        vec![Piece::given(2, 5, 1), Piece::last(0, 67), Piece::given(3, 33, 2), Piece::last(1, 2)],
    ];
    for (shift, page_positions) in PAGE_POSITIONS.into_iter().enumerate() {
        let (device, oracle) = &mut rigs(make, page_positions);
        // Each page size takes a third of the cases, of every type.
        let third = head_cases().enumerate().filter(|(i, _)| (i + i / 3 + shift).is_multiple_of(3));
        for (_, case) in third {
            let got = case.on(device, &turns, Book::scattered(page_positions));
            let want = case.on(oracle, &turns, Book::scattered(page_positions));
            case.close(format_args!("{case:?}, pages of {page_positions}"), &got, &want, bounds);
        }
    }
}

/// Attention over hundreds of positions: near the oracle, and the same however the prompt is cut and paged.
pub fn attention_long<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for ty in QuantType::all().filter(|ty| ty.bytes(64).is_some()) {
        let case = Heads { ty, kv_heads: 2, heads: 4, k_dim: 64, v_dim: 64, scale: 1.0 };
        let mut oracle = Rig::new(Reference::new(), limits(64));
        let want = case.on(&mut oracle, &chunks(450, 150), Book::scattered(64));
        let mut first: Option<Answers> = None;
        for (page_positions, chunk) in [(32, 150), (64, 90), (128, 64), (64, 17), (32, 1)] {
            let mut device = Rig::new(make(), limits(page_positions));
            let got = case.on(&mut device, &chunks(450, chunk), Book::scattered(page_positions));
            let what = format_args!("{case:?}, chunks of {chunk}, pages of {page_positions}");
            case.close(what, &got, &want, bounds);
            same_answers(what, &got, first.get_or_insert_with(|| got.clone()), bounds);
        }
    }
}

/// A copied page reads like the one it was copied from, which stays as it was.
pub fn copy_pages<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for ty in QuantType::all().filter(|ty| ty.bytes(64).is_some()) {
        let case = Heads { ty, kv_heads: 2, heads: 2, k_dim: 64, v_dim: 64, scale: 0.5 };
        let turns = [vec![Piece::given(0, 0, 64)], vec![Piece::last(0, 64)]];
        let (device, oracle) = &mut rigs(make, 32);
        let want = case.on(oracle, &turns, Book::contiguous(32));

        let mut cache = case.cache(device);
        let mut book = Book::contiguous(32);
        case.turn(device, &mut cache, &turns[0], &mut book, &mut Answers::new());
        let copied = [40, 7];
        let copies = [0, 1].map(|i| PageCopy { from: book.held[0][i], to: copied[i] });
        let tables = [0, 1].map(|i| TableUpdate { slot: 1, index: i, page: copied[i as usize] }).to_vec();
        let batch = batch_of(&[Piece::sink(7)], Want::None, &mut book);
        device.begin(StepBatch { tables, copies: copies.to_vec(), ..batch });
        device.backend.copy_pages(&copies, &mut cache);
        book.held[1] = copied.to_vec();
        // The next token of the same sequence, over the copy and over the original.
        for slot in [1, 0] {
            let mut got = Answers::new();
            case.turn(device, &mut cache, &[Piece { slot, ..turns[1][0] }], &mut book, &mut got);
            let what = format_args!("{case:?}, after pages were copied, in slot {slot}");
            case.close(what, &got, &want, bounds);
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Heads {
    ty: QuantType,
    kv_heads: usize,
    heads: usize,
    k_dim: usize,
    v_dim: usize,
    scale: f32,
}

fn head_cases() -> impl Iterator<Item = Heads> {
    let square = HEAD_DIMS.map(|dim| (dim, dim)).into_iter().chain([(12, 8), (64, 80)]);
    let shapes = square.flat_map(|dims| KV_HEADS.map(|kv_heads| GROUPS.map(|group| (dims, kv_heads, group))));
    let cases = shapes.flatten().flat_map(|shape| QuantType::all().map(move |ty| (shape, ty)));
    let cases = cases.map(|(((k_dim, v_dim), kv_heads, group), ty)| {
        let scale = if kv_heads == 3 { 1.0 } else { (k_dim as f32).sqrt().recip() };
        Heads { ty, kv_heads, heads: kv_heads * group, k_dim, v_dim, scale }
    });
    cases.filter(|case| case.ty.bytes(case.k_dim).is_some() && case.ty.bytes(case.v_dim).is_some())
}

impl Heads {
    fn cache<B: Backend>(&self, rig: &mut Rig<B>) -> KvLayer<B::Buf> {
        let Heads { ty, kv_heads, k_dim, v_dim, .. } = *self;
        rig.cache(KvLayout {
            ty,
            pages: POOL,
            page_positions: rig.limits.page_positions,
            kv_heads,
            k_dim,
            v_dim,
        })
    }

    /// Every row's attention, over a fresh cache.
    fn on<B: Backend>(&self, rig: &mut Rig<B>, turns: &[Vec<Piece>], mut book: Book) -> Answers {
        let mut cache = self.cache(rig);
        let mut answers = Answers::new();
        for pieces in turns {
            self.turn(rig, &mut cache, pieces, &mut book, &mut answers);
        }
        answers
    }

    /// One step. K, V and Q of a row follow from its sequence and position alone.
    fn turn<B: Backend>(
        &self,
        rig: &mut Rig<B>,
        cache: &mut KvLayer<B::Buf>,
        pieces: &[Piece],
        book: &mut Book,
        answers: &mut Answers,
    ) {
        let rows: Vec<(u32, usize)> = pieces.iter().flat_map(Piece::rows).collect();
        let input = |tag: u32, width: usize| -> Vec<f32> {
            rows.iter()
                .flat_map(|(sequence, p)| noise(tag + 1000 * sequence + 10 * *p as u32, width))
                .collect()
        };
        let widths = [self.heads * self.k_dim, self.kv_heads * self.k_dim, self.kv_heads * self.v_dim];
        let [q, k, v] = [0, 1, 2].map(|i| rig.put(&input(100_000 + i as u32, widths[i])));
        rig.begin(batch_of(pieces, Want::None, book));
        rig.backend.store_kv(&k, &v, cache);
        let width = self.heads * self.v_dim;
        let mut out = rig.output(rows.len() * width);
        let shape = AttentionShape { heads: self.heads, scale: self.scale };
        rig.backend.attention(&shape, &q, cache, &mut out);
        let out = rig.read(&out, rows.len() * width, format_args!("{self:?} over {pieces:?}"));
        answers.extend(rows.into_iter().zip(out.chunks_exact(width).map(<[f32]>::to_vec)));
    }

    /// Inputs are at most 1: so is the sum of weighted values, and `scale * k_dim` bounds a score.
    fn close(&self, what: Arguments, got: &Answers, want: &Answers, bounds: &Bounds) {
        let magnitude = 1.0 + self.scale * self.k_dim as f32;
        for ((sequence, position), got) in got {
            let what = format_args!("{what}, sequence {sequence}, position {position}");
            close(what, got, &want[&(*sequence, *position)], (bounds.attention)(self.ty), |_| magnitude);
        }
    }
}
