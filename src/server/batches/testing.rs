//! Batches for the tests of several files.

use super::wire::{BatchObject, BatchStatus, RequestCounts};

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
