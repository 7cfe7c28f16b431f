//! Compute backends of Mainstem: number formats, batches, and the operations on a device.
//! Invariant: this crate knows neither models nor requests, and imports no other crate of Mainstem.

#![deny(unsafe_code)]

pub mod quant;

pub mod batch;

pub mod backend;

pub mod collective;

mod stage;

mod clock;

pub mod host;

pub mod random;

pub mod reference;

pub mod cpu;

pub use backend::{
    Activation, AttentionShape, Backend, DeviceError, DynamicNtk, Epilogue, Expert, Fraction, Gemm,
    InputOperand, KvLayer, KvLayout, KvTable, Mask, MoeShape, Norm, NormKind, RelativeBias, Rope, RopeStyle,
    Scoring, StepLimits, Weight,
};
pub use batch::{
    ActivationHandoff, HandoffPorts, LastLayerSignal, PageCopy, SampleMode, SampledToken, SamplingParams,
    SlotMove, Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens, StepBatch, StepOutput,
    StepTimes, TableUpdate,
};
pub use collective::local::{Abort, LocalRank};
pub use collective::{Aborted, Collective, SingleRank};
pub use host::{HostBuf, HostMemory};
pub use quant::{ActivationPrecision, QuantType};
