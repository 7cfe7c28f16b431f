//! Attention over more positions than are summed in one go, however a backend cuts them.
//!
//! Invariant: what rows see is far longer than a block or a page, and few rows are looked at.

use super::Bounds;
use super::heads::*;
use super::inputs::*;
use super::pieces::*;
use super::rig::*;
use crate::backend::{Backend, KvTable, Mask, StepLimits};
use crate::batch::Want;
use crate::quant::QuantType;
use crate::reference::Reference;

/// Rows that are looked at: (first, how many). Some see hundreds of positions, the last see thousands.
const ASKED: [(usize, usize); 5] = [(0, 3), (500, 30), (1022, 5), (1535, 3), (2550, 50)];

fn long_limits() -> StepLimits {
    StepLimits { rows: 1200, positions: 2688, source_positions: LONG_SOURCE_LEN, ..limits(64) }
}

fn causal(window: Option<usize>) -> Look {
    Look { mask: Mask::Causal { window }, ..Look::PLAIN }
}

/// Near the oracle in every cache, and the same row by row, in chunks and in company.
pub fn attention_over_splits<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for (i, ty) in QuantType::cached().enumerate() {
        let capped = Look { softcap: Some(3.0), reach: Some(1300), ..causal(Some(1300)) };
        for look in [Look::PLAIN, [causal(Some(700)), capped, causal(Some(513))][i % 3]] {
            let (k_dim, v_dim) = [(72, 20), (16, 33)][i % 2];
            let case = Heads { ty, kv_heads: 2, heads: 4, k_dim, v_dim, scale: 0.8, look };
            let what = format_args!("{case:?}");
            let mut oracle = Rig::new(Reference::new(), long_limits());
            let want = case.of_oracle(&mut oracle, &prompt(50), Book::scattered(64));
            let mut rig = Rig::new(make(), long_limits());
            let got = case.on(&mut rig, &prompt(50), Book::scattered(64));
            case.close(what, &got, &want, bounds);
            for turns in [prompt(1), prompt(7), beside(prompt(50))] {
                let other = case.on(&mut rig, &turns, Book::contiguous(64));
                let own = other.into_iter().filter(|((sequence, _), _)| *sequence == 0).collect();
                same_answers(format_args!("{case:?}, cut or in company"), &own, &got, bounds);
            }
        }
    }
}

/// Sequence 0 up to its last row, those that are looked at in chunks.
fn prompt(chunk: usize) -> Vec<Vec<Piece>> {
    let (mut turns, mut at) = (Vec::new(), 0);
    for (first, len) in ASKED {
        let stored = (at..first).step_by(1000).map(|start| Piece::stored(0, start, 1000.min(first - start)));
        let end = first + len;
        let asked = (first..end).step_by(chunk).map(|start| Piece::given(0, start, chunk.min(end - start)));
        turns.extend(stored.chain(asked).map(|piece| vec![piece]));
        at = end;
    }
    turns
}

/// The same with rows of other sequences before and behind those that are looked at.
fn beside(mut turns: Vec<Vec<Piece>>) -> Vec<Vec<Piece>> {
    let asked = turns.iter_mut().filter(|pieces| pieces[0].kind == Kind::Given);
    for (i, pieces) in asked.enumerate() {
        pieces.insert(0, Piece::given(1, 2 * i, 2));
        pieces.extend([Piece::sink(5), Piece::given(2, 3 * i, 3)]);
    }
    turns
}

/// The same for an encoder's rows and those that look at what it made.
pub fn sources_over_splits<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let look = |mask, table| Look { mask, table, ..Look::PLAIN };
    let whole = |window| Mask::Whole { window };
    let looks = [
        look(whole(None), KvTable::Scratch),
        Look { softcap: Some(2.0), reach: Some(521), ..look(whole(Some(520)), KvTable::Scratch) },
        look(whole(None), KvTable::Cross),
        // Of its rows, the last see nothing.
        look(whole(Some(30)), KvTable::Cross),
        look(whole(Some(700)), KvTable::Cross),
    ];
    for (look, ty) in looks.into_iter().zip(QuantType::cached()) {
        let case = Heads { ty, kv_heads: 1, heads: 2, k_dim: 12, v_dim: 17, scale: 0.8, look };
        let alone = [
            vec![Piece::source(LONG_SOURCE), Piece::given(LONG_SOURCE, 0, 3)],
            vec![Piece::given(LONG_SOURCE, 3, 20)],
            vec![Piece::stored(LONG_SOURCE, 23, 1067)],
            vec![Piece::given(LONG_SOURCE, 1090, 45)],
        ];
        let mut company = alone.clone();
        company[0].insert(0, Piece::source(3));
        company[1].extend([Piece::given(3, 0, 7), Piece::given(2, 0, 2)]);
        company[3] = (1090..1135).map(|position| Piece::given(LONG_SOURCE, position, 1)).collect();
        let mut oracle = Rig::new(Reference::new(), long_limits());
        let want = case.of_oracle(&mut oracle, &company, Book::scattered(64));
        let mut rig = Rig::new(make(), long_limits());
        let got = case.on(&mut rig, &company, Book::scattered(64));
        assert_eq!(got.len(), want.len(), "{case:?}: rows");
        case.close(format_args!("{case:?}"), &got, &want, bounds);
        let alone = case.on(&mut rig, &alone, Book::contiguous(64));
        same_answers(format_args!("{case:?}, alone"), &alone, &got, bounds);
    }
}

