//! A backend with its slots made, and batches for it.

use super::inputs::*;
use crate::backend::{Backend, KvLayer, KvLayout, Rope, RopeStyle, StepLimits, Weight};
use crate::batch::{
    Page, SampleRow, SlotMove, Span, SpanModel, SpanTable, SpanTokens, StepBatch, StepOutput, TableUpdate,
    Want,
};
use crate::quant::QuantType;
use crate::reference::Reference;
use std::collections::BTreeMap;
use std::fmt::Arguments;

/// Results by sequence and position.
pub(super) type Answers = BTreeMap<(u32, usize), Vec<f32>>;

/// The sequence that the rows of holes are counted to.
pub(super) const SINK_SEQUENCE: u32 = 90;

/// Behind the end of every buffer that an operation writes; to be found unchanged.
pub(super) const GUARD: [f32; 5] = [-1.25e30, 77.0, 3.5, -1e-3, 0.625];

/// Behind the end of every buffer that an operation reads; to be found in no result.
pub(super) const TRAP: [f32; 5] = [f32::NAN; 5];

pub(super) struct Rig<B: Backend> {
    pub(super) backend: B,
    pub(super) limits: StepLimits,
    pub(super) step: u64,
}

impl<B: Backend> Rig<B> {
    pub(super) fn new(mut backend: B, limits: StepLimits) -> Rig<B> {
        backend.prepare(&limits).expect("room for a small step");
        Rig { backend, limits, step: 0 }
    }

    /// Makes a batch the current step.
    pub(super) fn begin(&mut self, mut batch: StepBatch) {
        batch.step = self.step;
        self.step += 1;
        self.backend.begin(&batch);
    }

    /// Makes a step of that many rows current, for operations that look at nothing else of it.
    pub(super) fn begin_rows(&mut self, rows: usize) {
        let book = &mut Book::scattered(self.limits.page_positions);
        self.begin(batch_of(&[Piece::given(0, 0, rows)], Want::None, book));
    }

    /// A step that draws (or scores) the given tokens: logits leave no other choice.
    pub(super) fn draw(
        &mut self,
        pieces: &[Piece],
        tokens: &[u32],
        samples: &[SampleRow],
        moves: &[SlotMove],
    ) -> StepOutput {
        let mut batch = batch_of(pieces, Want::All, &mut Book::scattered(self.limits.page_positions));
        batch.moves = moves.to_vec();
        batch.samples = samples.to_vec();
        self.begin(batch);
        let logits: Vec<f32> = tokens.iter().flat_map(|token| one_hot(*token, self.limits.vocab)).collect();
        let logits = self.put(&logits);
        let mut out = StepOutput::with_capacity(&self.limits);
        self.backend.sample(0..tokens.len(), &logits, &mut out);
        out
    }

    /// A buffer of exactly these values.
    pub(super) fn constant(&mut self, values: &[f32]) -> B::Buf {
        let bytes = codes(QuantType::F32, values);
        let mut buf = self.backend.alloc(bytes.len()).expect("room for a small buffer");
        self.backend.upload(&mut buf, 0, &bytes);
        buf
    }

    /// A buffer of these values to read.
    pub(super) fn put(&mut self, values: &[f32]) -> B::Buf {
        self.constant(&[values, &TRAP].concat())
    }

    /// A buffer of these values to read and write.
    pub(super) fn put_mut(&mut self, values: &[f32]) -> B::Buf {
        self.constant(&[values, &GUARD].concat())
    }

    /// A buffer to write `n` values to; NaN until then.
    pub(super) fn output(&mut self, n: usize) -> B::Buf {
        self.put_mut(&vec![f32::NAN; n])
    }

    /// The `n` values of a buffer that was written, whose guard must be as it was.
    pub(super) fn read(&mut self, buf: &B::Buf, n: usize, what: Arguments) -> Vec<f32> {
        let mut bytes = vec![0; (n + GUARD.len()) * 4];
        self.backend.download(buf, 0, &mut bytes);
        assert!(bytes[n * 4..] == codes(QuantType::F32, &GUARD), "{what}: wrote beyond its {n} values");
        let mut values = vec![0.0; n];
        (QuantType::F32.row().dequantize)(&bytes[..n * 4], &mut values);
        values
    }

    /// A matrix of `out` rows of these values.
    pub(super) fn weight(&mut self, ty: QuantType, out: usize, values: &[f32]) -> Weight<B::Buf> {
        self.coded(ty, out, values.len() / out, &codes(ty, values))
    }

    pub(super) fn coded(&mut self, ty: QuantType, out: usize, inp: usize, bytes: &[u8]) -> Weight<B::Buf> {
        let weight = self.backend.upload_weight(ty, out, inp, bytes).expect("room for a small matrix");
        assert_eq!((weight.ty, weight.out, weight.inp), (ty, out, inp), "shape of an uploaded weight");
        weight
    }

    pub(super) fn cache(&mut self, layout: KvLayout) -> KvLayer<B::Buf> {
        let cache = self.backend.alloc_kv(layout).expect("room for a small cache");
        assert_eq!(cache.layout, layout, "layout of an allocated cache");
        cache
    }

