//! Properties that every backend must have, tested with small models: above all batch invariance, which means
//! that the bits of a row do not depend on the rest of the batch.

use super::Bounds;
use super::family::Family;
use super::inputs::*;
use super::pieces::*;
use super::rig::*;
use super::tiny::{Tiny, Turn};
use crate::backend::Backend;
use crate::batch::{SlotMove, Want};
use crate::quant::QuantType;

/// Tests that the result of a row depends neither on the other rows nor on their number or order.
pub fn company<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for case in Family::cases() {
        let (what, want) = (name(case), alone(make, case));
        let got = Tiny::new(make(), case, 64).serve(&mixed_load(case.0));
        same_answers(format_args!("{what}, several sequences"), &got, &want, bounds);
        assert_eq!(got.len(), want.len(), "rows served");
        let single = (0..LENGTHS.len() as u32).flat_map(|slot| decode(case.0, slot));
        let got = Tiny::new(make(), case, 64).serve(&single.collect::<Vec<_>>());
        same_answers(format_args!("{what}, token by token"), &got, &want, bounds);
        assert_eq!(got.len(), want.len(), "rows served");
    }
}

/// Tests that a prompt that is divided anywhere gives the results of the whole prompt.
pub fn chunking<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for case in Family::cases() {
        let (what, want) = (name(case), alone(make, case));
        let mut tiny = Tiny::new(make(), case, 32);
        for cut in 1..LENGTHS[0] {
            tiny.book = Book::scattered(32);
            let halves = [Piece::given(0, 0, cut), Piece::given(0, cut, LENGTHS[0] - cut)];
            let steps = halves.map(|piece| turn(case.0, &[piece]));
            same_answers(format_args!("{what}, prompt cut at {cut}"), &tiny.serve(&steps), &want, bounds);
        }
    }
}

/// Tests that sequences continue unchanged after their slots were moved.
pub fn moves<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for case in Family::cases() {
        let (family, want) = (case.0, alone(make, case));
        let in_slot = |slot, piece: Piece| Piece { slot, ..piece };
        let moved = |moves: &[(u32, u32)], pieces: &[Piece]| Turn {
            moves: moves.iter().map(|&(from, to)| SlotMove { from, to }).collect(),
            ..turn(family, pieces)
        };
        let steps = [
            moved(&[], &[Piece::given(0, 0, 40), Piece::given(1, 0, 30)]),
            moved(&[(0, 6), (1, 3)], &[in_slot(6, Piece::last(0, 40)), in_slot(3, Piece::last(1, 30))]),
            // Another sequence takes a vacated slot, and the moved sequences move again.
            moved(&[(6, 1)], &[in_slot(0, Piece::given(3, 0, 45)), in_slot(1, Piece::last(0, 41))]),
            moved(&[], &[in_slot(3, Piece::last(1, 31)), in_slot(1, Piece::given(0, 42, 28))]),
        ];
        let got = Tiny::new(make(), case, 32).serve(&steps);
        same_answers(format_args!("{}, slots moved", name(case)), &got, &want, bounds);
    }
}

/// Tests that results depend neither on the page size nor on the location of pages.
pub fn paging<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for case in Family::cases() {
        let (what, want) = (name(case), alone(make, case));
        for page_positions in PAGE_POSITIONS {
            for book in [Book::scattered(page_positions), Book::contiguous(page_positions)] {
                let mut tiny = Tiny::new(make(), case, page_positions);
                let what = format_args!("{what}, pages of {page_positions}: {:?}", &book.free[POOL - 4..]);
                tiny.book = book.clone();
                same_answers(what, &tiny.serve(&mixed_load(case.0)), &want, bounds);
            }
        }
    }
}

/// Tests that old contents of a page never leak, not even a NaN after the last position.
pub fn stale_pages<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for case in Family::cases() {
        let (what, want) = (name(case), alone(make, case));
        for page_positions in PAGE_POSITIONS {
            let mut tiny = Tiny::new(make(), case, page_positions);
            tiny.poison();
            let what = format_args!("{what}, pages of {page_positions} that held NaN");
            same_answers(what, &tiny.serve(&mixed_load(case.0)), &want, bounds);
        }
    }
}

