//! One suite for every backend: each operation against the oracle, and the properties no backend may lack.
//!
//! Inputs are pseudo-random but fixed. Every buffer an operation may write ends in a guard that must stay as
//! it is. A failure is a panic that names operation, sizes, element and both values. Whether a backend can
//! be made on this machine is the caller's to find out, and to report.
//! Invariant: the suite knows a backend by its trait only, never by the layout of its memory.

use crate::backend::{
    Activation, AttentionShape, Backend, KvLayer, KvLayout, Norm, Rope, RopeStyle, StepLimits, Weight,
};
use crate::batch::{
    Page, PageCopy, SampleMode, SampleRow, SampledRow, SlotMove, Span, SpanModel, SpanTable, SpanTokens,
    StepBatch, StepOutput, TableUpdate, Want,
};
use crate::quant::QuantType;
use crate::random::philox;
use crate::reference::{Reference, draw, logprobs};
use std::collections::BTreeMap;
use std::fmt::Arguments;

/// How far a backend may be from the oracle, relative to the magnitude of the terms it sums.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Of matrix products, by the weights' type.
    pub matmul: fn(QuantType) -> f32,
    /// Of attention, by the cache's type; errors of the scores are scaled by the scores' largest magnitude.
    pub attention: fn(QuantType) -> f32,
    /// Of norms, rotations, activations and log-probabilities.
    pub elementwise: f32,
    /// Between a backend's own results for one row in different company. 0 asks for the same bits.
    pub company: f32,
}

impl Bounds {
    /// F32 arithmetic throughout, weights and cache widened exactly, and a fixed order of summation.
    pub const F32_FIXED_ORDER: Bounds =
        Bounds { matmul: |_| 2e-6, attention: |_| 2e-6, elementwise: 1e-6, company: 0.0 };
}

/// Runs the whole suite.
pub fn run<B: Backend>(make: impl Fn() -> B, bounds: Bounds) {
    let (make, bounds) = (&make, &bounds);
    buffers(make);
    slot_state(make);
    embed(make);
    gather(make);
    add_and_reduce(make);
    activate(make, bounds);
    norm(make, bounds);
    rope(make, bounds);
    matmul(make, bounds);
    matmul_company(make, bounds);
    attention(make, bounds);
    attention_long(make, bounds);
    copy_pages(make, bounds);
    sample(make, bounds);
    company(make, bounds);
    chunking(make, bounds);
    moves(make, bounds);
    paging(make, bounds);
    stale_pages(make, bounds);
}

/// The bits of all rows' results of a small model under a mixed load, for every number format: what must not
/// differ between two backends that promise the same arithmetic, such as thread counts.
pub fn fingerprint<B: Backend>(make: &impl Fn() -> B) -> Vec<u32> {
    let mut bits = Vec::new();
    for ty in QuantType::all() {
        let answers = Tiny::new(make(), ty, 32).serve(&mixed_load());
        bits.extend(answers.values().flatten().map(|value| value.to_bits()));
    }
    bits
}

const WIDTHS: [usize; 7] = [1, 7, 16, 33, 64, 172, 300];
const ROWS: [usize; 7] = [1, 2, 3, 5, 7, 17, 64];
const HEAD_DIMS: [usize; 6] = [8, 10, 12, 64, 80, 128];
const KV_HEADS: [usize; 3] = [1, 2, 3];
const GROUPS: [usize; 3] = [1, 2, 8];
const PAGE_POSITIONS: [usize; 3] = [32, 64, 128];
/// Pages of every test's pool, the sink included.
const POOL: usize = 64;

fn limits(page_positions: usize) -> StepLimits {
    StepLimits {
        slots: 8,
        rows: 160,
        logit_rows: 8,
        positions: 512,
        page_positions,
        top_logprobs: 8,
        vocab: 57,
    }
}

// ---- Operations against the oracle

/// Fresh memory is zero, and what goes up comes down, at any offset.
pub fn buffers<B: Backend>(make: &impl Fn() -> B) {
    let mut backend = make();
    assert!(!backend.describe().is_empty());
    for len in [1, 3, 64, 4097, 1 << 20] {
        let mut buf = backend.alloc(len).expect("room for a small buffer");
        let mut expected = vec![0u8; len];
        let mut got = vec![1u8; len];
        backend.download(&buf, 0, &mut got);
        assert!(got == expected, "alloc of {len} bytes: not zero");
        for (round, offset) in [0, len / 3, len - 1].into_iter().enumerate() {
            let count = (len - offset).div_ceil(round + 1);
            let bytes: Vec<u8> = (0..count).map(|i| (i * 7 + round + 1) as u8).collect();
            expected[offset..][..count].copy_from_slice(&bytes);
            backend.upload(&mut buf, offset, &bytes);
            backend.download(&buf, 0, &mut got);
            assert!(got == expected, "upload of {count} bytes to {offset} of {len}");
            let mut part = vec![0; count];
            backend.download(&buf, offset, &mut part);
            assert!(part == bytes, "download of {count} bytes from {offset} of {len}");
        }
    }
}

