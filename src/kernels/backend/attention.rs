//! The plain data of attention: the KV cache, page tables, masks and relative position biases.
//!
//! Invariant: which positions a row attends to follows from its position, its span and the mask alone.

use super::DeviceError;
use crate::quant::QuantType;

/// The KV cache of one layer: all its pages.
pub struct KvLayer<Buf> {
    pub k: Buf,
    pub v: Buf,
    pub layout: KvLayout,
}

/// Dimensions of the KV cache of one layer. The memory layout within a page is private to the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Storage type; one of [`QuantType::kv_cache_types`].
    pub ty: QuantType,
    /// Pages in the pool, including the null page (page 0).
    pub pages: usize,
    /// KV page size in tokens; a multiple of [`KvLayout::BLOCK_POSITIONS`].
    pub page_positions: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Width of one head of K.
    pub k_dim: usize,
    /// Width of one head of V.
    pub v_dim: usize,
    /// Whether V of a position is the first `v_dim` numbers of its K, and is not stored again: the latent of
    /// multi-head latent attention (DeepSeek-AI 2024, section 2.1).
    pub v_in_k: bool,
}

impl KvLayout {
    /// Positions whose scores attention reduces together. Pages hold whole blocks, so that the order of
    /// summation does not depend on the page size.
    pub const BLOCK_POSITIONS: usize = 32;
    /// Multiple to which a backend may pad the V of a head, or a K that has it, in elements.
    const HEAD_PADDING: usize = 16;
    /// Multiple for 4-bit elements.
    const HEAD_PADDING_4_BIT: usize = 32;

    /// Checks that keys and values can be stored in [`Self::ty`]. Fails with [`DeviceError::Unsupported`].
    pub fn check_type(&self) -> Result<(), DeviceError> {
        assert!(!self.v_in_k || self.v_dim <= self.k_dim, "K cannot have a V that is longer; this is a bug");
        match QuantType::kv_cache_types().any(|ty| ty == self.ty) {
            true => Ok(()),
            false => {
                Err(DeviceError::Unsupported(format!("keys and values cannot be stored as {}", self.ty)))
            }
        }
    }

    /// Returns how many numbers of a V are stored apart from K.
    pub fn stored_v_dim(&self) -> usize {
        if self.v_in_k { 0 } else { self.v_dim }
    }

    /// Returns the bytes of K and of V for one position of one KV head, an upper bound for every backend;
    /// `None` on overflow.
    pub fn head_bytes(&self) -> Option<[usize; 2]> {
        let padding =
            if self.ty == QuantType::G4_B64 { Self::HEAD_PADDING_4_BIT } else { Self::HEAD_PADDING };
        if self.v_in_k {
            return Some([self.ty.run_bytes(self.k_dim.checked_next_multiple_of(padding)?)?, 0]);
        }
        let padded = self.v_dim.checked_next_multiple_of(padding)?;
        Some([self.ty.run_bytes(self.k_dim)?, self.ty.run_bytes(padded)?])
    }

    /// Returns the bytes of one position, of all heads; `None` on overflow.
    pub fn position_bytes(&self) -> Option<usize> {
        let [k, v] = self.head_bytes()?;
        k.checked_add(v)?.checked_mul(self.kv_heads)
    }

    /// Returns the bytes of K and of V in the whole cache, for heads of these sizes in bytes. Fails with
    /// [`DeviceError::OutOfMemory`] on overflow.
    pub(crate) fn cache_bytes(&self, heads: [usize; 2]) -> Result<[usize; 2], DeviceError> {
        let positions = self.pages.checked_mul(self.page_positions);
        let vectors = positions.and_then(|positions| positions.checked_mul(self.kv_heads));
        let [k, v] = heads.map(|bytes| bytes.checked_mul(vectors?));
        k.zip(v).map(|(k, v)| [k, v]).ok_or_else(|| DeviceError::OutOfMemory {
            bytes: usize::MAX,
            reason: "the KV cache is larger than the address space".into(),
        })
    }

    /// Returns the bytes of one page; `None` on overflow.
    pub fn page_bytes(&self) -> Option<usize> {
        self.position_bytes()?.checked_mul(self.page_positions)
    }
}

/// Parameters of one attention operation.
pub struct AttentionShape<'a, Buf> {
    /// Query heads; a multiple of the KV heads of the cache. Consecutive query heads share a KV head.
    pub heads: usize,
    /// Factor of the dot product of query and key, usually 1 / sqrt(k_dim).
    pub scale: f32,
    /// Logit softcap: a scaled score s becomes `cap * tanh(s / cap)`.
    pub softcap: Option<f32>,
    /// Positions that each row attends to.
    pub mask: Mask,
    /// The page table through which keys and values are found.
    pub table: KvTable,
    /// Relative position bias, added to the scores after the softcap.
    pub bias: Option<&'a RelativeBias<Buf>>,
    /// Attention sinks (Xiao et al. 2024): a score of each head for nothing, F32 (heads), finite. It takes a
    /// part of the softmax's weights, and has no value.
    pub sinks: Option<&'a Buf>,
    /// Distance scores that are added to the dot products, before the scale: for a bidirectional mask
    /// and [`KvTable::Scratch`] only.
    pub distances: Option<DistanceScores<'a, Buf>>,
}

