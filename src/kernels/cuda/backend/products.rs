//! Products of rows with weights.
//!
//! Invariant: the sum of an output runs in an order that follows from the format and the columns of the
//! weight.

use super::CudaBackend;
use super::launch::{Device, f32_bytes};
use super::program::KernelName;
use super::row_ops::matrix_bytes;
use super::scratch::Scratch;
use crate::backend::{
    DeviceError, Epilogue, Gemm, HeldShapes, OutputColumns, StepLimits, Weight, weights_of,
};
use crate::cuda::{Arguments, CudaBuf};
use crate::quant::{ActivationPrecision, INT8_BLOCK_LEN, OperandFormat, QuantType};

/// Number of scratch buffers: quants of inputs (rows, k), and the scale and the sum of the quants of each
/// block (rows, k / 32, 2).
pub(super) const BUFFERS: usize = 2;

/// Threads of a block of threads.
const THREADS: usize = 128;
/// Rows of a tile: `TILE_ROWS` of `products.cu`.
const TILE_ROWS: usize = 8;
/// Outputs of a tile: `OUTPUTS` of `products.cu`.
const TILE_OUTPUTS: usize = 2;
/// Bytes of the scale and the sum of a block.
const LEVELS_BYTES: usize = 2 * size_of::<f32>();

/// Returns the bytes of the scratch buffers.
pub(super) fn scratch_bytes(
    limits: &StepLimits,
    shapes: &HeldShapes,
    precision: ActivationPrecision,
) -> [usize; BUFFERS] {
    let rows = limits.rows_at_once().max(limits.logit_rows);
    let widths = shapes.weights.iter().filter(|(ty, _)| takes_int8(*ty, precision)).map(|(_, k)| *k);
    let inputs = rows * widths.max().unwrap_or(0);
    [inputs, inputs / INT8_BLOCK_LEN * LEVELS_BYTES]
}

/// Returns whether inputs of products with weights of this format are quantized.
fn takes_int8(ty: QuantType, precision: ActivationPrecision) -> bool {
    ty.operand_format(precision) == OperandFormat::Int8
}

/// Returns the number of lanes that compute outputs from `k` columns together.
fn output_lanes(is_int8: bool, k: usize) -> usize {
    match is_int8 {
        // Octets, of which each has at least a group of 8 blocks.
        true => 8 * (1 << k.div_ceil(8 * INT8_BLOCK_LEN).ilog2().min(2)),
        // Up to 16 columns a lane, or more with all lanes.
        false => k.div_ceil(16).next_power_of_two().clamp(8, 32),
    }
}

/// The kernels of products, with their scratch memory.
pub(super) struct Products<'a> {
    pub device: &'a mut Device,
    pub scratch: &'a Scratch<BUFFERS>,
    pub precision: ActivationPrecision,
}

/// The place of a product's result.
struct Destination<'a> {
    y: &'a CudaBuf,
    /// Columns of a row, or of each head of a row.
    columns: OutputColumns,
    /// Number of heads, which have matrices of their own.
    heads: usize,
    /// Bias of all columns.
    bias: Option<&'a CudaBuf>,
    /// Whether the result is added to what is there.
    accumulates: bool,
}

