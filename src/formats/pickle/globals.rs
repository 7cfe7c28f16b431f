//! The Python names that a pickle may reference.
//!
//! Invariant: nothing is imported. A name that is not listed here is rejected.

use super::dtypes::TorchDtype;
use anyhow::{Result, bail};
use std::fmt;

/// A Python object that the pickle of a checkpoint may reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Global {
    OrderedDict,
    Size,
    Rebuild(RebuildFn),
    /// The class of storages with elements of this type.
    Storage(&'static TorchDtype),
    /// The class of storages of raw bytes.
    UntypedStorage,
    /// A torch dtype.
    Type(&'static TorchDtype),
}

/// A PyTorch function that creates a tensor or parameter from its parts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum RebuildFn {
    Tensor,
    TensorV2,
    TensorV3,
    Parameter,
    ParameterWithState,
}

/// The supported functions of `torch._utils`.
const REBUILDERS: [(&str, RebuildFn); 5] = [
    ("_rebuild_tensor", RebuildFn::Tensor),
    ("_rebuild_tensor_v2", RebuildFn::TensorV2),
    ("_rebuild_tensor_v3", RebuildFn::TensorV3),
    ("_rebuild_parameter", RebuildFn::Parameter),
    ("_rebuild_parameter_with_state", RebuildFn::ParameterWithState),
];

/// Maximum length of a global's name in error messages, in characters.
const SHOWN_MAX: usize = 200;

impl Global {
    /// Returns the global of this module and name. Fails, with the name, if it is not an allowed one.
    pub(super) fn find(module: &str, name: &str) -> Result<Global> {
        let known = match (module, name) {
            ("collections", "OrderedDict") => Some(Global::OrderedDict),
            ("torch", "Size") => Some(Global::Size),
            ("torch", name) => {
                let class = TorchDtype::from_storage_class(name).map(Global::Storage);
                class.or_else(|| TorchDtype::from_name(name).map(Global::Type))
            }
            ("torch.storage", "UntypedStorage") => Some(Global::UntypedStorage),
            ("torch._utils", name) => {
                let rebuild = REBUILDERS.iter().find(|(known, _)| *known == name);
                rebuild.map(|(_, rebuild)| Global::Rebuild(*rebuild))
            }
            _ => None,
        };
        let Some(known) = known else {
            let shown: String = module.chars().chain(['.']).chain(name.chars()).take(SHOWN_MAX).collect();
            let functions = REBUILDERS.map(|(name, _)| name).join(", ");
            bail!(
                "the pickle references {shown}: only collections.OrderedDict, torch.Size, torch storages and \
                 dtypes, and of torch._utils {functions} are allowed"
            );
        };
        Ok(known)
    }
}

impl fmt::Display for Global {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Global::OrderedDict => f.write_str("collections.OrderedDict"),
            Global::Size => f.write_str("torch.Size"),
            Global::Rebuild(rebuild) => {
                let name = REBUILDERS.iter().find(|(_, known)| known == rebuild).map(|(name, _)| *name);
                write!(f, "torch._utils.{}", name.unwrap_or_default())
            }
            Global::Storage(ty) => write!(f, "torch.{}", ty.storage.unwrap_or_default()),
            Global::UntypedStorage => f.write_str("torch.storage.UntypedStorage"),
            Global::Type(ty) => write!(f, "torch.{}", ty.name),
        }
    }
}