/// The last token follows draws and moves, never scores and sinks; page tables follow updates and moves.
pub fn slot_state<B: Backend>(make: &impl Fn() -> B) {
    let mut rig = Rig::new(make(), limits(32));
    let width = 7;
    let vocab = rig.limits.vocab;
    let table = rig.weight(QuantType::F32, vocab, &noise(1, vocab * width));
    let scored = |token| SampleRow { mode: SampleMode::Score(token), logprob: true, ..SampleRow::GREEDY };

    let first: Vec<Piece> = (0..4).map(|slot| Piece::given(slot, 0, 1)).collect();
    rig.draw(&first, &[10, 11, 12, 13], &[SampleRow::GREEDY; 4], &[]);
    let second = [Piece::given(0, 1, 1), Piece::last(1, 1), Piece::sink(2), Piece::given(3, 1, 3)];
    let mut samples = [SampleRow::GREEDY; 6];
    samples[1] = scored(21);
    let out = rig.draw(&second, &[20, 30, 22, 23, 24, 25], &samples, &[]);
    let tokens: Vec<u32> = out.rows.iter().map(|row| row.token).collect();
    assert_eq!(tokens, [20, 21, 22, 23, 24, 25], "tokens of a step of draws and a score");

    let move_to = |from, to| SlotMove { from, to };
    let third = [Piece::last(2, 2), Piece::last(7, 2), Piece::last(6, 2), Piece::last(3, 4)];
    rig.draw(&third, &[0; 4], &[SampleRow::GREEDY; 4], &[move_to(0, 7), move_to(1, 6)]);
    let mut x = rig.output(4 * width);
    rig.backend.embed(&table, &mut x);
    let x = rig.read(&x, 4 * width, format_args!("embed of last tokens"));
    for (row, token) in [12, 20, 11, 25].into_iter().enumerate() {
        let expected = &noise(1, vocab * width)[token * width..][..width];
        assert_eq!(
            &x[row * width..][..width],
            expected,
            "embedded last token of row {row}, {token} expected"
        );
    }
    page_tables(&mut rig);
}

fn page_tables<B: Backend>(rig: &mut Rig<B>) {
    let updates = [(1, 0, 9), (1, 3, 4), (5, 15, 63), (1, 0, 8)];
    let tables = updates.map(|(slot, index, page)| TableUpdate { slot, index, page }).to_vec();
    let batch = || batch_of(&[Piece::sink(7)], Want::None, &mut Book::contiguous(32));
    rig.begin(StepBatch { tables, ..batch() });
    let moves = vec![SlotMove { from: 1, to: 2 }];
    // Updates come after moves, so this one is the target's.
    let tables = vec![TableUpdate { slot: 2, index: 1, page: 33 }];
    rig.begin(StepBatch { moves, tables, ..batch() });
    for (slot, index, page) in [(1, 0, 8), (1, 3, 4), (5, 15, 63), (2, 0, 8), (2, 1, 33), (2, 3, 4)] {
        assert_eq!(rig.backend.table(slot)[index], page, "page table of slot {slot}, entry {index}");
    }
}

/// Rows of the table come out as their codes say, exactly.
pub fn embed<B: Backend>(make: &impl Fn() -> B) {
    let (device, oracle) = &mut rigs(make, 32);
    for ty in QuantType::all() {
        for width in WIDTHS.into_iter().filter(|&width| ty.bytes(width).is_some()) {
            for rows in ROWS {
                let values = noise(2, device.limits.vocab * width);
                let got = embed_on(device, ty, &values, rows);
                let want = embed_on(oracle, ty, &values, rows);
                same(format_args!("embed {ty}, {rows} rows of {width}"), &got, &want, 0.0);
            }
        }
    }
}

fn embed_on<B: Backend>(rig: &mut Rig<B>, ty: QuantType, values: &[f32], rows: usize) -> Vec<f32> {
    let width = values.len() / rig.limits.vocab;
    let table = rig.weight(ty, rig.limits.vocab, values);
    rig.begin_rows(rows);
    let mut x = rig.output(rows * width);
    rig.backend.embed(&table, &mut x);
    rig.read(&x, rows * width, format_args!("embed {ty}, {rows} rows of {width}"))
}

