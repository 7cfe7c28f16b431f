//! Names of the settings of a specification file, each with the name of its table.
//!
//! Invariant: every table of a file is listed in both functions.

use super::classifier_table::ClassifierTable;
use super::moe_table::MoeTable;
use super::tables::{
    AttentionTable, CrossTable, EmbeddingTable, HeadTable, MlpTable, NormTable, PositionTable, ResidualTable,
    SizeTable, Tables,
};
use super::tensor_table::TensorTable;

/// Returns the names of all settings, each with its table's.
pub(super) fn names() -> impl Iterator<Item = (&'static str, &'static str)> {
    let tables = [
        ("size", SizeTable::NAMES),
        ("embedding", EmbeddingTable::NAMES),
        ("position", PositionTable::NAMES),
        ("norm", NormTable::NAMES),
        ("residual", ResidualTable::NAMES),
        ("attention", AttentionTable::NAMES),
        ("cross", CrossTable::NAMES),
        ("mlp", MlpTable::NAMES),
        ("moe", MoeTable::NAMES),
        ("head", HeadTable::NAMES),
        ("classifier", ClassifierTable::NAMES),
        ("tensors", TensorTable::NAMES),
    ];
    tables.into_iter().flat_map(|(table, names)| names.iter().map(move |name| (table, *name)))
}

/// Returns the settings that are given, as `table.name`.
pub(super) fn given(tables: &Tables) -> Vec<String> {
    let each = [
        ("size", tables.size.given()),
        ("embedding", tables.embedding.given()),
        ("position", tables.position.given()),
        ("norm", tables.norm.given()),
        ("residual", tables.residual.given()),
        ("attention", tables.attention.given()),
        ("cross", tables.cross.given()),
        ("mlp", tables.mlp.given()),
        ("moe", tables.moe.given()),
        ("head", tables.head.given()),
        ("classifier", tables.classifier.given()),
        ("tensors", tables.tensors.given()),
    ];
    let named = each.into_iter().flat_map(|(table, names)| names.into_iter().map(move |it| (table, it)));
    named.map(|(table, name)| format!("{table}.{name}")).collect()
}
