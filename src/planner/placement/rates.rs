//! Measured rates of a machine: how long the operations of a step take on it, and how fast its disk is.
//!
//! Invariant: more rows are never faster.

use mainstem_kernels::QuantType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The rates of a machine with one compute device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MachineRates {
    /// Bytes of memory that are read per second.
    pub memory: f64,
    /// Seconds of an operation that computes next to nothing.
    pub operation: f64,
    /// Seconds that an engine takes beside its device for a step, and for each token that it generates.
    pub step: f64,
    pub token: f64,
    /// Seconds of a GEMM per element of the weight, by the weight's number format.
    pub gemms: BTreeMap<String, RowCurve>,
    /// Seconds of attention, by the name of the cache ([`AttentionShape::name`]).
    pub attention: BTreeMap<String, AttentionRates>,
    /// The disk of the stores; `None` if it is not measured.
    pub disk: Option<DiskRates>,
}

/// Seconds as a function of the number of rows: linear between measured points.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Vec<(f64, f64)>", into = "Vec<(f64, f64)>")]
pub struct RowCurve(Vec<(f64, f64)>);

impl RowCurve {
    /// Creates the curve through points of rows and seconds, in any order. A point with more rows and less
    /// time than another was disturbed less, so the curve is as low as it is.
    pub fn new(mut points: Vec<(f64, f64)>) -> RowCurve {
        points.retain(|(rows, seconds)| *rows > 0.0 && seconds.is_finite() && *seconds >= 0.0);
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points.dedup_by(|next, kept| next.0 == kept.0);
        let mut least = f64::INFINITY;
        for (_, seconds) in points.iter_mut().rev() {
            least = least.min(*seconds);
            *seconds = least;
        }
        RowCurve(points)
    }

    /// Returns the seconds of so many rows. Beyond the last point, they grow in proportion to the rows.
    pub fn seconds(&self, rows: f64) -> f64 {
        let after = self.0.partition_point(|(known, _)| *known < rows);
        match (after.checked_sub(1).map(|before| self.0[before]), self.0.get(after)) {
            (None, None) => 0.0,
            (None, Some((_, first))) => *first,
            (Some((last_rows, last)), None) => last * rows / last_rows,
            (Some((rows_before, before)), Some((rows_after, after))) => {
                before + (after - before) * (rows - rows_before) / (rows_after - rows_before)
            }
        }
    }
}

impl From<Vec<(f64, f64)>> for RowCurve {
    fn from(points: Vec<(f64, f64)>) -> RowCurve {
        RowCurve::new(points)
    }
}

impl From<RowCurve> for Vec<(f64, f64)> {
    fn from(curve: RowCurve) -> Vec<(f64, f64)> {
        curve.0
    }
}

/// Seconds of attention of one layer, per row and position that it attends to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionRates {
    /// Of rows of different sequences.
    pub decode: f64,
    /// Of consecutive rows of one sequence, which share what they read.
    pub prompt: f64,
}

/// The shape of attention over a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Format of K and V.
    pub ty: QuantType,
    pub heads: usize,
    pub kv_heads: usize,
    pub k_dim: usize,
    pub v_dim: usize,
    /// Whether V is in K.
    pub v_in_k: bool,
}

impl AttentionShape {
    /// Returns a name that differs from those of other shapes.
    pub fn name(&self) -> String {
        let AttentionShape { ty, heads, kv_heads, k_dim, v_dim, v_in_k } = self;
        let shared = if *v_in_k { " (V in K)" } else { "" };
        format!("{} {heads}/{kv_heads} heads of {k_dim}/{v_dim}{shared}", ty.name())
    }
}

/// Bytes per second of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskRates {
    /// Read by the threads that read weights.
    pub read: f64,
    /// Written, and synchronized with the disk.
    pub write: f64,
    /// Read in small pieces from all over a file, as pages of KV caches are.
    pub pages: f64,
}

impl MachineRates {
    /// Returns the seconds of a GEMM with `weights` elements of a format. Infinite if it is not measured.
    pub fn gemm(&self, ty: QuantType, weights: f64, rows: f64) -> f64 {
        self.gemms.get(ty.name()).map_or(f64::INFINITY, |curve| curve.seconds(rows) * weights)
    }

    /// Returns the rates of attention; infinite if they are not measured.
    pub fn attention(&self, shape: &AttentionShape) -> AttentionRates {
        let unknown = AttentionRates { decode: f64::INFINITY, prompt: f64::INFINITY };
        self.attention.get(&shape.name()).copied().unwrap_or(unknown)
    }
}