/// Blocks of the wanted rows come out as they are, whatever spans they belong to.
pub fn gather<B: Backend>(make: &impl Fn() -> B) {
    let mut rig = Rig::new(make(), limits(32));
    let pieces = [Piece::given(3, 7, 5), Piece::sink(1), Piece::given(0, 0, 20), Piece::last(2, 9)];
    let wants = [Want::Last, Want::None, Want::All, Want::Last];
    for width in WIDTHS {
        let mut batch = batch_of(&pieces, Want::None, &mut Book::scattered(32));
        for (span, want) in batch.spans.iter_mut().zip(wants) {
            span.want = want;
        }
        let wanted: Vec<usize> = batch.wanted_rows().collect();
        let rows = batch.rows();
        batch.samples = vec![SampleRow::GREEDY; wanted.len()];
        rig.begin(batch);
        let values = noise(3, rows * width);
        let x = rig.put(&values);
        for range in [0..wanted.len(), 0..1, 1..9, 9..wanted.len(), 4..4] {
            let mut y = rig.output(range.len() * width);
            rig.backend.gather(range.clone(), width, &x, &mut y);
            let what = format_args!("gather of wanted rows {range:?}, width {width}");
            let got = rig.read(&y, range.len() * width, what);
            let want: Vec<f32> = wanted[range.clone()]
                .iter()
                .flat_map(|row| &values[row * width..][..width])
                .copied()
                .collect();
            same(what, &got, &want, 0.0);
        }
    }
}

/// One addition, rounded once; and a stage of one member sums nothing.
pub fn add_and_reduce<B: Backend>(make: &impl Fn() -> B) {
    let mut rig = Rig::new(make(), limits(32));
    for (rows, width) in sizes() {
        rig.begin_rows(rows);
        let n = rows * width;
        let (a, b) = (noise(4, n), noise(5, n));
        let (mut x, y) = (rig.put_mut(&a), rig.put(&b));
        rig.backend.add(rows, width, &mut x, &y);
        let what = format_args!("add of {rows} rows of {width}");
        let want: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        same(what, &rig.read(&x, n, what), &want, 0.0);
        rig.backend.reduce(rows, width, &mut x);
        let what = format_args!("reduce of {rows} rows of {width}");
        same(what, &rig.read(&x, n, what), &want, 0.0);
    }
}

/// The activation, with and without the product, far into its tails.
pub fn activate<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let (device, oracle) = &mut rigs(make, 32);
    for (case, (rows, width)) in sizes().enumerate() {
        let mut gate = scaled(6, rows * width, [1.0, 10.0, 60.0][case % 3]);
        for (value, edge) in
            gate.iter_mut().zip([-1000.0, 1000.0, 0.0, -88.0, 88.0, -0.0, -104.0]).skip(case % 7)
        {
            *value = edge;
        }
        let up = (case % 2 == 0).then(|| noise(7, rows * width));
        let got = activate_on(device, rows, &gate, up.as_deref());
        let want = activate_on(oracle, rows, &gate, up.as_deref());
        let what = format_args!("silu of {rows} rows of {width}, product {}", up.is_some());
        close(what, &got, &want, bounds.elementwise, |i| want[i].abs());
    }
}

fn activate_on<B: Backend>(rig: &mut Rig<B>, rows: usize, gate: &[f32], up: Option<&[f32]>) -> Vec<f32> {
    rig.begin_rows(rows);
    let width = gate.len() / rows;
    let mut x = rig.put_mut(gate);
    let up = up.map(|up| rig.put(up));
    rig.backend.activate(rows, width, Activation::Silu, &mut x, up.as_ref());
    rig.read(&x, gate.len(), format_args!("silu of {rows} rows of {width}"))
}

/// The norm, over small and large values and an all-zero row.
pub fn norm<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let (device, oracle) = &mut rigs(make, 32);
    for (case, (rows, width)) in sizes().chain([(3, 4099)]).enumerate() {
        let mut x = scaled(8, rows * width, [1.0, 1e-3, 1e3][case % 3]);
        x[(rows - 1) * width..].fill(if rows > 1 { 0.0 } else { 0.5 });
        let weight = noise(9, width);
        let eps = [1e-5, 1e-6][case % 2];
        let got = norm_on(device, &x, &weight, eps);
        let want = norm_on(oracle, &x, &weight, eps);
        let what = format_args!("norm of {rows} rows of {width}");
        close(what, &got, &want, bounds.elementwise, |i| want[i].abs());
    }
}

fn norm_on<B: Backend>(rig: &mut Rig<B>, x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let width = weight.len();
    let rows = x.len() / width;
    rig.begin_rows(rows);
    let norm = Norm { weight: rig.constant(weight), width, eps };
    let (x, mut y) = (rig.put(x), rig.output(rows * width));
    rig.backend.norm(rows, &norm, &x, &mut y);
    rig.read(&y, rows * width, format_args!("norm of {rows} rows of {width}"))
}

