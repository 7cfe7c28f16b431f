//! The Python names that a pickle may reference, and what calling them creates.
//!
//! Invariant: nothing is imported, and no code chosen by the pickle runs. A name that is not listed here is
//! rejected, and so is a call with arguments that PyTorch does not write.

use super::dtypes::TorchDtype;
use super::tensor;
use super::value::{Heap, Value};
use anyhow::{Context, Result, bail, ensure};
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

/// Returns the value that a call of `callable` with the tuple `args` creates.
pub(super) fn call<'a>(heap: &mut Heap<'a>, callable: Value<'a>, args: Value<'a>) -> Result<Value<'a>> {
    let Value::Global(global) = callable else {
        bail!("it calls {}, but only known constructors may be called", callable.kind());
    };
    ensure!(matches!(args, Value::Tuple(_)), "it calls {global} with {} as arguments", args.kind());
    match (global, heap.items(args)) {
        (Global::OrderedDict, []) => heap.new_dict(),
        (Global::OrderedDict, &[items @ Value::List(_)]) => ordered_dict(heap, items),
        (Global::Size, &[sizes @ Value::Tuple(_)]) => Ok(sizes),
        (Global::Rebuild(rebuild), _) => rebuild_tensor(heap, rebuild, args),
        _ => bail!("it calls {global} with arguments that PyTorch does not use"),
    }
}

/// Creates an OrderedDict in the form of Python 2: from a list of (key, value) pairs.
fn ordered_dict<'a>(heap: &mut Heap<'a>, items: Value<'a>) -> Result<Value<'a>> {
    let mut entries = Vec::new();
    for item in heap.items(items) {
        let &[key, value] = heap.items(*item) else {
            bail!("it creates an OrderedDict from items that are not pairs")
        };
        entries.extend([key, value]);
    }
    let dict = heap.new_dict()?;
    heap.set_items(dict, &entries)?;
    Ok(dict)
}

fn rebuild_tensor<'a>(heap: &mut Heap<'a>, rebuild: RebuildFn, args: Value<'a>) -> Result<Value<'a>> {
    let items = heap.items(args);
    let wrong = || format!("it calls {} with arguments that PyTorch does not use", Global::Rebuild(rebuild));
    match (rebuild, items) {
        (RebuildFn::Parameter, &[tensor @ Value::Tensor(_), Value::Bool(_), Value::Dict(_)]) => {
            return Ok(tensor);
        }
        (RebuildFn::ParameterWithState, &[tensor @ Value::Tensor(_), Value::Bool(_), Value::Dict(_), _]) => {
            return Ok(tensor);
        }
        _ => {}
    }
    let (&parts, rest) = items.split_first_chunk::<4>().with_context(wrong)?;
    let ty = match (rebuild, rest) {
        (RebuildFn::Tensor, []) => None,
        (RebuildFn::TensorV2, [Value::Bool(_), Value::Dict(_), metadata @ ..])
            if is_empty_metadata(heap, metadata) =>
        {
            None
        }
        (
            RebuildFn::TensorV3,
            [Value::Bool(_), Value::Dict(_), Value::Global(Global::Type(ty)), metadata @ ..],
        ) if is_empty_metadata(heap, metadata) => Some(*ty),
        _ => bail!(wrong()),
    };
    tensor::rebuild(heap, parts, ty)
}

/// Whether a tensor's optional metadata is empty. Metadata can mark the elements as negated.
fn is_empty_metadata<'a>(heap: &Heap<'a>, metadata: &[Value<'a>]) -> bool {
    match metadata {
        [] | [Value::None] => true,
        [metadata] => heap.pairs(*metadata).is_some_and(<[_]>::is_empty),
        _ => false,
    }
}
