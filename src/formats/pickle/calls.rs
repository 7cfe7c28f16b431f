//! Calls of the Python names that a pickle may reference, and the values that they create.
//!
//! Invariant: no code chosen by the pickle runs. A call with arguments that PyTorch does not write is
//! rejected.

use super::globals::{Global, RebuildFn};
use super::tensor;
use super::value::{Heap, Value};
use anyhow::{Context, Result, bail, ensure};

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
