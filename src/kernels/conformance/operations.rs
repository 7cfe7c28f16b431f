//! Operations on buffers, rows and matrices against the oracle.

use super::Bounds;
use super::inputs::*;
use super::rig::*;
use crate::backend::{Activation, Backend, Norm, RopeStyle};
use crate::batch::{SampleMode, SampleRow, SlotMove, StepBatch, TableUpdate, Want};
use crate::quant::QuantType;

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
