//! The folder of this program's files that can be made again.
//!
//! Invariant: the folder need not exist.

use anyhow::{Context, Result};
use std::path::PathBuf;

/// Returns this program's folder for what can be made again. Fails if the user has no cache folder.
pub(super) fn cache_folder() -> Result<PathBuf> {
    let variable = std::env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
    let usual = variable.or_else(|| Some(std::env::home_dir()?.join(".cache")));
    Ok(usual.context("there is no cache folder: XDG_CACHE_HOME and HOME are not set")?.join("mainstem"))
}