    /// Angles for every position within the limits.
    pub(super) fn rope(&mut self, dims: usize, style: RopeStyle) -> Rope<B::Buf> {
        let positions = self.limits.positions;
        let angle = |p: usize, i: usize| p as f64 * 10_000f64.powf(-2.0 * i as f64 / dims as f64);
        let pair = |p, i| [angle(p, i).cos() as f32, angle(p, i).sin() as f32];
        let table: Vec<f32> =
            (0..positions).flat_map(|p| (0..dims / 2).flat_map(move |i| pair(p, i))).collect();
        Rope { cos_sin: self.constant(&table), positions, dims, style }
    }
}

/// The backend to look at, and the oracle.
pub(super) fn rigs<B: Backend>(make: &impl Fn() -> B, page_positions: usize) -> (Rig<B>, Rig<Reference>) {
    (Rig::new(make(), limits(page_positions)), Rig::new(Reference::new(), limits(page_positions)))
}

/// A span of a test's batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) sequence: u32,
    pub(super) slot: u32,
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// Tokens given with the batch.
    Given,
    /// The token drawn last in the slot.
    Last,
    /// A hole: a row whose result nobody wants.
    Sink,
}

impl Piece {
    /// Tokens of the sequence that has this slot's number.
    pub(super) fn given(slot: u32, start: usize, len: usize) -> Piece {
        Piece { sequence: slot, slot, start, len, kind: Kind::Given }
    }

    pub(super) fn last(slot: u32, start: usize) -> Piece {
        Piece { sequence: slot, slot, start, len: 1, kind: Kind::Last }
    }

    pub(super) fn sink(slot: u32) -> Piece {
        Piece { sequence: SINK_SEQUENCE, slot, start: 0, len: 1, kind: Kind::Sink }
    }

    /// Sequence and position of each of its rows.
    pub(super) fn rows(&self) -> impl Iterator<Item = (u32, usize)> + use<> {
        let Piece { sequence, start, len, .. } = *self;
        (start..start + len).map(move |position| (sequence, position))
    }
}

/// A prompt of `len` tokens of sequence 0, in chunks.
pub(super) fn chunks(len: usize, chunk: usize) -> Vec<Vec<Piece>> {
    (0..len).step_by(chunk).map(|start| vec![Piece::given(0, start, chunk.min(len - start))]).collect()
}

/// Who has which pages.
#[derive(Clone, Debug)]
pub(super) struct Book {
    pub(super) page_positions: usize,
    /// By slot.
    pub(super) held: Vec<Vec<Page>>,
    /// Taken from the end.
    pub(super) free: Vec<Page>,
}

impl Book {
    pub(super) fn contiguous(page_positions: usize) -> Book {
        Book { page_positions, held: vec![Vec::new(); 8], free: (1..POOL as Page).rev().collect() }
    }

    /// Every page once, neighbours far apart.
    pub(super) fn scattered(page_positions: usize) -> Book {
        let pages = POOL as Page - 1;
        Book {
            free: (0..pages).map(|i| 1 + (i * 37 + 11) % pages).collect(),
            ..Book::contiguous(page_positions)
        }
    }

    /// Gives the slot pages for its first `positions`.
    pub(super) fn cover(&mut self, slot: u32, positions: usize, tables: &mut Vec<TableUpdate>) {
        let held = &mut self.held[slot as usize];
        while held.len() * self.page_positions < positions {
            let page = self.free.pop().expect("the test's pool is large enough");
            tables.push(TableUpdate { slot, index: held.len() as u32, page });
            held.push(page);
        }
    }

    pub(super) fn apply(&mut self, moves: &[SlotMove]) {
        for moved in moves {
            self.held[moved.to as usize] = std::mem::take(&mut self.held[moved.from as usize]);
        }
    }
}

/// The pieces as a batch; with wanted rows, each is drawn greedily.
pub(super) fn batch_of(pieces: &[Piece], want: Want, book: &mut Book) -> StepBatch {
    let mut batch = StepBatch::default();
    for piece in pieces {
        let (at, len) = (batch.tokens.len() as u32, piece.len as u32);
        let tokens = match piece.kind {
            Kind::Given => SpanTokens::Given { at, len },
            Kind::Last | Kind::Sink => SpanTokens::Last,
        };
        if piece.kind == Kind::Given {
            batch.tokens.extend(piece.rows().map(|(sequence, position)| text(sequence, position)));
        }
        let table = if piece.kind == Kind::Sink { SpanTable::Sink } else { SpanTable::Own };
        if table == SpanTable::Own {
            book.cover(piece.slot, piece.start + piece.len, &mut batch.tables);
        }
        let start = piece.start as u32;
        batch.spans.push(Span { model: SpanModel::Target, slot: piece.slot, start, tokens, table, want });
    }
    batch.samples = vec![SampleRow::GREEDY; batch.wanted_rows().count()];
    batch
}
