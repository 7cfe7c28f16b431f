//! Compute backends of Mainstem: number formats, batches, and the operations on a device.
//! Invariant: this crate knows neither models nor requests, and imports no other crate of Mainstem.

#![deny(unsafe_code)]

pub mod quant;

pub mod batch;

pub mod late;

pub mod backend;

pub mod collective;

mod stage;

mod clock;

pub mod host;

pub mod random;

pub mod reference;

pub mod candidates;

pub mod cpu;

pub mod cuda;

pub use backend::{
    Activation, ActivationType, AttentionShape, Backend, DeviceError, DeviceSizes, DistanceBuckets,
    DistanceScores, DynamicNtk, Epilogue, Expert, ExpertBiases, ExpertGroups, ExpertSource, Experts,
    Fraction, Gemm, GroupScore, HeldShapes, InputOperand, KvLayer, KvLayout, KvTable, Mask, MatrixId,
    MoeShape, Norm, NormKind, OutputColumns, PackedLayout, RelativeBias, Rope, RopeStyle, SamplingInputs,
    Scoring, StepLimits, ValueSource, Weight, Xielu,
};
pub use batch::{
    ActivationHandoff, DraftSpan, HandoffPorts, LastLayerSignal, PageCopy, Penalties, RowFailure, SampleMode,
    SampledToken, SamplingParams, SlotMove, Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens,
    StepBatch, StepOutput, StepTimes, TableUpdate,
};
pub use collective::local::{Abort, LocalRank, Waiters};
pub use collective::{Aborted, Collective, SingleRank};
pub use host::{HostBuf, HostMemory};
pub use late::{HostRow, LateInputs};
pub use quant::{ActivationPrecision, QuantType};
