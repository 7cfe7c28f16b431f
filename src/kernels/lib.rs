//! Compute backends of Mainstem: number formats, batches, and the operations on a device.
//! Invariant: this crate knows neither models nor requests, and imports no other crate of Mainstem.

#![deny(unsafe_code)]

pub mod quant;

pub mod batch;

pub mod backend;

pub mod collective;

mod stage;

pub mod host;

pub mod random;

pub mod reference;

pub mod cpu;

pub mod conformance;

pub use backend::{
    Activation, AttentionShape, Backend, DeviceError, DistanceBias, Expert, Factor, KvLayer, KvLayout,
    KvTable, Mask, MoeShape, Norm, NormKind, Product, Rope, RopeStretch, RopeStyle, Scoring, Share,
    StepLimits, To, Weight,
};
pub use batch::{
    Carried, Flow, PageCopy, SampleMode, SampleRow, SampledRow, SlotMove, Span, SpanModel, SpanStack,
    SpanTable, SpanTokens, StepBatch, StepOutput, StepTimes, TableUpdate, Want,
};
pub use collective::local::{Abort, LocalMember};
pub use collective::{Aborted, Alone, Collective};
pub use host::HostBuf;
pub use quant::{Inputs, QuantType};