/// Tests that logits and hidden states do not depend on which of them are requested.
pub fn wants<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for case in Family::cases() {
        let logits = alone(make, case);
        let hidden = alone_wanting(make, case, Want::Hidden);
        let mut tiny = Tiny::new(make(), case, 64);
        let mixed = turn(case.0, &[0, 1, 2, 3].map(whole));
        let encoder_outputs = vec![Want::Hidden; mixed.pieces.len() - 4];
        let selected = |at| Want::Picked { at, len: 2 };
        for (round, decoder_outputs) in [
            [Want::Hidden, Want::Last, Want::All, selected(0)],
            [selected(0), Want::Hidden, Want::Last, Want::None],
            [Want::Last, selected(2), Want::Hidden, Want::Hidden],
        ]
        .into_iter()
        .enumerate()
        {
            let outputs = encoder_outputs.iter().copied().chain(decoder_outputs).collect();
            tiny.book = Book::scattered(64);
            let got = tiny.serve(&[Turn { wants: outputs, picks: vec![7, 44, 0, 31], ..mixed.clone() }]);
            let (got_logits, got_hidden): (Answers, Answers) =
                got.into_iter().partition(|(key, _)| logits.contains_key(key));
            let what = format_args!("{}, outputs {round}", name(case));
            assert_eq!(got_logits.len(), [4, 3, 3][round], "{what}: rows with logits");
            same_answers(what, &got_logits, &logits, bounds);
            same_answers(what, &got_hidden, &hidden, bounds);
        }
    }
}

/// Lengths of the test sequences. The slot of a sequence is its number, unless moved.
const LENGTHS: [usize; 4] = [70, 33, 1, 45];

/// Describes a case.
fn name((family, ty): (Family, QuantType)) -> String {
    format!("{ty} model, {}", family.name)
}

/// Returns a span of the whole sequence of a slot.
fn whole(slot: u32) -> Piece {
    Piece::given(slot, 0, LENGTHS[slot as usize])
}

/// Returns the expected results: each sequence alone, in one span, on pages of 64.
fn alone<B: Backend>(make: &impl Fn() -> B, case: (Family, QuantType)) -> Answers {
    alone_wanting(make, case, Want::All)
}

/// Returns the results of each sequence alone, with the given output.
fn alone_wanting<B: Backend>(make: &impl Fn() -> B, case: (Family, QuantType), output: Want) -> Answers {
    let steps: Vec<Turn> = (0..4)
        .map(|slot| turn(case.0, &[whole(slot)]))
        .map(|step| Turn { wants: vec![output; step.pieces.len()], ..step })
        .collect();
    Tiny::new(make(), case, 64).serve(&steps)
}

/// Returns a step of these spans. In a model with an encoder, the first span of a sequence is preceded by its
/// encoder input.
fn turn(family: Family, pieces: &[Piece]) -> Turn {
    let is_first = |piece: &&Piece| piece.start == 0 && piece.kind == Kind::Given;
    let encoder_inputs = pieces.iter().filter(is_first).map(|piece| Piece {
        len: source_len(piece.sequence),
        kind: Kind::Source,
        ..*piece
    });
    let encoder_inputs = encoder_inputs.filter(|input| family.has_encoder && input.len > 0);
    Turn { pieces: encoder_inputs.chain(pieces.iter().copied()).collect(), ..Turn::default() }
}

/// Returns steps with all sequences: chunks, generated tokens and holes together, in varying order.
pub(super) fn mixed_load(family: Family) -> Vec<Turn> {
    let steps = [
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
    steps.map(|pieces| turn(family, &pieces)).into()
}

/// Returns steps with one sequence, one token at a time.
fn decode(family: Family, slot: u32) -> impl Iterator<Item = Turn> {
    let first = Piece::given(slot, 0, 1);
    let rest = (1..LENGTHS[slot as usize]).map(move |position| Piece::last(slot, position));
    std::iter::once(first).chain(rest).map(move |piece| turn(family, &[piece]))
}