/// What a window does not let a row see enters nothing, be it NaN and in the middle of what is summed in one go.
pub fn unseen_splits<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for ty in QuantType::cached().filter(|ty| !ty.is_blocked()) {
        let look = causal(Some(700));
        let case = Heads { ty, kv_heads: 2, heads: 4, k_dim: 16, v_dim: 20, scale: 0.8, look };
        let mut rig = Rig::new(make(), long_limits());
        let ask = |rig: &mut Rig<B>, kind: Kind| {
            let unseen =
                [(0, 1000), (1000, 101)].map(|(start, len)| Piece { kind, ..Piece::stored(0, start, len) });
            let stored = unseen.into_iter().chain([Piece::stored(0, 1101, 99), Piece::stored(0, 1200, 600)]);
            let asked = (0..4).map(|i| Piece::given(0, 1800 + i, 1)).chain([Piece::given(0, 1804, 20)]);
            let turns: Vec<Vec<Piece>> = stored.chain(asked).map(|piece| vec![piece]).collect();
            case.on(rig, &turns, Book::scattered(64))
        };
        // The first row looked at sees those from 1101 on, in the middle of a split and of a block.
        let want = ask(&mut rig, Kind::Stored);
        let got = ask(&mut rig, Kind::Poison);
        same_answers(format_args!("{case:?}, NaN before the window"), &got, &want, bounds);
    }
}

/// Scores of minus infinity weigh nothing, even where all of a split are; where all are, there is no answer.
pub fn infinitely_small_scores<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    const DIM: usize = 16;
    let ty = QuantType::F32;
    let look = Look::PLAIN;
    let case = Heads { ty, kv_heads: 1, heads: 1, k_dim: DIM, v_dim: DIM, scale: 1.0, look };
    // 1290 rows, of which those in `small` weigh nothing, and half of the others give 1, half 3.
    for small in [512..1024, 0..512, 0..1024, 512..1280, 3..1289, 0..1290] {
        // Products of the least number are too small for F32; of infinity, for any.
        let least = if small.len() == 1290 { f32::NEG_INFINITY } else { f32::MIN };
        let key = |p: usize| if small.contains(&p) { least } else { 0.0 };
        let value = |p: usize| if small.contains(&p) { 1e6 } else { [1.0, 3.0][p % 2] };
        let mut rig = Rig::new(make(), long_limits());
        let (mut cache, mut book) = (case.cache(&mut rig), Book::scattered(64));
        for start in [0, 645] {
            rig.begin(batch_of(&[Piece::given(0, start, 645)], Want::None, &mut book));
            let wide = |of: &dyn Fn(usize) -> f32| -> Vec<f32> {
                (start * DIM..(start + 645) * DIM).map(|i| of(i / DIM)).collect()
            };
            let [k, v] = [wide(&key), wide(&value)].map(|numbers| rig.put(&numbers));
            rig.backend.store_kv(KvTable::Own, &k, &v, &mut cache);
        }
        rig.begin(batch_of(&[Piece::given(0, 1289, 1)], Want::None, &mut book));
        let q = rig.put(&[1.0; DIM]);
        let out = case.attend(&mut rig, &q, &cache, DIM);
        let what = format_args!("scores of {small:?} are -inf");
        let out = rig.read(&out, DIM, what);
        if small.len() == 1290 {
            assert!(out.iter().all(|out| out.is_nan()), "{what}: {out:?}");
            continue;
        }
        let seen: Vec<usize> = (0..1290).filter(|p| !small.contains(p)).collect();
        let want = seen.iter().map(|p| value(*p)).sum::<f32>() / seen.len() as f32;
        close(what, &out, &[want; DIM], (bounds.attention)(ty), |_| 3.0);
    }
}

/// The bits of rows that see many splits: what must not differ between two backends that promise the same arithmetic.
pub fn split_bits<B: Backend>(make: &impl Fn() -> B) -> Vec<u32> {
    let mut bits = Vec::new();
    for ty in QuantType::cached() {
        for look in [Look::PLAIN, causal(Some(700))] {
            let case = Heads { ty, kv_heads: 2, heads: 4, k_dim: 20, v_dim: 33, scale: 0.8, look };
            let mut rig = Rig::new(make(), long_limits());
            for turns in [prompt(1), beside(prompt(25))] {
                let answers = case.on(&mut rig, &turns, Book::scattered(64));
                bits.extend(answers.values().flatten().map(|value| value.to_bits()));
            }
        }
    }
    bits
}
