//! The macro that defines the tables of specification files.
//!
//! Invariant: tables are merged value by value.

/// Defines a table of optional values, and the merging of two such tables.
macro_rules! table {
    ($(#[$about:meta])* $name:ident { $($(#[$field_about:meta])* $field:ident: $ty:ty,)* }) => {
        $(#[$about])*
        #[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name { $($(#[$field_about])* pub $field: Option<$ty>,)* }

        impl $name {
            /// Names of the values.
            pub const NAMES: &[&str] = &[$(stringify!($field),)*];

            /// Returns these values; missing ones are taken from `base`.
            pub fn over(&self, base: &$name) -> $name {
                $name { $($field: self.$field.clone().or_else(|| base.$field.clone()),)* }
            }

            /// Returns the names of the values that are given.
            pub fn given(&self) -> Vec<&'static str> {
                [$((stringify!($field), self.$field.is_some()),)*]
                    .into_iter().filter(|(_, is_given)| *is_given).map(|(name, _)| name).collect()
            }
        }
    };
}

pub(super) use table;
