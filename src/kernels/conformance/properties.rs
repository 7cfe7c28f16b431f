//! What no backend may lack, shown by a small model: a row's bits do not depend on its company.

use super::Bounds;
use super::inputs::*;
use super::rig::*;
use crate::backend::{Activation, AttentionShape, Backend, KvLayer, KvLayout, Norm, Rope, RopeStyle, Weight};
use crate::batch::{Page, SlotMove, StepBatch, StepOutput, TableUpdate, Want};
use crate::quant::QuantType;

/// A row's result does not depend on the rows beside it, on their number or their order.
pub fn company<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for ty in QuantType::all() {
        let want = alone(make, ty);
        let got = Tiny::new(make(), ty, 64).serve(&mixed_load());
        same_answers(format_args!("{ty} model, sequences in company"), &got, &want, bounds);
        assert_eq!(got.len(), want.len(), "rows served");
        let single = (0..LENGTHS.len() as u32).flat_map(|slot| decode(slot, LENGTHS[slot as usize]));
        let got = Tiny::new(make(), ty, 64).serve(&single.collect::<Vec<_>>());
        same_answers(format_args!("{ty} model, token by token"), &got, &want, bounds);
        assert_eq!(got.len(), want.len(), "rows served");
    }
}

/// A prompt cut in two anywhere gives the results of the whole prompt.
pub fn chunking<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for ty in QuantType::all() {
        let want = alone(make, ty);
        let mut tiny = Tiny::new(make(), ty, 32);
        for cut in 1..LENGTHS[0] {
            tiny.book = Book::scattered(32);
            let halves = [Piece::given(0, 0, cut), Piece::given(0, cut, LENGTHS[0] - cut)];
            let got = tiny.serve(&halves.map(|piece| Turn { moves: vec![], pieces: vec![piece] }));
            same_answers(format_args!("{ty} model, prompt cut at {cut}"), &got, &want, bounds);
        }
    }
}

/// Sequences go on undisturbed after their slots have moved.
pub fn moves<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for ty in QuantType::all() {
        let want = alone(make, ty);
        let in_slot = |slot, piece: Piece| Piece { slot, ..piece };
        let turns = [
            Turn { moves: vec![], pieces: vec![Piece::given(0, 0, 40), Piece::given(1, 0, 30)] },
            Turn {
                moves: vec![SlotMove { from: 0, to: 6 }, SlotMove { from: 1, to: 3 }],
                pieces: vec![in_slot(6, Piece::last(0, 40)), in_slot(3, Piece::last(1, 30))],
            },
            // Another sequence takes a slot that was left, and the moved ones move again.
            Turn {
                moves: vec![SlotMove { from: 6, to: 1 }],
                pieces: vec![Piece { slot: 0, ..Piece::given(3, 0, 45) }, in_slot(1, Piece::last(0, 41))],
            },
            Turn {
                moves: vec![],
                pieces: vec![in_slot(3, Piece::last(1, 31)), in_slot(1, Piece::given(0, 42, 28))],
            },
        ];
        let got = Tiny::new(make(), ty, 32).serve(&turns);
        same_answers(format_args!("{ty} model, slots moved"), &got, &want, bounds);
    }
}

/// Neither the size of pages nor their place in the pool matters.
pub fn paging<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for ty in QuantType::all() {
        let want = alone(make, ty);
        for page_positions in PAGE_POSITIONS {
            for book in [Book::scattered(page_positions), Book::contiguous(page_positions)] {
                let mut tiny = Tiny::new(make(), ty, page_positions);
                let what =
                    format_args!("{ty} model, pages of {page_positions}: {:?}", &book.free[POOL - 4..]);
                tiny.book = book.clone();
                same_answers(what, &tiny.serve(&mixed_load()), &want, bounds);
            }
        }
    }
}

/// What a page held for another sequence never leaks, not even a NaN behind the last position.
pub fn stale_pages<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for ty in QuantType::all() {
        let want = alone(make, ty);
        for page_positions in PAGE_POSITIONS {
            let mut tiny = Tiny::new(make(), ty, page_positions);
            tiny.poison();
            let what = format_args!("{ty} model, pages of {page_positions} that held NaN");
            same_answers(what, &tiny.serve(&mixed_load()), &want, bounds);
        }
    }
}

/// Lengths of the sequences that properties are shown with; a sequence's slot is its number, unless moved.
const LENGTHS: [usize; 4] = [70, 33, 1, 45];

