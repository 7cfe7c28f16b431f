//! The element type of activations, which each backend chooses.
//!
//! Invariant: bytes in host memory are little-endian.

use crate::quant::QuantType;

/// The element type of the activation buffers of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationType {
    /// 32-bit floating point.
    F32,
    /// 16-bit floating point with the exponent of F32.
    BF16,
    /// 16-bit floating point of IEEE 754.
    F16,
}

impl ActivationType {
    /// Returns the bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            ActivationType::F32 => 4,
            ActivationType::BF16 | ActivationType::F16 => 2,
        }
    }

    /// Replaces the contents of `values` by the elements in `bytes`, in F32.
    pub fn decode(self, bytes: &[u8], values: &mut Vec<f32>) {
        values.resize(bytes.len() / self.size(), 0.0);
        self.quant_type().dequantize(bytes, values);
    }

    /// Appends the elements in `bytes` to `to`, as F32 in little-endian bytes.
    pub fn append_f32(self, bytes: &[u8], to: &mut Vec<u8>) {
        if self == ActivationType::F32 {
            return to.extend_from_slice(bytes);
        }
        let mut values = Vec::new();
        self.decode(bytes, &mut values);
        let start = to.len();
        to.resize(start + 4 * values.len(), 0);
        QuantType::F32.quantize(&values, &mut to[start..]);
    }

    /// Returns the number format of the elements.
    fn quant_type(self) -> QuantType {
        match self {
            ActivationType::F32 => QuantType::F32,
            ActivationType::BF16 => QuantType::BF16,
            ActivationType::F16 => QuantType::F16,
        }
    }
}
