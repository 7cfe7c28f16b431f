//! Responses that are kept, in the database of files and batches, so that later requests can go on from them.
//!
//! Invariant: each query for a client has its owner as a condition, and what an owner has is bounded in size,
//! number and age.

use super::tables::Checked;
use super::{Batches, Service, now, storage_error};
use crate::server::auth::Owner;
use crate::server::error::ApiError;
use anyhow::{Context, Result};
use rusqlite::types::FromSql;
use rusqlite::{Connection, OptionalExtension, params};
use serde_json::Value;
use std::sync::Arc;

/// The table of version 2.
pub const SCHEMA: &str = "
CREATE TABLE responses (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    object TEXT NOT NULL,
    input TEXT NOT NULL,
    messages TEXT NOT NULL
) STRICT;
CREATE INDEX responses_by_owner ON responses (owner, seq, bytes);
CREATE INDEX responses_by_expiry ON responses (expires_at);
";

/// Maximum number of responses that are kept for an owner.
const RESPONSES_MAX: usize = 10_000;

/// A response to keep; all parts are JSON.
#[derive(Clone, Debug)]
pub struct NewResponse {
    pub id: String,
    /// The response object.
    pub object: String,
    /// List of the input items.
    pub input: String,
    /// List of the messages of the conversation, with the answer and without instructions.
    pub messages: String,
}

impl Service {
    /// Keeps a response for an owner, and removes its oldest ones beyond its quota.
    pub async fn keep_response(&self, owner: &Owner, response: NewResponse) -> Result<(), ApiError> {
        let batches = self.get()?;
        let quota = batches.config.responses_quota_bytes;
        let retention = i64::try_from(batches.config.responses_retention.as_secs()).unwrap_or(i64::MAX);
        let (owner, expires_at) = (owner.clone(), now().saturating_add(retention));
        let kept = batches.database.call(move |db| insert(db, &owner, &response, expires_at, quota)).await;
        match kept.map_err(|error| storage_error(&error))? {
            Checked::Done => Ok(()),
            Checked::Refused => Err(over_quota(quota)),
        }
    }

    /// Fails if a response with so many bytes cannot be kept.
    pub fn check_response_bytes(&self, bytes: usize) -> Result<(), ApiError> {
        let quota = self.get()?.config.responses_quota_bytes;
        if bytes as u64 > quota { Err(over_quota(quota)) } else { Ok(()) }
    }

    /// Returns the length of the conversation of an owner's response, as JSON in bytes.
    pub async fn conversation_bytes(&self, owner: &Owner, id: &str) -> Result<usize, ApiError> {
        let missing = || ApiError::no_previous_response(id);
        let batches = self.0.as_ref().ok_or_else(missing)?;
        let bytes = column(batches, owner, id, "OCTET_LENGTH(messages)", |bytes: i64| Ok(bytes));
        Ok(usize::try_from(bytes.await?.ok_or_else(missing)?).unwrap_or_default())
    }

    /// Returns the conversation of an owner's response as a JSON list of messages.
    pub async fn conversation(&self, owner: &Owner, id: &str) -> Result<String, ApiError> {
        let missing = || ApiError::no_previous_response(id);
        let batches = self.0.as_ref().ok_or_else(missing)?;
        column(batches, owner, id, "messages", Ok).await?.ok_or_else(missing)
    }

    /// Returns an owner's response as JSON.
    pub async fn response(&self, owner: &Owner, id: &str) -> Result<String, ApiError> {
        let found = column(self.get()?, owner, id, "object", Ok).await?;
        found.ok_or_else(|| ApiError::no_such("response", id))
    }

    /// Returns the input items of an owner's response.
    pub async fn response_input(&self, owner: &Owner, id: &str) -> Result<Vec<Value>, ApiError> {
        let parse = |text: String| serde_json::from_str(&text).context("the kept input is invalid");
        let found = column(self.get()?, owner, id, "input", parse).await?;
        found.ok_or_else(|| ApiError::no_such("response", id))
    }

    /// Removes an owner's response.
    pub async fn delete_response(&self, owner: &Owner, id: &str) -> Result<(), ApiError> {
        let (owner, wanted) = (owner.clone(), id.to_owned());
        let delete = move |db: &rusqlite::Transaction<'_>| {
            let query = "DELETE FROM responses WHERE owner = ?1 AND id = ?2 AND expires_at > ?3";
            Ok(db.execute(query, params![owner.0, wanted, now()])?)
        };
        let deleted = self.get()?.database.call(delete).await.map_err(|error| storage_error(&error))?;
        if deleted > 0 { Ok(()) } else { Err(ApiError::no_such("response", id)) }
    }
}