impl<Buf> AttentionShape<'_, Buf> {
    /// Returns parameters without a cap, bias, sinks or distance scores.
    pub fn plain(heads: usize, scale: f32, mask: Mask, table: KvTable) -> Self {
        let (softcap, bias, sinks, distances) = (None, None, None, None);
        AttentionShape { heads, scale, softcap, mask, table, bias, sinks, distances }
    }

    /// Asserts that the mask is valid for the table, and that distance scores are for whole spans.
    pub(crate) fn assert_valid(&self) {
        let (mask, table) = (self.mask, self.table);
        assert!(mask.is_valid_for(table), "mask {mask:?} cannot be used with page table {table:?}");
        let are_whole = matches!(mask, Mask::Bidirectional { .. }) && table == KvTable::Scratch;
        assert!(self.distances.is_none() || are_whole, "distances need whole spans; this is a bug");
    }
}

/// An attention mask: the positions that a row attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// All positions up to and including its own ([`KvTable::Own`], [`KvTable::Window`],
    /// [`KvTable::Scratch`]). A `window` limits them to the last `window` positions, its own included; it is
    /// at least 1.
    Causal { window: Option<usize> },
    /// The positions of its own chunk, up to and including its own: position 0 begins the first chunk of
    /// `chunk` positions, which is at least 1.
    Chunked { chunk: usize },
    /// All positions of its span ([`KvTable::Scratch`]) or of its encoder input ([`KvTable::Cross`]). A
    /// `window` limits them to at most `window` positions on either side of its own.
    Bidirectional { window: Option<usize> },
}

impl Mask {
    /// Returns whether the mask is defined for the positions of `table`.
    pub fn is_valid_for(self, table: KvTable) -> bool {
        match self {
            Mask::Causal { window } => table != KvTable::Cross && window != Some(0),
            Mask::Chunked { chunk } => table != KvTable::Cross && chunk > 0,
            Mask::Bidirectional { .. } => !table.holds_sequence(),
        }
    }

    /// Returns the largest number of positions, its own and the last before it, that a causal row sees;
    /// `None` if there is no such number.
    pub fn causal_window(self) -> Option<usize> {
        match self {
            Mask::Causal { window } => window,
            Mask::Chunked { chunk } => Some(chunk),
            Mask::Bidirectional { .. } => None,
        }
    }
}

/// Page tables of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum KvTable {
    /// The table of the sequence itself, for causal self-attention.
    Own,
    /// The table of the sequence for layers that see a window of it only. Their pages have numbers of their
    /// own. Entries of positions that no later row sees may refer to pages of other positions; they are never
    /// read.
    Window,
    /// The cross-attention table: its positions are those of the encoder input.
    Cross,
    /// No page table: an encoder span attends to itself in the scratch cache, which is reused by every layer.
    Scratch,
}

impl KvTable {
    /// Returns whether the table holds the positions of the sequence itself.
    pub fn holds_sequence(self) -> bool {
        matches!(self, KvTable::Own | KvTable::Window)
    }
}

/// A relative position bias: added to attention scores by head and by the distance between key and query, as
/// in ALiBi (Press et al. 2022) and T5 (Raffel et al. 2020).
pub struct RelativeBias<Buf> {
    /// Biases (heads, 2 * reach - 1), F32, finite. The bias of key position k and query position q is in
    /// column `k - q + reach - 1`.
    pub table: Buf,
    /// Query heads.
    pub heads: usize,
    /// One more than the largest distance.
    pub reach: usize,
}

/// Products of queries and keys with vectors of distances, as in disentangled attention (He et al. 2021).
/// With b, the bucket of the distance of key position k and query position q, and r and s, the rows of query
/// and key among the current rows, `of_queries[r][head][b] + of_keys[s][head][b]` is added to the dot
/// product.
pub struct DistanceScores<'a, Buf> {
    /// Products of queries, (rows, heads, buckets), and of keys, of the same shape: activations.
    pub of_queries: &'a Buf,
    pub of_keys: &'a Buf,
    pub buckets: &'a DistanceBuckets<Buf>,
}

/// The buckets of distances.
pub struct DistanceBuckets<Buf> {
    /// Bucket of each distance, (2 * reach - 1), whole numbers in F32. That of key position k and query
    /// position q is number `k - q + reach - 1`.
    pub table: Buf,
    /// Number of buckets.
    pub count: usize,
    /// One more than the largest distance.
    pub reach: usize,
}