/// What must come out: each sequence by itself, whole, on pages of 64.
fn alone<B: Backend>(make: &impl Fn() -> B, ty: QuantType) -> Answers {
    let whole = |slot: u32| vec![Piece::given(slot, 0, LENGTHS[slot as usize])];
    let turns: Vec<Turn> = (0..4).map(|slot| Turn { moves: vec![], pieces: whole(slot) }).collect();
    Tiny::new(make(), ty, 64).serve(&turns)
}

/// All sequences at once: chunks, decoded tokens and holes side by side, in changing order.
pub(super) fn mixed_load() -> Vec<Turn> {
    let turns = [
        vec![Piece::given(3, 0, 32), Piece::given(0, 0, 33), Piece::sink(6)],
        vec![Piece::given(1, 0, 31), Piece::given(0, 33, 31), Piece::last(3, 32)],
        vec![
            Piece::last(0, 64),
            Piece::last(1, 31),
            Piece::sink(7),
            Piece::given(2, 0, 1),
            Piece::last(3, 33),
        ],
        vec![Piece::given(3, 34, 11), Piece::last(1, 32), Piece::given(0, 65, 4)],
        vec![Piece::last(0, 69)],
    ];
    turns.map(|pieces| Turn { moves: vec![], pieces }).into()
}

/// One sequence, a token at a time.
fn decode(slot: u32, len: usize) -> impl Iterator<Item = Turn> {
    let first = Piece::given(slot, 0, 1);
    let pieces = std::iter::once(first).chain((1..len).map(move |position| Piece::last(slot, position)));
    pieces.map(|piece| Turn { moves: vec![], pieces: vec![piece] })
}

/// A step of the small model.
pub(super) struct Turn {
    moves: Vec<SlotMove>,
    pieces: Vec<Piece>,
}

/// One transformer layer with embedding and head, all weights and the cache in one type.
pub(super) struct Tiny<B: Backend> {
    rig: Rig<B>,
    book: Book,
    hidden: usize,
    mlp: usize,
    head_dim: usize,
    table: Weight<B::Buf>,
    norm: Norm<B::Buf>,
    q: Weight<B::Buf>,
    q_bias: B::Buf,
    k: Weight<B::Buf>,
    v: Weight<B::Buf>,
    o: Weight<B::Buf>,
    gate: Weight<B::Buf>,
    up: Weight<B::Buf>,
    down: Weight<B::Buf>,
    head: Weight<B::Buf>,
    rope: Rope<B::Buf>,
    cache: KvLayer<B::Buf>,
}

impl<B: Backend> Tiny<B> {
    const HEADS: usize = 4;
    const KV_HEADS: usize = 2;

    pub(super) fn new(backend: B, ty: QuantType, page_positions: usize) -> Tiny<B> {
        let mut rig = Rig::new(backend, limits(page_positions));
        // Odd widths, as far as the type's blocks let them be.
        let [hidden, mlp, head_dim] =
            [33, 50, 10].map(|n: usize| n.next_multiple_of(ty.row().block_elements));
        let (q_width, kv_width, vocab) =
            (Self::HEADS * head_dim, Self::KV_HEADS * head_dim, rig.limits.vocab);
        let layout = KvLayout {
            ty,
            pages: POOL,
            page_positions,
            kv_heads: Self::KV_HEADS,
            k_dim: head_dim,
            v_dim: head_dim,
        };
        let mut weight = |tag: u32, out: usize, inp: usize| {
            rig.weight(ty, out, &scaled(tag, out * inp, 2.0 / (inp as f32).sqrt()))
        };
        Tiny {
            book: Book::scattered(page_positions),
            table: weight(300, vocab, hidden),
            q: weight(301, q_width, hidden),
            k: weight(302, kv_width, hidden),
            v: weight(303, kv_width, hidden),
            o: weight(304, hidden, q_width),
            gate: weight(305, mlp, hidden),
            up: weight(306, mlp, hidden),
            down: weight(307, hidden, mlp),
            head: weight(308, vocab, hidden),
            norm: Norm { weight: rig.constant(&noise(309, hidden)), width: hidden, eps: 1e-5 },
            q_bias: rig.constant(&noise(310, q_width)),
            rope: rig.rope(head_dim, RopeStyle::Halves),
            cache: rig.cache(layout),
            rig,
            hidden,
            mlp,
            head_dim,
        }
    }

