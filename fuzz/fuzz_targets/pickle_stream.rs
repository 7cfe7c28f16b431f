//! The older container of `torch.save`: consecutive pickles, then the tensor data.

#![no_main]

use mainstem::formats::Checkpoint;
use mainstem_fuzz::read_all;
use std::path::Path;

mainstem_fuzz::target!(parse);

fn parse(bytes: &[u8]) {
    if let Ok(checkpoint) = Checkpoint::from_pickle(Path::new("stream"), bytes.to_vec()) {
        read_all(&checkpoint);
    }
}
