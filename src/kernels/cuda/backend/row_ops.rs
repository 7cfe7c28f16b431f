//! Operations on rows of numbers.
//!
//! Invariant: numbers beyond the shape of a buffer are neither read nor written.

use super::launch::{Device, THREADS, blocks_for, check_len, f32_bytes};
use super::program::KernelName;
use super::steps::Steps;
use crate::backend::{
    Activation, DeviceError, DynamicNtk, Norm, NormKind, OutputColumns, Rope, RopeStyle, Weight, Xielu,
};
use crate::batch::StepRow;
use crate::cuda::{Arguments, CudaBuf};
use std::ops::Range;

/// Computes [`crate::Backend::embed`].
pub(super) fn embed(
    device: &mut Device,
    steps: &Steps,
    table: &Weight<CudaBuf>,
    first: usize,
    x: &mut CudaBuf,
) -> Result<(), DeviceError> {
    let rows = steps.row_count();
    let arguments = steps.rows(Arguments::default()).int(first).int(table.n).int(table.k);
    let arguments = arguments.buf(&table.buf, matrix_bytes(table)).buf(x, f32_bytes(rows * table.k));
    device.launch(KernelName::weights("embed", table.ty), ([rows, 1, 1], THREADS), arguments)
}

/// Computes [`crate::Backend::embed_positions`].
pub(super) fn embed_positions(
    device: &mut Device,
    steps: &Steps,
    table: &Weight<CudaBuf>,
    (offset, type_rows): (usize, usize),
    x: &mut CudaBuf,
) -> Result<(), DeviceError> {
    let rows = steps.row_count();
    let last = steps.state.rows().iter().map(|row| row.position_row(offset, type_rows)).max();
    assert!(last.is_none_or(|last| last < table.n), "position {last:?} has no embedding");
    let arguments = steps.rows(Arguments::default()).int(offset).int(type_rows).int(table.k);
    let arguments = arguments.buf(&table.buf, matrix_bytes(table)).buf(x, f32_bytes(rows * table.k));
    device.launch(KernelName::weights("embed_positions", table.ty), ([rows, 1, 1], THREADS), arguments)
}

/// Returns the bytes of a matrix.
pub(super) fn matrix_bytes(w: &Weight<CudaBuf>) -> usize {
    w.ty.bytes(w.k).expect("rows are whole blocks; this is a bug") * w.n
}

/// Normalizes rows: `y` may be `x`.
pub(super) fn norm(
    device: &mut Device,
    rows: usize,
    norm: &Norm<CudaBuf>,
    (x, y): (&CudaBuf, &CudaBuf),
) -> Result<(), DeviceError> {
    let Norm { kind, weight, bias, sets, width, eps } = norm;
    let is_layer_norm = usize::from(*kind == NormKind::Layer);
    let arguments = Arguments::default().int(*width).int(*sets).float(*eps).int(is_layer_norm);
    let arguments = arguments.optional(weight.as_ref(), f32_bytes(sets * width));
    let arguments = arguments.optional(bias.as_ref(), f32_bytes(sets * width));
    let arguments = arguments.buf(x, f32_bytes(rows * width)).buf(y, f32_bytes(rows * width));
    device.launch(KernelName::rows("normalize"), ([rows, 1, 1], THREADS), arguments)
}

/// Computes [`crate::Backend::rope_angles`].
pub(super) fn rope_angles(
    device: &mut Device,
    steps: &Steps,
    rope: &Rope<CudaBuf>,
    angles: &mut CudaBuf,
) -> Result<(), DeviceError> {
    let (rows, dims) = (steps.row_count(), rope.dims);
    check_len(angles, rows * dims);
    // With dynamic scaling, sequences beyond the context have angles of their own.
    let context = rope.dynamic_ntk.map_or(usize::MAX, |stretch| stretch.context);
    let is_covered =
        |row: &StepRow| row.position < rope.positions || steps.state.span_of(row).reserved > context;
    assert!(steps.state.rows().iter().all(is_covered), "the table covers {} positions", rope.positions);
    let mut least = 0;
    for (number, (bound, table)) in rope.tables.iter().enumerate() {
        let is_last = number + 1 == rope.tables.len();
        let most = if is_last { context } else { (*bound).min(context) };
        let most = u32::try_from(most).unwrap_or(u32::MAX);
        let arguments = steps.rows(Arguments::default()).int(dims).word(least).word(most);
        let arguments = arguments.buf(table, f32_bytes(rope.positions * dims));
        let arguments = arguments.buf(angles, f32_bytes(rows * dims));
        device.launch(KernelName::rows("rope_angles"), ([rows, 1, 1], 64), arguments)?;
        least = most.saturating_add(1);
    }
    for (number, row) in steps.state.rows().iter().enumerate() {
        let reserved = steps.state.span_of(row).reserved;
        if let Some(stretch) = rope.dynamic_ntk.filter(|stretch| reserved > stretch.context) {
            let bytes = stretched_angles(&stretch, dims, row.position, reserved);
            device.context.upload(angles, f32_bytes(number * dims), &bytes)?;
        }
    }
    Ok(())
}

/// Returns cosine and sine of each pair at a position of a sequence beyond the context, as bytes. The host
/// computes them, because a GPU has no powers in F64 at a reasonable rate.
fn stretched_angles(stretch: &DynamicNtk, dims: usize, position: usize, reserved: usize) -> Vec<u8> {
    let base = stretch.base(dims, reserved);
    let angles = (0..dims / 2).map(|pair| DynamicNtk::angle(base, dims, pair, position));
    angles.flat_map(|angle| [angle.cos() as f32, angle.sin() as f32]).flat_map(f32::to_le_bytes).collect()
}

