//! Batches for the tests of several files.

use super::wire::{BatchObject, BatchStatus, RequestCounts};
use super::{Batches, Service};
use crate::server::tests::test_server::{DEADLINE, app};
use crate::testing::Scratch;
use actix_web::rt::time::timeout;
use std::sync::Arc;
use tokio::task::yield_now;

/// Opens the files and batches in a folder.
pub fn open(folder: &Scratch) -> Arc<Batches> {
    let mut config = app(|_| {}).config.batches.clone();
    config.data_dir = Some(folder.path().to_owned());
    Service::open(&config).unwrap().0.unwrap()
}

/// Lets others run until `condition` is true.
pub async fn wait_until(mut condition: impl FnMut() -> bool) {
    let waiting = async {
        while !condition() {
            yield_now().await;
        }
    };
    timeout(DEADLINE, waiting).await.expect("it becomes true");
}

/// Returns a batch with this id and status.
pub fn object(id: &str, status: BatchStatus) -> BatchObject {
    BatchObject {
        id: id.to_owned(),
        object: "batch".to_owned(),
        endpoint: "/v1/completions".to_owned(),
        errors: None,
        input_file_id: "file-1".to_owned(),
        completion_window: "24h".to_owned(),
        status,
        output_file_id: None,
        error_file_id: None,
        created_at: 1,
        in_progress_at: None,
        expires_at: 86_401,
        finalizing_at: None,
        completed_at: None,
        failed_at: None,
        expired_at: None,
        cancelling_at: None,
        cancelled_at: None,
        request_counts: RequestCounts::default(),
        metadata: None,
    }
}
