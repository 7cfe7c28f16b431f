//! The data types of PyTorch: storage class, dtype name, and the type they are loaded as.
//!
//! Invariant: the element sizes are right, because the range of a tensor's bytes is computed from them.

use crate::formats::Dtype;
use crate::formats::gather::StoredElement;
use mainstem_kernels::QuantType;

/// A PyTorch data type.
#[derive(Debug, PartialEq)]
pub(super) struct TorchDtype {
    /// Name of the storage class in the module `torch`. Newer types have none.
    pub(super) storage: Option<&'static str>,
    /// Name of the dtype in the module `torch`.
    pub(super) name: &'static str,
    /// Bytes per element.
    pub(super) bytes: usize,
    /// Name of the type in safetensors, used in error messages.
    safetensors_name: &'static str,
    loaded_as: LoadedAs,
}

/// The type that elements have after loading.
#[derive(Debug, PartialEq)]
enum LoadedAs {
    Unchanged(QuantType),
    /// F64, rounded to F32.
    F32,
    Unsupported,
}

const fn row(
    storage: &'static str,
    name: &'static str,
    shown: &'static str,
    bytes: usize,
    becomes: LoadedAs,
) -> TorchDtype {
    TorchDtype { storage: Some(storage), name, bytes, safetensors_name: shown, loaded_as: becomes }
}

const fn without_storage(name: &'static str, shown: &'static str, bytes: usize) -> TorchDtype {
    TorchDtype { storage: None, name, bytes, safetensors_name: shown, loaded_as: LoadedAs::Unsupported }
}

static TYPES: [TorchDtype; 24] = [
    row("FloatStorage", "float32", "F32", 4, LoadedAs::Unchanged(QuantType::F32)),
    row("HalfStorage", "float16", "F16", 2, LoadedAs::Unchanged(QuantType::F16)),
    row("BFloat16Storage", "bfloat16", "BF16", 2, LoadedAs::Unchanged(QuantType::BF16)),
    row("DoubleStorage", "float64", "F64", 8, LoadedAs::F32),
    row("LongStorage", "int64", "I64", 8, LoadedAs::Unsupported),
    row("IntStorage", "int32", "I32", 4, LoadedAs::Unsupported),
    row("ShortStorage", "int16", "I16", 2, LoadedAs::Unsupported),
    row("CharStorage", "int8", "I8", 1, LoadedAs::Unsupported),
    row("ByteStorage", "uint8", "U8", 1, LoadedAs::Unsupported),
    row("BoolStorage", "bool", "BOOL", 1, LoadedAs::Unsupported),
    row("ComplexFloatStorage", "complex64", "C64", 8, LoadedAs::Unsupported),
    row("ComplexDoubleStorage", "complex128", "C128", 16, LoadedAs::Unsupported),
    row("QInt8Storage", "qint8", "QINT8", 1, LoadedAs::Unsupported),
    row("QUInt8Storage", "quint8", "QUINT8", 1, LoadedAs::Unsupported),
    row("QInt32Storage", "qint32", "QINT32", 4, LoadedAs::Unsupported),
    without_storage("uint16", "U16", 2),
    without_storage("uint32", "U32", 4),
    without_storage("uint64", "U64", 8),
    without_storage("complex32", "C32", 4),
    without_storage("float8_e4m3fn", "F8_E4M3", 1),
    without_storage("float8_e4m3fnuz", "F8_E4M3FNUZ", 1),
    without_storage("float8_e5m2", "F8_E5M2", 1),
    without_storage("float8_e5m2fnuz", "F8_E5M2FNUZ", 1),
    without_storage("float8_e8m0fnu", "F8_E8M0", 1),
];

impl TorchDtype {
    /// Returns the type whose storages have this class name.
    pub(super) fn from_storage_class(class: &str) -> Option<&'static TorchDtype> {
        TYPES.iter().find(|ty| ty.storage == Some(class))
    }

    /// Returns the type with this dtype name.
    pub(super) fn from_name(name: &str) -> Option<&'static TorchDtype> {
        TYPES.iter().find(|ty| ty.name == name)
    }

    /// Returns the checkpoint data type that elements have after loading.
    pub(super) fn dtype(&self) -> Dtype {
        match self.loaded_as {
            LoadedAs::Unchanged(ty) => Dtype::Known(ty),
            LoadedAs::F32 => Dtype::Known(QuantType::F32),
            LoadedAs::Unsupported => Dtype::Unsupported(self.safetensors_name.to_owned()),
        }
    }

    /// Returns how elements are stored; `None` if the type is not supported.
    pub(super) fn stored(&self) -> Option<StoredElement> {
        match self.loaded_as {
            LoadedAs::Unchanged(_) => Some(StoredElement::Unchanged(self.bytes)),
            LoadedAs::F32 => Some(StoredElement::F64),
            LoadedAs::Unsupported => None,
        }
    }
}