impl Products<'_> {
    /// Loads the kernels for weights of a format.
    pub fn load(&mut self, ty: QuantType) -> Result<(), DeviceError> {
        if takes_int8(ty, self.precision) {
            self.device.load(KernelName::rows("quantize"))?;
        }
        self.device.load(self.kernel(ty))
    }

    /// Computes GEMMs with the same input x (rows, k), which is quantized once.
    pub fn multiply_all(
        &mut self,
        rows: usize,
        x: &CudaBuf,
        gemms: &[Gemm<CudaBuf>],
    ) -> Result<(), DeviceError> {
        let mut is_quantized = false;
        for gemm in gemms {
            let (y, accumulates) = match &gemm.epilogue {
                Epilogue::Set(y) => (&**y, false),
                Epilogue::Add { x, .. } => (&**x, true),
            };
            for (w, columns) in weights_of(gemm.w, gemm.rest) {
                if takes_int8(w.ty, self.precision) && !is_quantized {
                    self.quantize(rows * w.k, x)?;
                    is_quantized = true;
                }
                self.multiply(
                    rows,
                    w,
                    x,
                    Destination { y, columns, heads: 1, bias: gemm.bias, accumulates },
                )?;
            }
        }
        Ok(())
    }

    /// Quantizes `n` numbers.
    fn quantize(&mut self, n: usize, x: &CudaBuf) -> Result<(), DeviceError> {
        let blocks = n / INT8_BLOCK_LEN;
        let Scratch([quants, levels]) = self.scratch;
        let arguments = Arguments::default().long(blocks).buf(x, f32_bytes(n));
        let arguments = arguments.buf(quants, n).buf(levels, blocks * LEVELS_BYTES);
        let grid = [n.div_ceil(THREADS), 1, 1];
        self.device.launch(KernelName::rows("quantize"), (grid, THREADS as u32), arguments)
    }

    /// Multiplies x (rows, heads, k) by a weight (heads * n, k). If it takes int8, x has been quantized.
    fn multiply(
        &mut self,
        rows: usize,
        w: &Weight<CudaBuf>,
        x: &CudaBuf,
        to: Destination,
    ) -> Result<(), DeviceError> {
        let (OutputColumns { first, of }, heads) = (to.columns, to.heads);
        let n = w.n / heads;
        assert!(first + n <= of, "columns {first} to {} of {of}", first + n);
        if rows == 0 || n == 0 {
            return Ok(());
        }
        let is_int8 = takes_int8(w.ty, self.precision);
        let lanes = output_lanes(is_int8, w.k);
        let arguments = Arguments::default().int(n).int(w.k).int(rows).int(lanes);
        let arguments = arguments.buf(&w.buf, matrix_bytes(w));
        let arguments = match to.bias {
            Some(bias) => arguments.buf_at(bias, f32_bytes(first), f32_bytes(n)),
            None => arguments.optional(None, 0),
        };
        let arguments = arguments.int(of).int(heads).int(usize::from(to.accumulates));
        let arguments = arguments.buf_at(to.y, f32_bytes(first), f32_bytes((rows * heads - 1) * of + n));
        let Scratch([quants, levels]) = self.scratch;
        let inputs = rows * heads * w.k;
        let arguments = match is_int8 {
            true => arguments.buf(quants, inputs).buf(levels, inputs / INT8_BLOCK_LEN * LEVELS_BYTES),
            false => arguments.buf(x, f32_bytes(inputs)),
        };
        let blocks = rows.div_ceil(TILE_ROWS) * n.div_ceil(TILE_OUTPUTS * THREADS / lanes);
        self.device.launch(self.kernel(w.ty), ([blocks, heads, 1], THREADS as u32), arguments)
    }

    fn kernel(&self, ty: QuantType) -> KernelName {
        let entry = if takes_int8(ty, self.precision) { "multiply_int8" } else { "multiply_f32" };
        KernelName::weights(entry, ty)
    }
}

impl CudaBackend {
    /// Returns the kernels of products.
    pub(super) fn products(&mut self) -> Products<'_> {
        let (scratch, precision) = (&self.product_scratch, self.sizes.precision);
        Products { device: &mut self.device, scratch, precision }
    }

    /// Computes [`crate::Backend::matmul_to`], or with several heads [`crate::Backend::matmul_heads`].
    pub(super) fn product(
        &mut self,
        (rows, heads): (usize, usize),
        (w, columns): (&Weight<CudaBuf>, OutputColumns),
        bias: Option<&CudaBuf>,
        (x, y): (&CudaBuf, &mut CudaBuf),
    ) -> Result<(), DeviceError> {
        let mut products = self.products();
        if takes_int8(w.ty, products.precision) {
            products.quantize(rows * heads * w.k, x)?;
        }
        products.multiply(rows, w, x, Destination { y, columns, heads, bias, accumulates: false })
    }
}
