//! Tests of grammars.

mod vocabularies;

mod masks;

mod forms;

mod schemas;

mod schema_list;

mod hostile;

mod caching;

mod gbnf;
