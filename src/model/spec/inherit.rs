//! Inheritance of specification files: a file names a built-in one as its `base`, and only has what differs.
//!
//! Invariant: the result has no `base`, no value of the base that the file gives itself, and nothing of the
//! base that belongs to a block which the file does not have.

use super::merge::{MissingKey, merge};
use super::tables::SpecText;
use super::unused;
use super::words::Kind;
use crate::specs;
use anyhow::{Context, Result, ensure};
use toml::{Table, Value};

/// Name of the key that names the base.
const BASE: &str = "base";

/// Keys that a file never inherits.
const OWN_KEYS: [&str; 3] = [BASE, "model_types", "note"];

/// Tables of one stack, and the list of overrides.
const STACKS: [&str; 2] = ["encoder", "decoder"];
const OVERRIDE: &str = "override";

/// Length that no chain of bases reaches unless it is a circle.
const LONGEST_CHAIN: usize = 8;

/// Returns the entries of a file together with those of its base, of the base's base, and so on. Fails if
/// there is no such base.
pub fn with_base(own: Table) -> Result<Table> {
    let mut chain = vec![own];
    while let Some(name) = chain.last().and_then(|file| file.get(BASE)) {
        ensure!(chain.len() < LONGEST_CHAIN, "'base' leads through more than {LONGEST_CHAIN} files");
        let name = name.as_str().context("'base' is not the name of a built-in specification")?;
        let (file, text) = specs::named(name).with_context(|| format!("'base': {}", unknown_name(name)))?;
        chain.push(text.parse().context(file)?);
    }
    let mut entries = chain.pop().expect("it begins with one");
    while let Some(own) = chain.pop() {
        entries = derive(entries, own)?;
    }
    Ok(entries)
}

/// Returns an error's text for a name that no built-in specification has.
pub fn unknown_name(name: &str) -> String {
    let known = specs::ALL.iter().map(|(file, _)| specs::name_of(file));
    let nearest = known.min_by_key(|known| strsim::levenshtein(known, name)).unwrap_or_default();
    format!("there is no built-in specification '{name}'; did you mean '{nearest}'?")
}

/// Returns the entries of a base, changed by those of a file.
fn derive(mut base: Table, mut own: Table) -> Result<Table> {
    OWN_KEYS.iter().for_each(|key| _ = base.remove(*key));
    own.remove(BASE);
    forget_overridden(&mut base, &own);
    merge(&mut base, &own, MissingKey::Insert);
    let text: Box<SpecText> = base.clone().try_into()?;
    for (stack, without) in [("encoder", Kind::Decoder), ("decoder", Kind::Encoder)] {
        if text.kind == without && !own.contains_key(stack) {
            base.remove(stack);
        }
    }
    for setting in unused::without_block(&text) {
        let (table, key) = setting.split_once('.').context("settings are named with their table")?;
        if !gives(&own, table, key) {
            forget(&mut base, table, key);
            for_each_part(&mut base, &mut |part| forget(part, table, key));
        }
    }
    Ok(base)
}

/// Removes what would win over the values of a file: for values that it gives for all layers, those in the
/// base's overrides and in its tables of one stack.
fn forget_overridden(base: &mut Table, own: &Table) {
    divide_overrides(base, own);
    for_each_part(base, &mut |part| {
        let stack = part.get("stack").and_then(Value::as_str);
        let of_stack = stack.and_then(|stack| own.get(stack)?.as_table()).cloned().unwrap_or_default();
        for (table, values) in own.iter().chain(&of_stack) {
            for (key, _) in values.as_table().into_iter().flatten() {
                forget(part, table, key);
            }
        }
    });
}

/// Divides overrides of both stacks, of which the file gives a value for one stack, into one for each.
fn divide_overrides(base: &mut Table, own: &Table) {
    let Some(Value::Array(overrides)) = base.get_mut(OVERRIDE) else { return };
    let is_given = |part: &Table| {
        let keys = |table: &Table| -> Vec<(String, String)> {
            let of = |(name, values): (&String, &Value)| {
                let keys = values.as_table().into_iter().flatten();
                keys.map(|(key, _)| (name.clone(), key.clone())).collect::<Vec<_>>()
            };
            table.iter().flat_map(of).collect()
        };
        let given = keys(part);
        let stacks = STACKS.iter().filter_map(|stack| own.get(*stack)?.as_table());
        stacks.flat_map(keys).any(|key| given.contains(&key))
    };
    let mut divided = Vec::with_capacity(overrides.len());
    for given in overrides.drain(..) {
        match &given {
            Value::Table(part) if !part.contains_key("stack") && is_given(part) => {
                for stack in STACKS {
                    let mut of_stack = part.clone();
                    of_stack.insert("stack".to_owned(), stack.into());
                    divided.push(of_stack.into());
                }
            }
            _ => divided.push(given),
        }
    }
    *overrides = divided;
}

/// Calls `act` for the tables of each stack and of each override, and drops overrides that become empty.
fn for_each_part(entries: &mut Table, act: &mut dyn FnMut(&mut Table)) {
    for stack in STACKS {
        if let Some(Value::Table(part)) = entries.get_mut(stack) {
            act(part);
        }
    }
    if let Some(Value::Array(overrides)) = entries.get_mut(OVERRIDE) {
        overrides.iter_mut().filter_map(Value::as_table_mut).for_each(act);
        let conditions = ["when", "stack", "layers"];
        let changes = |given: &Value| {
            given.as_table()?.keys().find(|key| !conditions.contains(&key.as_str())).map(drop)
        };
        overrides.retain(|given| changes(given).is_some());
    }
}

