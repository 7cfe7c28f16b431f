//! Weights and KV caches that do not stay in a device's memory. For weights, a store on disk has the matrices
//! of a model's layers as devices hold them, which are read while the layers before compute. For KV caches, a
//! file has those of some layers, whose pages are read before the layer computes and written after it. If the
//! device has a memory of its own, some of both are in the memory of the host instead, and are copied from
//! there.
//!
//! Invariant: the bytes of a matrix or page are the same, whether it stays in memory or not.

mod abort;

mod buffers;

mod cache;

mod cache_places;

mod cache_ring;

mod chosen_values;

mod direct;

mod expert_slots;

mod experts;

mod held;

mod layers;

mod link;

mod mark;

mod matrix;

mod page_plan;

mod residency;

mod speed;

mod store;

mod store_key;

mod stores;

mod stream;

mod tier;

mod trace;

mod transfers;

#[cfg(test)]
pub mod testing;

#[cfg(test)]
mod tests;

pub use cache::StreamedCaches;
pub use cache_places::{CacheOffload, CacheReport, buffer_layouts};
pub use chosen_values::ChosenValues;
pub use layers::{LayerNotes, Offload, OffloadReport, PackedLayers};
pub use link::{RowLink, TransferPath};
pub use mark::FileMarks;
pub use matrix::LayerMatrix;
pub use residency::Residency;
pub use speed::DiskSpeed;
pub use store::{PackedStore, StorePlace, StoreWriter};
pub use stores::ModelStores;
pub use tier::{MatrixFilter, SpreadRule, Tier, TierOverride, TierRules};
pub use trace::{Activity, StepTrace, Timeline, TimelineRow, TimelineSpan, Trace};
pub use transfers::{ByStream, Stream, TransferTotals, Transfers};