/// Rotations of both styles, whole and partial heads, rows of several sequences at any position.
pub fn rope<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let (device, oracle) = &mut rigs(make, 32);
    for head_dim in HEAD_DIMS {
        for heads in [1, 3, 8] {
            for dims in [2, head_dim / 4 * 2, head_dim] {
                for style in [RopeStyle::Halves, RopeStyle::Interleaved] {
                    let case = RopeCase { head_dim, heads, dims, style };
                    let (x, got) = case.on(device);
                    let (_, want) = case.on(oracle);
                    close(format_args!("{case:?}"), &got, &want, bounds.elementwise, |_| 2.0);
                    let rest = |values: &[f32]| -> Vec<f32> {
                        values.chunks_exact(head_dim).flat_map(|head| &head[dims..]).copied().collect()
                    };
                    same(format_args!("{case:?}, dims not rotated"), &rest(&got), &rest(&x), 0.0);
                }
            }
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct RopeCase {
    head_dim: usize,
    heads: usize,
    dims: usize,
    style: RopeStyle,
}

impl RopeCase {
    /// What went in and what came out.
    fn on<B: Backend>(&self, rig: &mut Rig<B>) -> (Vec<f32>, Vec<f32>) {
        let pieces = [Piece::given(2, 100, 5), Piece::last(0, 511), Piece::sink(4), Piece::given(1, 0, 10)];
        rig.begin(batch_of(&pieces, Want::None, &mut Book::scattered(32)));
        let x = noise(10, 17 * self.heads * self.head_dim);
        let rope = rig.rope(self.dims, self.style);
        let mut buf = rig.put_mut(&x);
        rig.backend.rope(&rope, self.heads, self.head_dim, &mut buf);
        let got = rig.read(&buf, x.len(), format_args!("{self:?}"));
        (x, got)
    }
}

/// Products of every weight type at odd sizes, with and without bias, and with a long inner dimension.
pub fn matmul<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let (device, oracle) = &mut rigs(make, 32);
    let square = WIDTHS.iter().flat_map(|&out| WIDTHS.iter().map(move |&inp| (out, inp)));
    for (shape, (out, inp)) in square.chain([(9, 4100), (700, 65)]).enumerate() {
        for ty in QuantType::all().filter(|ty| ty.bytes(inp).is_some()) {
            let whole = Product::new(ty, 64, out, inp, (shape + ty as usize).is_multiple_of(2));
            let (want, magnitudes) = (whole.on(oracle), whole.magnitudes().on(oracle));
            for rows in ROWS {
                let case = whole.rows(64 - rows, rows);
                let (got, first) = (case.on(device), (64 - rows) * out);
                close(format_args!("{case}"), &got, &want[first..], (bounds.matmul)(ty), |i| {
                    magnitudes[first + i]
                });
            }
        }
    }
}

/// A row's product is the same whatever the number of rows beside it.
pub fn matmul_company<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let mut rig = Rig::new(make(), limits(32));
    for (out, inp) in [(33, 300), (172, 64), (9, 4100), (300, 7)] {
        for ty in QuantType::all().filter(|ty| ty.bytes(inp).is_some()) {
            let whole = Product::new(ty, 150, out, inp, out % 2 == 0);
            let want = whole.on(&mut rig);
            for rows in ROWS {
                for first in [0, 1, 63, 150 - rows] {
                    let part = whole.rows(first, rows);
                    let got = part.on(&mut rig);
                    let what = format_args!("{part}, rows {first}.. of 150");
                    same(what, &got, &want[first * out..][..rows * out], bounds.company);
                }
            }
        }
    }
}

struct Product {
    ty: QuantType,
    out: usize,
    inp: usize,
    codes: Vec<u8>,
    bias: Option<Vec<f32>>,
    x: Vec<f32>,
}

impl Product {
    fn new(ty: QuantType, rows: usize, out: usize, inp: usize, with_bias: bool) -> Product {
        let codes = codes(ty, &noise(11, out * inp));
        Product { ty, out, inp, codes, bias: with_bias.then(|| noise(12, out)), x: noise(13, rows * inp) }
    }

    fn count(&self) -> usize {
        self.x.len() / self.inp
    }

    /// The same product of some of its rows.
    fn rows(&self, first: usize, rows: usize) -> Product {
        let x = self.x[first * self.inp..][..rows * self.inp].to_vec();
        Product { codes: self.codes.clone(), bias: self.bias.clone(), x, ..*self }
    }

    /// The sum of the terms' magnitudes in place of the sum of the terms.
    fn magnitudes(&self) -> Product {
        let mut weights = vec![0.0; self.out * self.inp];
        (self.ty.row().dequantize)(&self.codes, &mut weights);
        let abs = |values: &[f32]| -> Vec<f32> { values.iter().map(|v| v.abs()).collect() };
        let codes = codes(QuantType::F32, &abs(&weights));
        Product { ty: QuantType::F32, codes, bias: self.bias.as_deref().map(abs), x: abs(&self.x), ..*self }
    }