/// Returns the error for a conversation that is too long to be kept.
fn over_quota(quota: u64) -> ApiError {
    ApiError::quota_exceeded(format!(
        "the conversation takes more than the {quota} bytes that may be kept (batches.responses_quota); \
         'store': false keeps nothing"
    ))
}

/// Returns a column of an owner's response, read by `read` on the thread of the database.
async fn column<C: FromSql + 'static, T: Send + 'static>(
    batches: &Arc<Batches>,
    owner: &Owner,
    id: &str,
    name: &'static str,
    read: fn(C) -> Result<T>,
) -> Result<Option<T>, ApiError> {
    let (owner, id) = (owner.clone(), id.to_owned());
    let find =
        move |db: &rusqlite::Transaction<'_>| find(db, &owner, &id, name, now())?.map(read).transpose();
    batches.database.call(find).await.map_err(|error| storage_error(&error))
}

/// Returns a column of an owner's response that has not expired.
fn find<C: FromSql>(db: &Connection, owner: &Owner, id: &str, column: &str, now: i64) -> Result<Option<C>> {
    let query = format!("SELECT {column} FROM responses WHERE owner = ?1 AND id = ?2 AND expires_at > ?3");
    Ok(db.query_row(&query, params![owner.0, id, now], |row| row.get(0)).optional()?)
}

/// Adds a response, and removes the oldest ones of its owner that then take more than `quota` bytes. Refuses
/// one that takes more alone.
fn insert(
    db: &Connection,
    owner: &Owner,
    NewResponse { id, object, input, messages }: &NewResponse,
    expires_at: i64,
    quota: u64,
) -> Result<Checked> {
    let bytes = object.len() + input.len() + messages.len();
    if bytes as u64 > quota {
        return Ok(Checked::Refused);
    }
    db.execute(
        "INSERT INTO responses (id, owner, bytes, expires_at, object, input, messages)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        params![id, owner.0, i64::try_from(bytes)?, expires_at, object, input, messages],
    )?;
    let beyond = "DELETE FROM responses WHERE seq IN
                  (SELECT seq FROM (SELECT seq,
                   SUM(bytes) OVER newest AS total, ROW_NUMBER() OVER newest AS number
                   FROM responses WHERE owner = ?1 WINDOW newest AS (ORDER BY seq DESC))
                   WHERE total > ?2 OR number > ?3)";
    let quota = i64::try_from(quota).unwrap_or(i64::MAX);
    db.execute(beyond, params![owner.0, quota, i64::try_from(RESPONSES_MAX)?])?;
    Ok(Checked::Done)
}

/// Removes the responses whose time has passed.
pub fn delete_expired(db: &Connection, now: i64) -> Result<()> {
    db.execute("DELETE FROM responses WHERE expires_at <= ?1", [now])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(db: &Connection, name: &str, id: &str, length: usize, expires_at: i64) -> Checked {
        let response = NewResponse {
            id: id.to_owned(),
            object: "o".repeat(length),
            input: "[]".to_owned(),
            messages: "[]".to_owned(),
        };
        insert(db, &Owner(name.into()), &response, expires_at, 1000).unwrap()
    }

    fn ids(db: &Connection) -> Vec<String> {
        let mut query = db.prepare("SELECT id FROM responses ORDER BY seq").unwrap();
        query.query_map([], |row| row.get(0)).unwrap().collect::<rusqlite::Result<_>>().unwrap()
    }

    #[test]
    fn the_oldest_of_an_owner_make_room_and_the_expired_go() {
        let db = Connection::open_in_memory().unwrap();
        db.execute_batch(SCHEMA).unwrap();
        for (name, id, length) in [("you", "y", 996), ("me", "a", 300), ("me", "b", 300), ("me", "c", 300)] {
            assert_eq!(add(&db, name, id, length, 50), Checked::Done);
        }
        assert_eq!(ids(&db), ["y", "a", "b", "c"]);
        assert_eq!(add(&db, "me", "d", 400, 60), Checked::Done);
        assert_eq!(ids(&db), ["y", "c", "d"]);
        assert_eq!(add(&db, "me", "e", 997, 50), Checked::Refused);
        let found = |name: &str, id, now| {
            find::<String>(&db, &Owner(name.into()), id, "input", now).unwrap().is_some()
        };
        assert_eq!([found("me", "c", 49), found("me", "c", 50), found("you", "c", 49)], [true, false, false]);
        delete_expired(&db, 50).unwrap();
        assert_eq!(ids(&db), ["d"]);
    }
}
