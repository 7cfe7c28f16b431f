//! Merges the values of one specification into those of another, as TOML.
//!
//! Invariant: values that are not overridden stay as they are.

use toml::{Table, Value};

/// Selects what to do with a value whose key the target table lacks.
#[derive(Clone, Copy)]
pub enum MissingKey {
    Skip,
    Insert,
}

/// Overrides values of `table` with those of `over`. Lists of tables are extended instead, and added if they
/// are missing.
pub fn merge(table: &mut Table, over: &Table, missing: MissingKey) {
    for (key, value) in over {
        match (table.get_mut(key), value, missing) {
            (Some(Value::Table(inner)), Value::Table(over), _) if !is_lookup(over) => {
                merge(inner, over, missing);
            }
            (Some(Value::Array(list)), Value::Array(more), _) if are_tables(more) => {
                list.extend(more.iter().cloned());
            }
            (Some(place), ..) => *place = value.clone(),
            (None, Value::Array(list), MissingKey::Skip) if !are_tables(list) => {}
            (None, Value::Array(_), _) | (None, _, MissingKey::Insert) => {
                _ = table.insert(key.clone(), value.clone())
            }
            (None, _, MissingKey::Skip) => {}
        }
    }
}

/// Returns whether a table is a lookup of one value (see [`super::setting`]).
fn is_lookup(table: &Table) -> bool {
    ["key", "formula", "default"].iter().any(|key| table.contains_key(*key))
}

fn are_tables(list: &[Value]) -> bool {
    list.first().is_some_and(Value::is_table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(text: &str) -> Table {
        text.parse().unwrap()
    }

    #[test]
    fn differences_go_in_place_and_what_is_common_only_where_there_is_one() {
        let mut spec = table("a = 1\n[b]\nc = { key = 'x', default = 2 }\nd = 3");
        merge(&mut spec, &table("z = 9\nn = ['m']\n[b]\nc = 4\ne = 5\n[y]\nf = 6"), MissingKey::Skip);
        assert_eq!(spec, table("a = 1\n[b]\nc = 4\nd = 3"));
        merge(&mut spec, &table("n = []\n[b]\ne = 5\n[y]\nf = 6"), MissingKey::Insert);
        assert_eq!(spec, table("a = 1\nn = []\n[b]\nc = 4\nd = 3\ne = 5\n[y]\nf = 6"));
    }

    /// The default of the replaced lookup does not apply to the new one.
    #[test]
    fn where_a_value_is_found_is_replaced_as_a_whole() {
        let mut spec = table("[b]\nc = { key = 'x', default = 2, cases = { y = 1 } }");
        merge(&mut spec, &table("[b]\nc = { key = 'z' }"), MissingKey::Skip);
        assert_eq!(spec, table("[b]\nc = { key = 'z' }"));
    }

    #[test]
    fn lists_of_tables_grow_and_other_lists_are_replaced() {
        let mut spec = table("n = ['a']\n[[o]]\nx = 1");
        let more = table("n = ['b']\n[[o]]\ny = 2\n[[p]]\nz = 3");
        merge(&mut spec, &more, MissingKey::Skip);
        assert_eq!(spec, table("n = ['b']\n[[o]]\nx = 1\n[[o]]\ny = 2\n[[p]]\nz = 3"));
    }
}