    fn on<B: Backend>(&self, rig: &mut Rig<B>) -> Vec<f32> {
        let rows = self.count();
        rig.begin_rows(rows);
        let w = rig.coded(self.ty, self.out, self.inp, &self.codes);
        let bias = self.bias.as_ref().map(|bias| rig.constant(bias));
        let (x, mut y) = (rig.put(&self.x), rig.output(rows * self.out));
        rig.backend.matmul(rows, &w, bias.as_ref(), &x, &mut y);
        rig.read(&y, rows * self.out, format_args!("{self}"))
    }
}

impl std::fmt::Display for Product {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Product { ty, out, inp, .. } = self;
        write!(f, "matmul {ty}, {} x {inp} by {out} x {inp}, bias {}", self.count(), self.bias.is_some())
    }
}

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

/// Draws, scores and reports, exactly as `reference::draw` and `reference::logprobs` define them.
pub fn sample<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for (vocab, steps) in [(1, 1), (5, 6), (1000, 8), (32_000, 1)] {
        let limits = StepLimits { vocab, rows: SAMPLED, logit_rows: SAMPLED, ..limits(32) };
        let mut rig = Rig::new(make(), limits);
        for step in 0..steps {
            sample_step(&mut rig, step, bounds);
        }
    }
}

/// Rows sampled in one step.
const SAMPLED: usize = 64;

fn sample_step<B: Backend>(rig: &mut Rig<B>, step: u32, bounds: &Bounds) {
    let vocab = rig.limits.vocab;
    let logits: Vec<Vec<f32>> = (0..SAMPLED as u32).map(|row| logits_row(step, row, vocab)).collect();
    let samples: Vec<SampleRow> = (0..SAMPLED as u32).map(|row| sample_row(step, row, vocab)).collect();
    let mut batch = batch_of(&[Piece::given(0, 0, SAMPLED)], Want::All, &mut Book::scattered(32));
    batch.samples = samples.clone();
    let mut out = StepOutput::with_capacity(&rig.limits);
    rig.begin(batch);
    for block in [0..1, 1..40, 40..SAMPLED] {
        let buf = rig.put(&logits[block.clone()].concat());
        rig.backend.sample(block, &buf, &mut out);
    }
    assert_eq!(out.rows.len(), SAMPLED, "sampled rows, vocabulary {vocab}");
    let mut top_at = 0;
    for (row, ((result, logits), sample)) in out.rows.iter().zip(&logits).zip(&samples).enumerate() {
        let what = format_args!("sample, vocabulary {vocab}, step {step}, row {row}, {sample:?}");
        let expected = match sample.mode {
            SampleMode::Draw => draw(logits, sample),
            SampleMode::Score(token) => token,
        };
        assert_eq!(result.token, expected, "{what}: token");
        assert_eq!(result.top_at, top_at, "{what}: place among the reported");
        top_at += result.top_len;
        check_logprobs(what, &out, result, (logits, sample), bounds);
    }
    assert_eq!(out.top.len(), top_at as usize, "reported tokens, vocabulary {vocab}");
}

fn check_logprobs(
    what: Arguments,
    out: &StepOutput,
    result: &SampledRow,
    (logits, sample): (&[f32], &SampleRow),
    bounds: &Bounds,
) {
    let expected = logprobs(logits, sample.top_logprobs.into());
    assert_eq!(result.top_len as usize, expected.top.len(), "{what}: number reported");
    let near = |name: Arguments, got: f32, logit: f32| {
        let want = expected.of(logit);
        let allowed = bounds.elementwise * (2.0 * logit.abs() + want.abs() + 1.0);
        // What a row without a distribution reports is nobody's concern.
        let ok = !want.is_finite() || (got - want).abs() <= allowed;
        assert!(ok, "{what}: {name}: got {got}, oracle {want}, allowed difference {allowed}");
    };
    if sample.logprob {
        near(format_args!("log-probability"), result.logprob, logits[result.token as usize]);
    } else {
        assert!(result.logprob.is_nan(), "{what}: a log-probability nobody asked for");
    }
    for (rank, (got, want)) in out.top_of(result).iter().zip(&expected.top).enumerate() {
        if want.1.is_finite() {
            assert_eq!(got.0, want.0, "{what}: token at rank {rank}");
            near(format_args!("log-probability at rank {rank}"), got.1, logits[got.0 as usize]);
        }
    }
}

