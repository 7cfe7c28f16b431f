//! What attention reads and how: the cache, the page tables, masks and biases.
//!
//! Invariant: plain data; what a row sees follows from its position, its span and the mask alone.

use super::DeviceError;
use crate::quant::QuantType;

/// The KV cache of one layer, every page of it.
pub struct KvLayer<Buf> {
    pub k: Buf,
    pub v: Buf,
    pub layout: KvLayout,
}

/// The size of a layer's KV cache. How a page is laid out inside is the backend's own business.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// One of [`QuantType::cached`].
    pub ty: QuantType,
    /// Pages in the pool, the sink (page 0) included.
    pub pages: usize,
    /// Token positions of one page; a multiple of [`KvLayout::BLOCK`].
    pub page_positions: usize,
    pub kv_heads: usize,
    /// Width of one head of K.
    pub k_dim: usize,
    /// Width of one head of V.
    pub v_dim: usize,
}

impl KvLayout {
    /// Positions whose scores are reduced together in attention. Pages hold whole blocks, so that the
    /// order of summation does not depend on the page size.
    pub const BLOCK: usize = 32;
    /// Elements that a head's V may be padded to a multiple of, and those of half a byte.
    const PADDING: usize = 16;
    const PADDING_OF_HALVES: usize = 32;

    /// Refuses types that keys and values are not stored in.
    pub fn check_type(&self) -> Result<(), DeviceError> {
        match QuantType::cached().any(|ty| ty == self.ty) {
            true => Ok(()),
            false => {
                Err(DeviceError::Unsupported(format!("keys and values cannot be stored as {}", self.ty)))
            }
        }
    }

    /// Bytes of K and of V of one position of one KV head, as much as any backend takes; `None` when they overflow.
    pub fn head_bytes(&self) -> Option<[usize; 2]> {
        let padding = if self.ty == QuantType::G4_B64 { Self::PADDING_OF_HALVES } else { Self::PADDING };
        let padded = self.v_dim.checked_next_multiple_of(padding)?;
        Some([self.ty.run_bytes(self.k_dim)?, self.ty.run_bytes(padded)?])
    }

    /// Bytes of one position, of all heads; `None` when they overflow.
    pub fn position_bytes(&self) -> Option<usize> {
        let [k, v] = self.head_bytes()?;
        k.checked_add(v)?.checked_mul(self.kv_heads)
    }

    /// Bytes of one page; `None` when they overflow.
    pub fn page_bytes(&self) -> Option<usize> {
        self.position_bytes()?.checked_mul(self.page_positions)
    }
}

/// One attention operation.
pub struct AttentionShape<'a, Buf> {
    /// Query heads; a multiple of the cache's KV heads, which consecutive query heads share.
    pub heads: usize,
    /// Multiplies the product of query and key.
    pub scale: f32,
    /// Scaled scores s become `cap * tanh(s / cap)`.
    pub softcap: Option<f32>,
    pub mask: Mask,
    /// The page table that leads to keys and values.
    pub table: KvTable,
    /// Added to the scores, after the cap.
    pub bias: Option<&'a DistanceBias<Buf>>,
}

/// Which positions a row sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// Those up to its own ([`KvTable::Own`], [`KvTable::Scratch`]); of them the last `window`, its own counted and
    /// so at least 1, if there is one.
    Causal { window: Option<usize> },
    /// Every position of its span ([`KvTable::Scratch`]) or of its source ([`KvTable::Cross`]); of them those within
    /// `window` positions of its own on either side, if there is one.
    Whole { window: Option<usize> },
}

impl Mask {
    /// Whether the mask has a meaning over that table's positions.
    pub fn suits(self, table: KvTable) -> bool {
        match self {
            Mask::Causal { window } => table != KvTable::Cross && window != Some(0),
            Mask::Whole { .. } => table != KvTable::Own,
        }
    }
}

/// Which page table is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum KvTable {
    /// The sequence's own.
    Own,
    /// The one over what its encoder made: positions are those of its source.
    Cross,
    /// None: an encoder's span sees itself alone, in a cache that lasts one layer.
    Scratch,
}

/// A bias that depends on head and distance, as ALiBi's (Press et al. 2022) and T5's (Raffel et al. 2020) do. F32,
/// finite, `(heads, 2 * reach - 1)`: the entry for key position k and query position q is at `k - q + reach - 1`.
pub struct DistanceBias<Buf> {
    pub table: Buf,
    pub heads: usize,
    /// Positions: one more than the largest distance.
    pub reach: usize,
}
