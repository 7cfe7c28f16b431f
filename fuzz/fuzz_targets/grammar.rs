//! A grammar of a request, in GBNF or Lark.

#![no_main]

use mainstem_grammar::Form;

mainstem_fuzz::target!(parse);

fn parse(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    mainstem_fuzz::constraint::check(Form::Grammar(text.into()));
}
