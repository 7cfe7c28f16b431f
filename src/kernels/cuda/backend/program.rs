//! The programs of kernels, and the names of kernels in them.
//!
//! Invariant: a kernel is specialized by a number format at most, so that all shipped models together need
//! less than 150 programs.

use super::super::Program;
use crate::quant::QuantType;

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct KernelName {
    pub source: Source,
    /// Name of its function.
    pub entry: &'static str,
    /// The format that the program is specialized for; `None` for sources that know of none.
    pub format: Option<QuantType>,
}

/// The source of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Source {
    /// Operations on rows of numbers.
    Rows,
    /// Operations on weights of a format.
    Weights,
    /// Sampling of output rows.
    Sampling,
    /// The KV cache of a format, and attention.
    Cache,
}

/// Joins the text that all programs share with that of one. Each file keeps its name and the numbers of its
/// lines, for the compiler's log and for [`Nvrtc::with_line_info`](super::super::Nvrtc::with_line_info).
macro_rules! program {
    ($name:literal: $($file:literal),*) => {
        Program {
            name: $name,
            source: concat!(
                "#line 1 \"common.cu\"\n",
                include_str!("../source/common.cu"),
                $("#line 1 \"", $file, "\"\n", include_str!(concat!("../source/", $file))),*
            ),
        }
    };
}

impl Source {
    /// Returns the program.
    pub fn program(self) -> &'static Program {
        const ROWS: Program = program!("rows": "rows.cu", "quantize.cu", "mixture.cu");
        const WEIGHTS: Program =
            program!("weights": "formats.cu", "weights.cu", "products.cu", "int8_products.cu");
        const SAMPLING: Program = program!("sampling": "draw.cu", "sampling.cu");
        const CACHE: Program = program!("cache": "formats.cu", "cache.cu", "attention.cu");
        match self {
            Source::Rows => &ROWS,
            Source::Weights => &WEIGHTS,
            Source::Sampling => &SAMPLING,
            Source::Cache => &CACHE,
        }
    }
}

impl Source {
    /// All sources.
    const ALL: [Source; 4] = [Source::Rows, Source::Weights, Source::Cache, Source::Sampling];

    /// Returns the formats that the program is specialized for.
    fn formats(self) -> Vec<Option<QuantType>> {
        match self {
            Source::Rows | Source::Sampling => vec![None],
            Source::Weights => QuantType::all().map(Some).collect(),
            Source::Cache => QuantType::kv_cache_types().map(Some).collect(),
        }
    }
}

/// Returns all programs that the backend may use, each with the macros of a specialization.
pub fn all_programs() -> Vec<(&'static Program, Vec<(String, String)>)> {
    let specialized = |source: Source| {
        let of_format = move |format| (source.program(), KernelName { source, entry: "", format }.defines());
        source.formats().into_iter().map(of_format)
    };
    Source::ALL.into_iter().flat_map(specialized).collect()
}

impl KernelName {
    /// Names a kernel that is for all formats.
    pub fn rows(entry: &'static str) -> KernelName {
        KernelName { source: Source::Rows, entry, format: None }
    }

    /// Names a kernel of sampling.
    pub fn sampling(entry: &'static str) -> KernelName {
        KernelName { source: Source::Sampling, entry, format: None }
    }

    /// Names a kernel for weights of a format.
    pub fn weights(entry: &'static str, format: QuantType) -> KernelName {
        KernelName { source: Source::Weights, entry, format: Some(format) }
    }

    /// Names a kernel for a cache of a format.
    pub fn cache(entry: &'static str, format: QuantType) -> KernelName {
        KernelName { source: Source::Cache, entry, format: Some(format) }
    }

    /// Returns the macros of the program: one with the format's name, one if its blocks can be split into
    /// quants and parameters, and the sizes of the blocks.
    pub fn defines(&self) -> Vec<(String, String)> {
        let Some(ty) = self.format else { return Vec::new() };
        let (row, name) = (ty.row(), format!("FORMAT_{}", ty.name().to_uppercase()));
        let sizes = [("BLOCK_ELEMENTS", row.block_elements), ("BLOCK_BYTES", row.block_bytes)];
        let sizes = sizes.map(|(name, size)| (name.to_owned(), size.to_string()));
        let quants = ty.block_split().map(|_| "HAS_QUANTS".to_owned());
        [name].into_iter().chain(quants).map(|name| (name, "1".to_owned())).chain(sizes).collect()
    }
}
