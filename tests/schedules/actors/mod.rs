//! The actors' code that runs on other threads than the control thread.

#[path = "../../../src/actors/device.rs"]
pub mod device;
#[path = "../../../src/actors/group/mod.rs"]
pub mod group;
pub mod scenarios;
#[path = "../../../src/actors/status.rs"]
pub mod status;
#[path = "../../../src/actors/step.rs"]
pub mod step;

/// Stands in for the memory of responses: no scenario has any.
pub mod response_memory {
    use std::sync::Arc;

    #[derive(Debug)]
    pub struct ResponseMemory;

    impl ResponseMemory {
        pub fn new(_: usize) -> Arc<ResponseMemory> {
            Arc::new(ResponseMemory)
        }
    }
}