    /// Every row's logits, through the whole load.
    pub(super) fn serve(&mut self, turns: &[Turn]) -> Answers {
        let mut answers = Answers::new();
        for turn in turns {
            self.book.apply(&turn.moves);
            let mut batch = batch_of(&turn.pieces, Want::All, &mut self.book);
            batch.moves.clone_from(&turn.moves);
            self.rig.begin(batch);
            let rows: Vec<(u32, usize)> = turn.pieces.iter().flat_map(Piece::rows).collect();
            let x = self.layer(rows.len());
            self.head(&x, &rows, &mut answers);
        }
        answers.retain(|(sequence, _), _| *sequence != SINK_SEQUENCE);
        answers
    }

    fn layer(&mut self, rows: usize) -> B::Buf {
        let (q_width, kv_width) = (Self::HEADS * self.head_dim, Self::KV_HEADS * self.head_dim);
        let widths = [self.hidden, self.hidden, q_width, kv_width, kv_width, q_width, self.mlp, self.mlp];
        let [mut x, mut y, mut q, mut k, mut v, mut mixed, mut gate, mut up] =
            widths.map(|width| self.rig.output(rows * width));
        let b = &mut self.rig.backend;
        b.embed(&self.table, &mut x);
        b.norm(rows, &self.norm, &x, &mut y);
        b.matmul(rows, &self.q, Some(&self.q_bias), &y, &mut q);
        b.matmul(rows, &self.k, None, &y, &mut k);
        b.matmul(rows, &self.v, None, &y, &mut v);
        b.rope(&self.rope, Self::HEADS, self.head_dim, &mut q);
        b.rope(&self.rope, Self::KV_HEADS, self.head_dim, &mut k);
        b.store_kv(&k, &v, &mut self.cache);
        b.attention(&AttentionShape { heads: Self::HEADS, scale: 0.5 }, &q, &self.cache, &mut mixed);
        b.matmul(rows, &self.o, None, &mixed, &mut y);
        b.reduce(rows, self.hidden, &mut y);
        b.add(rows, self.hidden, &mut x, &y);
        b.norm(rows, &self.norm, &x, &mut y);
        b.matmul(rows, &self.gate, None, &y, &mut gate);
        b.matmul(rows, &self.up, None, &y, &mut up);
        b.activate(rows, self.mlp, Activation::Silu, &mut gate, Some(&up));
        b.matmul(rows, &self.down, None, &gate, &mut y);
        b.add(rows, self.hidden, &mut x, &y);
        x
    }

    /// Logits in blocks of as many rows as may exist at once. The tokens drawn are the load's, not the
    /// model's, so that every schedule sees the same text.
    fn head(&mut self, x: &B::Buf, rows: &[(u32, usize)], answers: &mut Answers) {
        let vocab = self.rig.limits.vocab;
        let mut out = StepOutput::with_capacity(&self.rig.limits);
        for start in (0..rows.len()).step_by(self.rig.limits.logit_rows) {
            let block = start..rows.len().min(start + self.rig.limits.logit_rows);
            let [mut taken, mut y, mut logits] =
                [self.hidden, self.hidden, vocab].map(|width| self.rig.output(block.len() * width));
            let b = &mut self.rig.backend;
            b.gather(block.clone(), self.hidden, x, &mut taken);
            b.norm(block.len(), &self.norm, &taken, &mut y);
            b.matmul(block.len(), &self.head, None, &y, &mut logits);
            let got = self.rig.read(&logits, block.len() * vocab, format_args!("logits of rows {block:?}"));
            answers.extend(
                rows[block.clone()].iter().copied().zip(got.chunks_exact(vocab).map(<[f32]>::to_vec)),
            );
            let next = rows[block.clone()].iter().map(|&(sequence, p)| text(sequence, p + 1));
            let forced = self.rig.put(&next.flat_map(|token| one_hot(token, vocab)).collect::<Vec<_>>());
            self.rig.backend.sample(block, &forced, &mut out);
        }
    }

    /// Fills every page with NaN, as if another sequence had left it there.
    fn poison(&mut self) {
        let size = self.rig.limits.page_positions;
        let width = Self::KV_HEADS * self.head_dim;
        for page in 1..POOL as Page {
            let tables = vec![TableUpdate { slot: 0, index: 0, page }];
            let batch = batch_of(&[Piece::given(0, 0, size)], Want::None, &mut Book::scattered(512));
            self.rig.begin(StepBatch { tables, ..batch });
            let [k, v] = [(); 2].map(|()| self.rig.put(&vec![f32::NAN; size * width]));
            self.rig.backend.store_kv(&k, &v, &mut self.cache);
        }
    }
}
