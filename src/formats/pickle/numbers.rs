//! The data types of PyTorch: storage class, dtype name, and the type they are loaded as.
//!
//! Invariant: the element sizes are right, because the range of a tensor's bytes is computed from them.

use crate::formats::Dtype;
use crate::formats::gather::Stored;
use mainstem_kernels::QuantType;

/// A PyTorch data type.
#[derive(Debug, PartialEq)]
pub(super) struct NumberType {
    /// Name of the storage class in the module `torch`. Newer types have none.
    pub(super) storage: Option<&'static str>,
    /// Name of the dtype in the module `torch`.
    pub(super) name: &'static str,
    /// Bytes per element.
    pub(super) bytes: usize,
    /// Name of the type in safetensors, used in error messages.
    shown: &'static str,
    becomes: Becomes,
}

/// The type that elements have after loading.
#[derive(Debug, PartialEq)]
enum Becomes {
    Itself(QuantType),
    /// F64, rounded to F32.
    F32,
    Foreign,
}

const fn row(
    storage: &'static str,
    name: &'static str,
    shown: &'static str,
    bytes: usize,
    becomes: Becomes,
) -> NumberType {
    NumberType { storage: Some(storage), name, bytes, shown, becomes }
}

const fn newer(name: &'static str, shown: &'static str, bytes: usize) -> NumberType {
    NumberType { storage: None, name, bytes, shown, becomes: Becomes::Foreign }
}

static TYPES: [NumberType; 24] = [
    row("FloatStorage", "float32", "F32", 4, Becomes::Itself(QuantType::F32)),
    row("HalfStorage", "float16", "F16", 2, Becomes::Itself(QuantType::F16)),
    row("BFloat16Storage", "bfloat16", "BF16", 2, Becomes::Itself(QuantType::BF16)),
    row("DoubleStorage", "float64", "F64", 8, Becomes::F32),
    row("LongStorage", "int64", "I64", 8, Becomes::Foreign),
    row("IntStorage", "int32", "I32", 4, Becomes::Foreign),
    row("ShortStorage", "int16", "I16", 2, Becomes::Foreign),
    row("CharStorage", "int8", "I8", 1, Becomes::Foreign),
    row("ByteStorage", "uint8", "U8", 1, Becomes::Foreign),
    row("BoolStorage", "bool", "BOOL", 1, Becomes::Foreign),
    row("ComplexFloatStorage", "complex64", "C64", 8, Becomes::Foreign),
    row("ComplexDoubleStorage", "complex128", "C128", 16, Becomes::Foreign),
    row("QInt8Storage", "qint8", "QINT8", 1, Becomes::Foreign),
    row("QUInt8Storage", "quint8", "QUINT8", 1, Becomes::Foreign),
    row("QInt32Storage", "qint32", "QINT32", 4, Becomes::Foreign),
    newer("uint16", "U16", 2),
    newer("uint32", "U32", 4),
    newer("uint64", "U64", 8),
    newer("complex32", "C32", 4),
    newer("float8_e4m3fn", "F8_E4M3", 1),
    newer("float8_e4m3fnuz", "F8_E4M3FNUZ", 1),
    newer("float8_e5m2", "F8_E5M2", 1),
    newer("float8_e5m2fnuz", "F8_E5M2FNUZ", 1),
    newer("float8_e8m0fnu", "F8_E8M0", 1),
];

impl NumberType {
    /// Returns the type whose storages have this class name.
    pub(super) fn of_storage(class: &str) -> Option<&'static NumberType> {
        TYPES.iter().find(|ty| ty.storage == Some(class))
    }

    /// Returns the type with this dtype name.
    pub(super) fn named(name: &str) -> Option<&'static NumberType> {
        TYPES.iter().find(|ty| ty.name == name)
    }

    /// Returns the checkpoint data type that elements have after loading.
    pub(super) fn dtype(&self) -> Dtype {
        match self.becomes {
            Becomes::Itself(ty) => Dtype::Known(ty),
            Becomes::F32 => Dtype::Known(QuantType::F32),
            Becomes::Foreign => Dtype::Foreign(self.shown.to_owned()),
        }
    }

    /// Returns how elements are stored; `None` if the type is not supported.
    pub(super) fn stored(&self) -> Option<Stored> {
        match self.becomes {
            Becomes::Itself(_) => Some(Stored::Itself(self.bytes)),
            Becomes::F32 => Some(Stored::Double),
            Becomes::Foreign => None,
        }
    }
}