/// Logits of many kinds: spread, tied, equal, flat, masked, with NaN and infinities.
fn logits_row(step: u32, row: u32, vocab: usize) -> Vec<f32> {
    let values = scaled(200 + step * 1000 + row, vocab, 10.0);
    let every = |n: usize, fill: f32| move |(i, v): (usize, f32)| if i % n == n - 1 { fill } else { v };
    let indexed = values.iter().copied().enumerate();
    match row % 12 {
        0..=2 => values,
        3 => values.iter().map(|v| v.round()).collect(),
        4 => vec![1.5; vocab],
        5 => values.iter().map(|v| v * 1e-3).collect(),
        6 => indexed.map(every(3, f32::NAN)).collect(),
        7 => indexed.map(|(i, v)| if i % 7 == 0 { v } else { f32::NEG_INFINITY }).collect(),
        8 => indexed.map(every(5, f32::INFINITY)).collect(),
        9 => vec![[f32::NAN, f32::NEG_INFINITY][row as usize % 24 / 12]; vocab],
        10 => values.iter().map(|v| v * 1e3).collect(),
        _ => values.iter().map(|v| v.abs().sqrt() * [0.0, -0.0, 1.0][v.to_bits() as usize % 3]).collect(),
    }
}

fn sample_row(step: u32, row: u32, vocab: usize) -> SampleRow {
    let [a, b, c, d] = philox([row, step, 5, 0], [77, 0]);
    let pick = |word: u32, shift: u32, n: usize| (word >> shift) as usize % n;
    let logprob = pick(d, 0, 2) == 0;
    let score = pick(d, 4, 6) == 0;
    SampleRow {
        mode: if score { SampleMode::Score(a % vocab as u32) } else { SampleMode::Draw },
        position: row + step,
        seed: u64::from(a) << 32 | u64::from(b),
        temperature: [1.0, 0.7, 1.8, 0.2, 0.0, 1e-4, 100.0][pick(b, 3, 7)],
        top_k: [0, 0, 0, 1, 2, 40, vocab as u32, vocab as u32 + 5][pick(c, 0, 8)],
        top_p: [1.0, 1.0, 0.95, 0.5, 1e-6, 0.999_999][pick(c, 8, 6)],
        min_p: [0.0, 0.0, 0.02, 0.5, 1.0][pick(c, 16, 5)],
        logprob,
        top_logprobs: if logprob { pick(d, 8, 9) as u8 } else { 0 },
    }
}