/// Removes a value, and its table if that becomes empty.
fn forget(tables: &mut Table, table: &str, key: &str) {
    if let Some(Value::Table(values)) = tables.get_mut(table)
        && values.remove(key).is_some()
        && values.is_empty()
    {
        tables.remove(table);
    }
}

/// Returns whether a file gives a value, for all models and layers or for some.
fn gives(own: &Table, table: &str, key: &str) -> bool {
    let has = |part: &Table| part.get(table).and_then(Value::as_table).is_some_and(|it| it.contains_key(key));
    let stacks = STACKS.iter().filter_map(|stack| own.get(*stack)?.as_table());
    let overrides = own.get(OVERRIDE).and_then(Value::as_array).into_iter().flatten();
    has(own) || stacks.chain(overrides.filter_map(Value::as_table)).any(has)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn derived(base: &str, own: &str) -> Table {
        derive(base.parse().unwrap(), own.parse().unwrap()).unwrap()
    }

    #[test]
    fn values_are_replaced_one_by_one_and_the_rest_is_inherited() {
        let base = "model_types = ['a']\nnote = 'n'\nignored = ['x']\n[size]\n\
                    vocab = { key = 'v', default = 7 }\nhidden = 8\n[mlp]\nkind = 'gated'\n\
                    [tensors]\nup = 'u'\ngate = 'g'";
        let own = "base = 'a'\nmodel_types = ['b']\n[size]\nvocab = { key = 'w' }\n[head]\ntied = true";
        let all = "model_types = ['b']\nignored = ['x']\n[size]\nvocab = { key = 'w' }\nhidden = 8\n\
                   [mlp]\nkind = 'gated'\n[head]\ntied = true\n[tensors]\nup = 'u'\ngate = 'g'";
        assert_eq!(derived(base, own), all.parse().unwrap());
    }

    /// The base's override would win over a value that is given for all layers.
    #[test]
    fn a_value_for_all_layers_wins_over_overrides_and_stacks_of_the_base() {
        let base = "model_types = ['a']\nkind = 'encoder_decoder'\n[encoder.attention]\nheads = 2\n\
                    window = 3\n[[override]]\nlayers = { every = 2 }\n[override.attention]\nwindow = 4\n\
                    [[override]]\nstack = 'decoder'\n[override.attention]\nheads = 5\nscale = 6.0";
        let own = "model_types = ['b']\n[attention]\nwindow = 7\n[decoder.attention]\nheads = 8";
        let all = "model_types = ['b']\nkind = 'encoder_decoder'\n[encoder.attention]\nheads = 2\n\
                   [attention]\nwindow = 7\n[decoder.attention]\nheads = 8\n\
                   [[override]]\nstack = 'decoder'\n[override.attention]\nscale = 6.0";
        assert_eq!(derived(base, own), all.parse().unwrap());
    }

    #[test]
    fn a_value_for_one_stack_wins_over_overrides_of_both_there() {
        let base = "model_types = ['a']\nkind = 'encoder_decoder'\n\
                    [[override]]\nlayers = { every = 2 }\n[override.attention]\nwindow = 4\nscale = 6.0\n\
                    [[override]]\n[override.mlp]\nwidth = 9";
        let own = "model_types = ['b']\n[decoder.attention]\nwindow = 7";
        let all = "model_types = ['b']\nkind = 'encoder_decoder'\n[decoder.attention]\nwindow = 7\n\
                   [[override]]\nlayers = { every = 2 }\nstack = 'encoder'\n[override.attention]\n\
                   window = 4\nscale = 6.0\n[[override]]\nlayers = { every = 2 }\nstack = 'decoder'\n\
                   [override.attention]\nscale = 6.0\n[[override]]\n[override.mlp]\nwidth = 9";
        assert_eq!(derived(base, own), all.parse().unwrap());
    }

    #[test]
    fn what_belongs_to_a_block_that_the_file_replaces_is_not_inherited() {
        let base =
            "model_types = ['a']\n[mlp]\nkind = 'gated'\nfused = true\n[tensors]\ngate_up = 'gu'\ndown = 'd'";
        let own = "model_types = ['b']\n[mlp]\nkind = 'ungated'\n[tensors]\nup = 'u'";
        let all = "model_types = ['b']\n[mlp]\nkind = 'ungated'\n[tensors]\nup = 'u'\ndown = 'd'";
        assert_eq!(derived(base, own), all.parse().unwrap());
        // Its own are kept, so that they can be complained about.
        let own = "model_types = ['b']\n[mlp]\nkind = 'ungated'\n[tensors]\ngate_up = 'x'";
        assert_eq!(derived(base, own)["tensors"]["gate_up"].as_str(), Some("x"));
    }

    #[test]
    fn a_base_that_does_not_exist_is_named_with_the_nearest() {
        let name = specs::name_of(specs::ALL[0].0);
        let error = with_base(format!("base = 'x{name}'").parse().unwrap()).unwrap_err();
        let told = format!("'x{name}'; did you mean '{name}'?");
        assert!(format!("{error:#}").contains(&told), "{error:#}");
        assert!(with_base("base = 3".parse().unwrap()).is_err());
    }
}
