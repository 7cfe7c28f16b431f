//! What a pickle may ask for by name, and what comes of calling it.
//!
//! Invariant: nothing is imported and nothing of the pickle's choosing runs. A name that is not listed here is
//! refused, and so is a call with arguments that PyTorch does not make.

use super::numbers::NumberType;
use super::tensor;
use super::value::{Heap, Value};
use anyhow::{Context, Result, bail, ensure};
use std::fmt;

/// What the pickle of a checkpoint may name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Global {
    OrderedDict,
    Size,
    Rebuild(Rebuild),
    /// The class of storages of such numbers.
    Storage(&'static NumberType),
    /// Storages of bytes.
    UntypedStorage,
    Type(&'static NumberType),
}

/// What makes a tensor of its parts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Rebuild {
    Tensor,
    TensorV2,
    TensorV3,
    Parameter,
    ParameterWithState,
}

/// The functions of `torch._utils`.
const REBUILDERS: [(&str, Rebuild); 5] = [
    ("_rebuild_tensor", Rebuild::Tensor),
    ("_rebuild_tensor_v2", Rebuild::TensorV2),
    ("_rebuild_tensor_v3", Rebuild::TensorV3),
    ("_rebuild_parameter", Rebuild::Parameter),
    ("_rebuild_parameter_with_state", Rebuild::ParameterWithState),
];

/// The longest name of a global that is shown whole, in characters.
const SHOWN_MAX: usize = 200;

impl Global {
    /// The global of that name; an error that shows the name when it is none of those known.
    pub(super) fn find(module: &str, name: &str) -> Result<Global> {
        let known = match (module, name) {
            ("collections", "OrderedDict") => Some(Global::OrderedDict),
            ("torch", "Size") => Some(Global::Size),
            ("torch", name) => {
                let class = NumberType::of_storage(name).map(Global::Storage);
                class.or_else(|| NumberType::named(name).map(Global::Type))
            }
            ("torch.storage", "UntypedStorage") => Some(Global::UntypedStorage),
            ("torch._utils", name) => {
                let rebuild = REBUILDERS.iter().find(|(known, _)| *known == name);
                rebuild.map(|(_, rebuild)| Global::Rebuild(*rebuild))
            }
            _ => None,
        };
        let Some(known) = known else {
            let asked: String = module.chars().chain(['.']).chain(name.chars()).take(SHOWN_MAX).collect();
            let functions = REBUILDERS.map(|(name, _)| name).join(", ");
            bail!(
                "the pickle asks for {asked}: only collections.OrderedDict, torch.Size, torch's storages and \
                 number types, and of torch._utils {functions} are known"
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

/// What calling `callable` with the tuple `args` makes.
pub(super) fn call<'a>(heap: &mut Heap<'a>, callable: Value<'a>, args: Value<'a>) -> Result<Value<'a>> {
    let Value::Global(global) = callable else {
        bail!("it calls {}, and only known constructors may be called", callable.kind());
    };
    ensure!(matches!(args, Value::Tuple(_)), "it calls {global} with {} for arguments", args.kind());
    match (global, heap.items(args)) {
        (Global::OrderedDict, []) => heap.dict(),
        (Global::OrderedDict, &[items @ Value::List(_)]) => ordered_dict(heap, items),
        (Global::Size, &[sizes @ Value::Tuple(_)]) => Ok(sizes),
        (Global::Rebuild(rebuild), _) => rebuilt(heap, rebuild, args),
        _ => bail!("it calls {global} with other arguments than PyTorch does"),
    }
}

/// The form of Python 2: a list of keys with their values.
fn ordered_dict<'a>(heap: &mut Heap<'a>, items: Value<'a>) -> Result<Value<'a>> {
    let mut entries = Vec::new();
    for item in heap.items(items) {
        let &[key, value] = heap.items(*item) else { bail!("it makes an OrderedDict of other than pairs") };
        entries.extend([key, value]);
    }
    let dict = heap.dict()?;
    heap.set(dict, &entries)?;
    Ok(dict)
}

fn rebuilt<'a>(heap: &mut Heap<'a>, rebuild: Rebuild, args: Value<'a>) -> Result<Value<'a>> {
    let items = heap.items(args);
    let wrong = || format!("it calls {} with other arguments than PyTorch does", Global::Rebuild(rebuild));
    match (rebuild, items) {
        (Rebuild::Parameter, &[tensor @ Value::Tensor(_), Value::Bool(_), Value::Dict(_)]) => {
            return Ok(tensor);
        }
        (Rebuild::ParameterWithState, &[tensor @ Value::Tensor(_), Value::Bool(_), Value::Dict(_), _]) => {
            return Ok(tensor);
        }
        _ => {}
    }
    let (&parts, rest) = items.split_first_chunk::<4>().with_context(wrong)?;
    let ty = match (rebuild, rest) {
        (Rebuild::Tensor, []) => None,
        (Rebuild::TensorV2, [Value::Bool(_), Value::Dict(_), metadata @ ..]) if is_plain(heap, metadata) => {
            None
        }
        (
            Rebuild::TensorV3,
            [Value::Bool(_), Value::Dict(_), Value::Global(Global::Type(ty)), metadata @ ..],
        ) if is_plain(heap, metadata) => Some(*ty),
        _ => bail!(wrong()),
    };
    tensor::rebuild(heap, parts, ty)
}

/// Whether a tensor's metadata, where it has any, say nothing of its numbers: they may count as negated.
fn is_plain<'a>(heap: &Heap<'a>, metadata: &[Value<'a>]) -> bool {
    match metadata {
        [] | [Value::None] => true,
        [metadata] => heap.pairs(*metadata).is_some_and(<[_]>::is_empty),
        _ => false,
    }
}
