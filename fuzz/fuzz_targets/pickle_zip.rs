//! The zip container of `torch.save`, as a folder's `pytorch_model.bin`.

#![no_main]

use mainstem::formats::Checkpoint;
use mainstem_fuzz::{folder, read_all};

mainstem_fuzz::target!(parse);

fn parse(bytes: &[u8]) {
    if let Ok(checkpoint) = Checkpoint::open_pickle(&folder(&[("pytorch_model.bin", bytes)])) {
        read_all(&checkpoint);
    }
}