// ---- Properties, shown by a small model

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
fn mixed_load() -> Vec<Turn> {
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
struct Turn {
    moves: Vec<SlotMove>,
    pieces: Vec<Piece>,
}

/// One transformer layer with embedding and head, all weights and the cache in one type.
struct Tiny<B: Backend> {
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

    fn new(backend: B, ty: QuantType, page_positions: usize) -> Tiny<B> {
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
    fn serve(&mut self, turns: &[Turn]) -> Answers {
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

// ---- The rig: a backend with its slots made, and batches for it

/// Results by sequence and position.
type Answers = BTreeMap<(u32, usize), Vec<f32>>;

/// The sequence that the rows of holes are counted to.
const SINK_SEQUENCE: u32 = 90;

/// Behind the end of every buffer that an operation writes; to be found unchanged.
const GUARD: [f32; 5] = [-1.25e30, 77.0, 3.5, -1e-3, 0.625];

/// Behind the end of every buffer that an operation reads; to be found in no result.
const TRAP: [f32; 5] = [f32::NAN; 5];

struct Rig<B: Backend> {
    backend: B,
    limits: StepLimits,
    step: u64,
}

impl<B: Backend> Rig<B> {
    fn new(mut backend: B, limits: StepLimits) -> Rig<B> {
        backend.prepare(&limits).expect("room for a small step");
        Rig { backend, limits, step: 0 }
    }

    /// Makes a batch the current step.
    fn begin(&mut self, mut batch: StepBatch) {
        batch.step = self.step;
        self.step += 1;
        self.backend.begin(&batch);
    }

    /// Makes a step of that many rows current, for operations that look at nothing else of it.
    fn begin_rows(&mut self, rows: usize) {
        let book = &mut Book::scattered(self.limits.page_positions);
        self.begin(batch_of(&[Piece::given(0, 0, rows)], Want::None, book));
    }

    /// A step that draws (or scores) the given tokens: logits leave no other choice.
    fn draw(
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
    fn constant(&mut self, values: &[f32]) -> B::Buf {
        let bytes = codes(QuantType::F32, values);
        let mut buf = self.backend.alloc(bytes.len()).expect("room for a small buffer");
        self.backend.upload(&mut buf, 0, &bytes);
        buf
    }

    /// A buffer of these values to read.
    fn put(&mut self, values: &[f32]) -> B::Buf {
        self.constant(&[values, &TRAP].concat())
    }

    /// A buffer of these values to read and write.
    fn put_mut(&mut self, values: &[f32]) -> B::Buf {
        self.constant(&[values, &GUARD].concat())
    }

    /// A buffer to write `n` values to; NaN until then.
    fn output(&mut self, n: usize) -> B::Buf {
        self.put_mut(&vec![f32::NAN; n])
    }

    /// The `n` values of a buffer that was written, whose guard must be as it was.
    fn read(&mut self, buf: &B::Buf, n: usize, what: Arguments) -> Vec<f32> {
        let mut bytes = vec![0; (n + GUARD.len()) * 4];
        self.backend.download(buf, 0, &mut bytes);
        assert!(bytes[n * 4..] == codes(QuantType::F32, &GUARD), "{what}: wrote beyond its {n} values");
        let mut values = vec![0.0; n];
        (QuantType::F32.row().dequantize)(&bytes[..n * 4], &mut values);
        values
    }

    /// A matrix of `out` rows of these values.
    fn weight(&mut self, ty: QuantType, out: usize, values: &[f32]) -> Weight<B::Buf> {
        self.coded(ty, out, values.len() / out, &codes(ty, values))
    }

    fn coded(&mut self, ty: QuantType, out: usize, inp: usize, bytes: &[u8]) -> Weight<B::Buf> {
        let weight = self.backend.upload_weight(ty, out, inp, bytes).expect("room for a small matrix");
        assert_eq!((weight.ty, weight.out, weight.inp), (ty, out, inp), "shape of an uploaded weight");
        weight
    }

    fn cache(&mut self, layout: KvLayout) -> KvLayer<B::Buf> {
        let cache = self.backend.alloc_kv(layout).expect("room for a small cache");
        assert_eq!(cache.layout, layout, "layout of an allocated cache");
        cache
    }

    /// Angles for every position within the limits.
    fn rope(&mut self, dims: usize, style: RopeStyle) -> Rope<B::Buf> {
        let positions = self.limits.positions;
        let angle = |p: usize, i: usize| p as f64 * 10_000f64.powf(-2.0 * i as f64 / dims as f64);
        let pair = |p, i| [angle(p, i).cos() as f32, angle(p, i).sin() as f32];
        let table: Vec<f32> =
            (0..positions).flat_map(|p| (0..dims / 2).flat_map(move |i| pair(p, i))).collect();
        Rope { cos_sin: self.constant(&table), positions, dims, style }
    }
}

/// The backend to look at, and the oracle.
fn rigs<B: Backend>(make: &impl Fn() -> B, page_positions: usize) -> (Rig<B>, Rig<Reference>) {
    (Rig::new(make(), limits(page_positions)), Rig::new(Reference::new(), limits(page_positions)))
}

/// A span of a test's batch.
#[derive(Clone, Copy, Debug)]
struct Piece {
    sequence: u32,
    slot: u32,
    start: usize,
    len: usize,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Tokens given with the batch.
    Given,
    /// The token drawn last in the slot.
    Last,
    /// A hole: a row whose result nobody wants.
    Sink,
}

impl Piece {
    /// Tokens of the sequence that has this slot's number.
    fn given(slot: u32, start: usize, len: usize) -> Piece {
        Piece { sequence: slot, slot, start, len, kind: Kind::Given }
    }

    fn last(slot: u32, start: usize) -> Piece {
        Piece { sequence: slot, slot, start, len: 1, kind: Kind::Last }
    }

    fn sink(slot: u32) -> Piece {
        Piece { sequence: SINK_SEQUENCE, slot, start: 0, len: 1, kind: Kind::Sink }
    }

    /// Sequence and position of each of its rows.
    fn rows(&self) -> impl Iterator<Item = (u32, usize)> + use<> {
        let Piece { sequence, start, len, .. } = *self;
        (start..start + len).map(move |position| (sequence, position))
    }
}

/// A prompt of `len` tokens of sequence 0, in chunks.
fn chunks(len: usize, chunk: usize) -> Vec<Vec<Piece>> {
    (0..len).step_by(chunk).map(|start| vec![Piece::given(0, start, chunk.min(len - start))]).collect()
}

/// Who has which pages.
#[derive(Clone, Debug)]
struct Book {
    page_positions: usize,
    /// By slot.
    held: Vec<Vec<Page>>,
    /// Taken from the end.
    free: Vec<Page>,
}

impl Book {
    fn contiguous(page_positions: usize) -> Book {
        Book { page_positions, held: vec![Vec::new(); 8], free: (1..POOL as Page).rev().collect() }
    }

    /// Every page once, neighbours far apart.
    fn scattered(page_positions: usize) -> Book {
        let pages = POOL as Page - 1;
        Book {
            free: (0..pages).map(|i| 1 + (i * 37 + 11) % pages).collect(),
            ..Book::contiguous(page_positions)
        }
    }

    /// Gives the slot pages for its first `positions`.
    fn cover(&mut self, slot: u32, positions: usize, tables: &mut Vec<TableUpdate>) {
        let held = &mut self.held[slot as usize];
        while held.len() * self.page_positions < positions {
            let page = self.free.pop().expect("the test's pool is large enough");
            tables.push(TableUpdate { slot, index: held.len() as u32, page });
            held.push(page);
        }
    }

    fn apply(&mut self, moves: &[SlotMove]) {
        for moved in moves {
            self.held[moved.to as usize] = std::mem::take(&mut self.held[moved.from as usize]);
        }
    }
}

/// The pieces as a batch; with wanted rows, each is drawn greedily.
fn batch_of(pieces: &[Piece], want: Want, book: &mut Book) -> StepBatch {
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

// ---- Inputs and comparisons

/// The token of a sequence at a position; below every test's vocabulary.
fn text(sequence: u32, position: usize) -> u32 {
    philox([sequence, position as u32, 0, 0], [3, 0])[0] % 57
}

/// Logits that leave no choice.
fn one_hot(token: u32, vocab: usize) -> impl Iterator<Item = f32> {
    (0..vocab as u32).map(move |id| if id == token { 5.0 } else { 0.0 })
}

/// `n` pseudo-random numbers in [-1, 1] with full mantissas, the same for the same `tag`.
pub fn noise(tag: u32, n: usize) -> Vec<f32> {
    let words = (0..n.div_ceil(4) as u32).flat_map(|i| philox([i, tag, 0, 0], [1, 2]));
    words.take(n).map(|word| word as i32 as f32 / (1u32 << 31) as f32).collect()
}

fn scaled(tag: u32, n: usize, factor: f32) -> Vec<f32> {
    noise(tag, n).into_iter().map(|v| v * factor).collect()
}

fn sizes() -> impl Iterator<Item = (usize, usize)> {
    ROWS.into_iter().flat_map(|rows| WIDTHS.map(|width| (rows, width)))
}

fn codes(ty: QuantType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; ty.bytes(values.len()).expect("the suite's sizes are whole blocks")];
    (ty.row().quantize)(values, &mut bytes);
    bytes
}

/// Each element within `bound` times its magnitude of the oracle's.
fn close(what: Arguments, got: &[f32], want: &[f32], bound: f32, magnitude: impl Fn(usize) -> f32) {
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let allowed = bound * magnitude(i) + f32::MIN_POSITIVE;
        let ok = (got - want).abs() <= allowed;
        assert!(ok, "{what}: element {i}: got {got}, oracle {want}, allowed difference {allowed}");
    }
}

/// The same bits, or, with a bound, each element within `bound` times the largest.
fn same(what: Arguments, got: &[f32], want: &[f32], bound: f32) {
    if bound > 0.0 {
        let largest = want.iter().fold(0f32, |largest, v| largest.max(v.abs()));
        return close(what, got, want, bound, |_| largest);
    }
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(got.to_bits() == want.to_bits(), "{what}: element {i}: got {got:e}, expected {want:e}");
    }
}

/// All rows of `got` as in `want`.
fn same_answers(what: Arguments, got: &Answers, want: &Answers, bounds: &Bounds) {
    for ((sequence, position), got) in got {
        let what = format_args!("{what}, sequence {sequence}, position {position}");
        same(what, got, &want[&(*sequence, *position)], bounds.company);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{CpuBackend, CpuConfig, Isa};

    #[test]
    fn the_oracle_conforms_to_itself() {
        run(Reference::new, Bounds { elementwise: 0.0, ..Bounds::F32_FIXED_ORDER });
    }

    /// The whole suite for every number of threads, whose bits must agree.
    fn cpu_conforms(isa: Isa) {
        let new = |threads| CpuBackend::new(CpuConfig { threads, isa });
        if let Err(error) = new(1) {
            eprintln!("skipped: {}: {error}", isa.name());
            return;
        }
        let make = |threads| move || new(threads).expect("this machine has the instruction set");
        let alone = fingerprint(&make(1));
        for threads in [1, 2, 3] {
            run(make(threads), Bounds::F32_FIXED_ORDER);
            assert!(fingerprint(&make(threads)) == alone, "{}: {threads} threads, other bits", isa.name());
        }
    }

    #[test]
    fn cpu_with_avx512_conforms() {
        cpu_conforms(Isa::Avx512);
    }

    #[test]
    fn cpu_with_avx2_conforms() {
        cpu_conforms(Isa::Avx2);
    }

    #[test]
    fn portable_cpu_conforms() {
        cpu_conforms(Isa::Portable);
    }
}
