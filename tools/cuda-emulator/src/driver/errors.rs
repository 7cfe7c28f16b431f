//! Names and descriptions of errors.

use super::code::{self, TEXTS};
use super::entry::{interface, put};
use std::ffi::c_char;

fn find(error: u32) -> super::code::Result<(&'static str, &'static str)> {
    let found = TEXTS.iter().find(|(code, ..)| *code == error);
    found.map(|(_, name, text)| (*name, *text)).ok_or(code::INVALID_VALUE)
}

interface! {
    fn cuGetErrorName(error: u32, to: *mut *const c_char) {
        put(to, find(error)?.0.as_ptr().cast())
    }

    fn cuGetErrorString(error: u32, to: *mut *const c_char) {
        put(to, find(error)?.1.as_ptr().cast())
    }
}
