//! The objects of files and batches, as in OpenAI's API.
//!
//! Invariant: a batch has the ids of its answers once it has ended, and of those files only that exist.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// A file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct FileObject {
    pub id: String,
    pub object: &'static str,
    pub bytes: u64,
    pub created_at: i64,
    pub expires_at: Option<i64>,
    pub filename: String,
    pub purpose: String,
    /// Deprecated by OpenAI, but a required field of its client library.
    pub status: &'static str,
}

/// The purpose of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Requests.
    Batch,
    /// Answers.
    BatchOutput,
}

impl Purpose {
    /// Returns its name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Batch => "batch",
            Purpose::BatchOutput => "batch_output",
        }
    }
}

/// The response to the deletion of a file.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct DeletedFile {
    pub id: String,
    pub object: &'static str,
    pub deleted: bool,
}

/// A page of a list.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ListObject<T> {
    object: &'static str,
    data: Vec<T>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}

impl<T> ListObject<T> {
    /// Creates a page, whose entries have these ids. `has_more` is whether entries follow.
    pub fn new(data: Vec<T>, has_more: bool, id: fn(&T) -> &str) -> ListObject<T> {
        let [first_id, last_id] = [data.first(), data.last()].map(|entry| entry.map(|it| id(it).to_owned()));
        ListObject { object: "list", data, first_id, last_id, has_more }
    }
}

/// The status of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BatchStatus {
    Validating,
    Failed,
    InProgress,
    Finalizing,
    Completed,
    Expired,
    Cancelling,
    Cancelled,
}

impl BatchStatus {
    /// All of them.
    pub const ALL: [BatchStatus; 8] = [
        BatchStatus::Validating,
        BatchStatus::Failed,
        BatchStatus::InProgress,
        BatchStatus::Finalizing,
        BatchStatus::Completed,
        BatchStatus::Expired,
        BatchStatus::Cancelling,
        BatchStatus::Cancelled,
    ];

    /// Returns its name in the API.
    pub fn name(self) -> &'static str {
        match self {
            BatchStatus::Validating => "validating",
            BatchStatus::Failed => "failed",
            BatchStatus::InProgress => "in_progress",
            BatchStatus::Finalizing => "finalizing",
            BatchStatus::Completed => "completed",
            BatchStatus::Expired => "expired",
            BatchStatus::Cancelling => "cancelling",
            BatchStatus::Cancelled => "cancelled",
        }
    }

    /// Returns whether the batch has ended.
    pub fn is_final(self) -> bool {
        match self {
            BatchStatus::Failed | BatchStatus::Completed | BatchStatus::Expired | BatchStatus::Cancelled => {
                true
            }
            BatchStatus::Validating
            | BatchStatus::InProgress
            | BatchStatus::Finalizing
            | BatchStatus::Cancelling => false,
        }
    }
}

/// A batch. Times are in seconds since 1970.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BatchObject {
    pub id: String,
    /// Always "batch".
    pub object: String,
    pub endpoint: String,
    pub errors: Option<BatchErrors>,
    pub input_file_id: String,
    pub completion_window: String,
    pub status: BatchStatus,
    pub output_file_id: Option<String>,
    pub error_file_id: Option<String>,
    pub created_at: i64,
    pub in_progress_at: Option<i64>,
    pub expires_at: i64,
    pub finalizing_at: Option<i64>,
    pub completed_at: Option<i64>,
    pub failed_at: Option<i64>,
    pub expired_at: Option<i64>,
    pub cancelling_at: Option<i64>,
    pub cancelled_at: Option<i64>,
    pub request_counts: RequestCounts,
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Map<String, Value>>,
}

/// Numbers of requests of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RequestCounts {
    pub total: u64,
    pub completed: u64,
    pub failed: u64,
}

/// The reasons for which a batch has failed or was cancelled by the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BatchErrors {
    /// Always "list".
    object: String,
    pub data: Vec<BatchError>,
}

/// A reason for which a batch has failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BatchError {
    pub code: String,
    /// Number of the line in the file of requests, from 1.
    pub line: Option<u64>,
    pub message: String,
    pub param: Option<String>,
}

impl BatchObject {
    /// Adds a reason for which it has failed.
    pub fn add_error(&mut self, code: &str, line: Option<u64>, message: String) {
        let list = || BatchErrors { object: "list".to_owned(), data: Vec::new() };
        let error = BatchError { code: code.to_owned(), line, message, param: None };
        self.errors.get_or_insert_with(list).data.push(error);
    }

    /// Sets the status, and its time if this is the first time.
    pub fn set_status(&mut self, status: BatchStatus, now: i64) {
        self.status = status;
        let time = match status {
            BatchStatus::Validating => return,
            BatchStatus::Failed => &mut self.failed_at,
            BatchStatus::InProgress => &mut self.in_progress_at,
            BatchStatus::Finalizing => &mut self.finalizing_at,
            BatchStatus::Completed => &mut self.completed_at,
            BatchStatus::Expired => &mut self.expired_at,
            BatchStatus::Cancelling => &mut self.cancelling_at,
            BatchStatus::Cancelled => &mut self.cancelled_at,
        };
        time.get_or_insert(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_a_status_agree() {
        for status in BatchStatus::ALL {
            assert_eq!(serde_json::to_value(status).unwrap(), status.name());
        }
    }
}