/// Computes [`crate::Backend::rope`] for `rows` rows.
pub(super) fn rope(
    device: &mut Device,
    rows: usize,
    (rope, angles): (&Rope<CudaBuf>, &CudaBuf),
    (heads, head_dim): (usize, usize),
    x: &mut CudaBuf,
) -> Result<(), DeviceError> {
    assert!(rope.dims <= head_dim && rope.dims.is_multiple_of(2), "{} of {head_dim} dims", rope.dims);
    let adjacent = usize::from(rope.style == RopeStyle::GptJ);
    let arguments = Arguments::default().int(heads).int(head_dim).int(rope.dims).int(adjacent);
    let arguments = arguments.buf(angles, f32_bytes(rows * rope.dims));
    let arguments = arguments.buf(x, f32_bytes(rows * heads * head_dim));
    device.launch(KernelName::rows("rope"), ([rows, 1, 1], THREADS), arguments)
}

/// Computes [`crate::Backend::activate`] for `n` numbers.
pub(super) fn activate(
    device: &mut Device,
    n: usize,
    act: Activation,
    gate: &mut CudaBuf,
    up: Option<&CudaBuf>,
) -> Result<(), DeviceError> {
    let code = match act {
        Activation::Relu => 0,
        Activation::SquaredRelu => 1,
        Activation::Gelu => 2,
        Activation::GeluTanh => 3,
        Activation::QuickGelu => 4,
        Activation::Silu => 5,
        Activation::Tanh => 6,
        Activation::ClampedSwiglu => 7,
        Activation::Xielu(_) => 8,
    };
    let Xielu { positive, negative, linear, bound } = match act {
        Activation::Xielu(numbers) => numbers,
        _ => Xielu::default(),
    };
    let arguments = Arguments::default().long(n).int(code);
    let arguments = arguments.float(positive).float(negative).float(linear).float(bound);
    let arguments = arguments.buf(gate, f32_bytes(n)).optional(up, f32_bytes(n));
    device.launch(KernelName::rows("activate"), (blocks_for(n), THREADS), arguments)
}

/// Computes x += factor * y for `n` numbers.
pub(super) fn add(
    device: &mut Device,
    n: usize,
    factor: f32,
    x: &mut CudaBuf,
    y: &CudaBuf,
) -> Result<(), DeviceError> {
    let arguments = Arguments::default().long(n).float(factor);
    let arguments = arguments.buf(x, f32_bytes(n)).buf(y, f32_bytes(n));
    device.launch(KernelName::rows("add"), (blocks_for(n), THREADS), arguments)
}

/// Runs a kernel of one parameter on each of `n` numbers.
pub(super) fn map(
    entry: &'static str,
    device: &mut Device,
    n: usize,
    parameter: f32,
    x: &mut CudaBuf,
) -> Result<(), DeviceError> {
    let arguments = Arguments::default().long(n).float(parameter).buf(x, f32_bytes(n));
    device.launch(KernelName::rows(entry), (blocks_for(n), THREADS), arguments)
}

/// Computes [`crate::Backend::gate_rows`].
pub(super) fn gate_rows(
    device: &mut Device,
    rows: usize,
    width: usize,
    gate: &CudaBuf,
    x: &mut CudaBuf,
) -> Result<(), DeviceError> {
    let n = rows * width;
    let arguments = Arguments::default().long(n).int(width).buf(gate, f32_bytes(rows)).buf(x, f32_bytes(n));
    device.launch(KernelName::rows("gate_rows"), (blocks_for(n), THREADS), arguments)
}

/// Computes [`crate::Backend::copy_columns`].
pub(super) fn copy_columns(
    device: &mut Device,
    (rows, copies): (usize, usize),
    (width, columns, x): (usize, Range<usize>, &CudaBuf),
    (to, y): (OutputColumns, &mut CudaBuf),
) -> Result<(), DeviceError> {
    assert!(columns.end <= width, "columns {columns:?} of {width}");
    assert!(to.first + columns.len() <= to.of, "{} columns from {} of {}", columns.len(), to.first, to.of);
    let n = rows * copies * columns.len();
    let arguments = Arguments::default().long(n).int(copies).int(width).int(columns.start).int(columns.len());
    let arguments = arguments.int(to.of).int(to.first);
    let arguments = arguments.buf(x, f32_bytes(rows * width)).buf(y, f32_bytes(rows * copies * to.of));
    device.launch(KernelName::rows("copy_columns"), (blocks_for(n), THREADS), arguments)
}

/// Computes [`crate::Backend::gather_output_rows`].
pub(super) fn gather(
    device: &mut Device,
    steps: &Steps,
    outputs: Range<usize>,
    width: usize,
    (x, y): (&CudaBuf, &mut CudaBuf),
) -> Result<(), DeviceError> {
    let n = outputs.len() * width;
    assert!(outputs.end <= steps.state.wanted().len(), "outputs {outputs:?}");
    let arguments = steps.wanted(Arguments::default().long(n).int(width), &outputs);
    let arguments = arguments.buf(x, f32_bytes(steps.row_count() * width)).buf(y, f32_bytes(n));
    device.launch(KernelName::rows("gather_rows"), (blocks_for(n), THREADS), arguments)
}
