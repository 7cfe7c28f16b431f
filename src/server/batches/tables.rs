//! The tables of files and batches, and what is asked of them.
//!
//! Invariant: each query for a client has its owner as a condition.

use super::wire::{BatchObject, BatchStatus, FileObject, Purpose};
use crate::server::auth::Owner;
use anyhow::{Context, Result};
use rusqlite::{Connection, OptionalExtension, Row, params};
use std::collections::HashSet;

/// The tables of version 1.
pub const SCHEMA: &str = "
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER
) STRICT;
CREATE INDEX files_by_owner ON files (owner, seq);
CREATE INDEX files_by_expiry ON files (expires_at) WHERE expires_at IS NOT NULL;
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    output_lifetime INTEGER,
    ended_at INTEGER,
    object TEXT NOT NULL
) STRICT;
CREATE INDEX batches_by_owner ON batches (owner, seq);
CREATE INDEX batches_by_status ON batches (status);
CREATE INDEX batches_by_end ON batches (ended_at);
CREATE INDEX open_batches_by_input ON batches (input_file_id) WHERE ended_at IS NULL;
";

/// Least number of bytes as which a file counts, so that no client can have any number of empty ones.
const FILE_BYTES_MIN: i64 = 4096;

/// Maximum number of batches of an owner that are kept after their end.
const ENDED_MAX: i64 = 10_000;

/// A file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRow {
    pub id: String,
    pub owner: Owner,
    pub name: String,
    pub purpose: Purpose,
    pub bytes: u64,
    pub created_at: i64,
    pub expires_at: Option<i64>,
}

/// A batch.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchRow {
    pub owner: Owner,
    /// Time in seconds for which its answers are kept, if it says so.
    pub output_lifetime: Option<i64>,
    pub object: BatchObject,
}

/// The part of a list that is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Id of the entry before the first one; `None` for the beginning.
    pub after: Option<String>,
    pub limit: i64,
    /// Whether the oldest entries come first.
    pub is_ascending: bool,
}

/// The outcome of a change that a limit may forbid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checked {
    Done,
    /// Beyond the limit.
    Refused,
}

impl FileRow {
    /// Returns the file as the API shows it.
    pub fn object(self) -> FileObject {
        FileObject {
            id: self.id,
            object: "file",
            bytes: self.bytes,
            created_at: self.created_at,
            expires_at: self.expires_at,
            filename: self.name,
            purpose: self.purpose.name().to_owned(),
            status: "processed",
        }
    }

    fn read(row: &Row<'_>) -> rusqlite::Result<FileRow> {
        let purpose: String = row.get("purpose")?;
        Ok(FileRow {
            id: row.get("id")?,
            owner: Owner(row.get::<_, String>("owner")?.into()),
            name: row.get("name")?,
            purpose: if purpose == Purpose::Batch.name() { Purpose::Batch } else { Purpose::BatchOutput },
            bytes: row.get::<_, i64>("bytes")?.unsigned_abs(),
            created_at: row.get("created_at")?,
            expires_at: row.get("expires_at")?,
        })
    }
}

impl BatchRow {
    fn read(row: &Row<'_>) -> Result<BatchRow> {
        let object: String = row.get("object")?;
        Ok(BatchRow {
            owner: Owner(row.get::<_, String>("owner")?.into()),
            output_lifetime: row.get("output_lifetime")?,
            object: serde_json::from_str(&object).context("a batch in the database is invalid")?,
        })
    }
}

/// Returns the number of bytes of an owner's files.
pub fn used_bytes(db: &Connection, owner: &Owner) -> Result<u64> {
    let sum = "SELECT COALESCE(SUM(MAX(bytes, ?2)), 0) FROM files WHERE owner = ?1";
    let bytes: i64 = db.query_row(sum, params![owner.0, FILE_BYTES_MIN], |row| row.get(0))?;
    Ok(bytes.unsigned_abs())
}

/// Adds a file, unless its owner's files then take more than `quota` bytes.
pub fn insert_file(db: &Connection, file: &FileRow, quota: Option<u64>) -> Result<Checked> {
    let bytes = i64::try_from(file.bytes).context("a file is too large")?;
    let counted = bytes.max(FILE_BYTES_MIN).unsigned_abs();
    if let Some(quota) = quota
        && used_bytes(db, &file.owner)?.saturating_add(counted) > quota
    {
        return Ok(Checked::Refused);
    }
    db.execute(
        "INSERT INTO files (id, owner, name, purpose, bytes, created_at, expires_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        params![
            file.id,
            file.owner.0,
            file.name,
            file.purpose.name(),
            bytes,
            file.created_at,
            file.expires_at
        ],
    )?;
    Ok(Checked::Done)
}

/// Returns a file of an owner.
pub fn file(db: &Connection, owner: &Owner, id: &str) -> Result<Option<FileRow>> {
    let query = "SELECT * FROM files WHERE owner = ?1 AND id = ?2";
    Ok(db.query_row(query, params![owner.0, id], FileRow::read).optional()?)
}

/// Returns a page of an owner's files and whether others follow; `None` if there is no file `page.after`.
pub fn files(
    db: &Connection,
    owner: &Owner,
    page: &Page,
    purpose: Option<&str>,
) -> Result<Option<(Vec<FileRow>, bool)>> {
    let Some((after, order)) = start(db, "files", owner, page)? else { return Ok(None) };
    let query = format!(
        "SELECT * FROM files WHERE owner = ?1 AND (?2 IS NULL OR purpose = ?2) AND {after} {order} LIMIT ?3"
    );
    let mut query = db.prepare(&query)?;
    let rows = query.query_map(params![owner.0, purpose, page.limit + 1], FileRow::read)?;
    let rows = rows.collect::<rusqlite::Result<Vec<_>>>()?;
    Ok(Some(cut(rows, page)))
}

/// Returns the condition and the order of a page; `None` if there is no entry `page.after`.
fn start(db: &Connection, table: &str, owner: &Owner, page: &Page) -> Result<Option<(String, &'static str)>> {
    let after = match &page.after {
        None => None,
        Some(id) => {
            let query = format!("SELECT seq FROM {table} WHERE owner = ?1 AND id = ?2");
            let seq = db.query_row(&query, params![owner.0, id], |row| row.get::<_, i64>(0)).optional()?;
            let Some(seq) = seq else { return Ok(None) };
            Some(seq)
        }
    };
    Ok(Some(match (after, page.is_ascending) {
        (None, true) => ("TRUE".to_owned(), "ORDER BY seq"),
        (None, false) => ("TRUE".to_owned(), "ORDER BY seq DESC"),
        (Some(seq), true) => (format!("seq > {seq}"), "ORDER BY seq"),
        (Some(seq), false) => (format!("seq < {seq}"), "ORDER BY seq DESC"),
    }))
}

/// Returns the entries of a page, of which one more was read, and whether others follow.
fn cut<T>(mut rows: Vec<T>, page: &Page) -> (Vec<T>, bool) {
    let limit = usize::try_from(page.limit).unwrap_or(0);
    let has_more = rows.len() > limit;
    rows.truncate(limit);
    (rows, has_more)
}

/// Removes a file.
pub fn delete_file(db: &Connection, id: &str) -> Result<()> {
    db.execute("DELETE FROM files WHERE id = ?1", [id])?;
    Ok(())
}

/// Removes the files whose time has passed, except for requests of batches that have not ended. Returns their
/// ids.
pub fn delete_expired_files(db: &Connection, now: i64) -> Result<Vec<String>> {
    let query = "DELETE FROM files WHERE expires_at <= ?1 AND NOT EXISTS
                 (SELECT 1 FROM batches WHERE input_file_id = files.id AND ended_at IS NULL) RETURNING id";
    let mut query = db.prepare(query)?;
    let ids = query.query_map([now], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
    Ok(ids)
}

/// Returns the ids of all files, of all owners.
pub fn file_ids(db: &Connection) -> Result<HashSet<String>> {
    let mut query = db.prepare("SELECT id FROM files")?;
    let ids = query.query_map([], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
    Ok(ids)
}

/// Adds a batch, unless its owner then has more than `most` that have not ended.
pub fn insert_batch(db: &Connection, batch: &BatchRow, most: usize) -> Result<Checked> {
    let count = "SELECT COUNT(*) FROM batches WHERE owner = ?1 AND ended_at IS NULL";
    let open: i64 = db.query_row(count, [&batch.owner.0], |row| row.get(0))?;
    if usize::try_from(open)? >= most {
        return Ok(Checked::Refused);
    }
    let object = &batch.object;
    db.execute(
        "INSERT INTO batches (id, owner, status, input_file_id, output_lifetime, object)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        params![
            object.id,
            batch.owner.0,
            object.status.name(),
            object.input_file_id,
            batch.output_lifetime,
            serde_json::to_string(object)?
        ],
    )?;
    // Few queries are made for the others, but their number must have a limit.
    let old = "DELETE FROM batches WHERE owner = ?1 AND ended_at IS NOT NULL AND seq <=
               (SELECT seq FROM batches WHERE owner = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)";
    db.execute(old, params![batch.owner.0, ENDED_MAX])?;
    Ok(Checked::Done)
}

/// Writes a batch that has changed.
pub fn update_batch(db: &Connection, object: &BatchObject, now: i64) -> Result<()> {
    let ended_at = object.status.is_final().then_some(now);
    db.execute(
        "UPDATE batches SET status = ?2, ended_at = ?3, object = ?4 WHERE id = ?1",
        params![object.id, object.status.name(), ended_at, serde_json::to_string(object)?],
    )?;
    Ok(())
}

/// Returns a batch of an owner.
pub fn batch(db: &Connection, owner: &Owner, id: &str) -> Result<Option<BatchRow>> {
    let mut query = db.prepare("SELECT * FROM batches WHERE owner = ?1 AND id = ?2")?;
    let mut rows = query.query(params![owner.0, id])?;
    rows.next()?.map(BatchRow::read).transpose()
}

/// Returns a page of an owner's batches and whether others follow; `None` if there is no batch `page.after`.
pub fn batches(db: &Connection, owner: &Owner, page: &Page) -> Result<Option<(Vec<BatchRow>, bool)>> {
    let Some((after, order)) = start(db, "batches", owner, page)? else { return Ok(None) };
    let query = format!("SELECT * FROM batches WHERE owner = ?1 AND {after} {order} LIMIT ?2");
    let mut query = db.prepare(&query)?;
    let rows = read_batches(query.query(params![owner.0, page.limit + 1])?)?;
    Ok(Some(cut(rows, page)))
}

/// Returns the batches that have not ended, of all owners, the oldest first.
pub fn open_batches(db: &Connection) -> Result<Vec<BatchRow>> {
    let mut query = db.prepare("SELECT * FROM batches WHERE ended_at IS NULL ORDER BY seq")?;
    read_batches(query.query([])?)
}

fn read_batches(mut rows: rusqlite::Rows<'_>) -> Result<Vec<BatchRow>> {
    let mut batches = Vec::new();
    while let Some(row) = rows.next()? {
        batches.push(BatchRow::read(row)?);
    }
    Ok(batches)
}

/// Returns the id of a batch with these requests that has not ended.
pub fn batch_with_input(db: &Connection, file: &str) -> Result<Option<String>> {
    let query = "SELECT id FROM batches WHERE input_file_id = ?1 AND ended_at IS NULL LIMIT 1";
    Ok(db.query_row(query, [file], |row| row.get(0)).optional()?)
}

/// Removes the batches that ended before `time`.
pub fn delete_ended_batches(db: &Connection, time: i64) -> Result<()> {
    db.execute("DELETE FROM batches WHERE ended_at < ?1", [time])?;
    Ok(())
}

/// Returns the number of batches by status.
pub fn count_batches(db: &Connection) -> Result<Vec<(&'static str, i64)>> {
    let mut query = db.prepare("SELECT COUNT(*) FROM batches WHERE status = ?1")?;
    let names = BatchStatus::ALL.into_iter().map(BatchStatus::name);
    names.map(|name| Ok((name, query.query_row([name], |row| row.get(0))?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::batches::testing::object;

    fn open() -> Connection {
        let db = Connection::open_in_memory().unwrap();
        db.execute_batch(SCHEMA).unwrap();
        db
    }

    fn owner(name: &str) -> Owner {
        Owner(name.into())
    }

    fn row(id: &str, name: &str, bytes: u64, expires_at: Option<i64>) -> FileRow {
        let (id, owner, name) = (id.to_owned(), owner(name), "a.jsonl".to_owned());
        FileRow { id, owner, name, purpose: Purpose::Batch, bytes, created_at: 5, expires_at }
    }

    #[test]
    fn lists_have_pages_in_both_orders_and_only_ones_own() {
        let db = open();
        for (index, name) in ["me", "you", "me", "me"].into_iter().enumerate() {
            insert_file(&db, &row(&format!("f{index}"), name, 1, None), None).unwrap();
            let batch = BatchRow {
                owner: owner(name),
                output_lifetime: Some(7),
                object: object(&format!("b{index}"), BatchStatus::Validating),
            };
            assert_eq!(insert_batch(&db, &batch, 9).unwrap(), Checked::Done);
        }
        for (after, limit, is_ascending, expected) in [
            (None, 2, true, Some((&["0", "2"][..], true))),
            (Some("2"), 2, true, Some((&["3"], false))),
            (None, 3, false, Some((&["3", "2", "0"], false))),
            (Some("3"), 1, false, Some((&["2"], true))),
            (Some("1"), 1, false, None),
        ] {
            let page = |kind| Page { after: after.map(|it| format!("{kind}{it}")), limit, is_ascending };
            let with = |kind: char, found: Option<(Vec<String>, bool)>| {
                let expected = expected.map(|(ids, more)| {
                    (ids.iter().map(|id| format!("{kind}{id}")).collect::<Vec<_>>(), more)
                });
                assert_eq!(found, expected);
            };
            let found = files(&db, &owner("me"), &page('f'), Some("batch")).unwrap();
            with('f', found.map(|(rows, more)| (rows.into_iter().map(|row| row.id).collect(), more)));
            let found = batches(&db, &owner("me"), &page('b')).unwrap();
            with('b', found.map(|(rows, more)| (rows.into_iter().map(|row| row.object.id).collect(), more)));
        }
        let all = Page { after: None, limit: 9, is_ascending: true };
        let others = files(&db, &owner("me"), &all, Some("batch_output")).unwrap();
        assert_eq!(others, Some((vec![], false)));
        assert!(file(&db, &owner("you"), "f0").unwrap().is_none());
        assert!(batch(&db, &owner("you"), "b0").unwrap().is_none());
        assert_eq!(file(&db, &owner("me"), "f0").unwrap(), Some(row("f0", "me", 1, None)));
    }

    #[test]
    fn limits_are_those_of_an_owner() {
        let db = open();
        let add = |id: &str, name: &str, bytes| insert_file(&db, &row(id, name, bytes, None), Some(20_000));
        assert_eq!(add("a", "me", 10_000).unwrap(), Checked::Done);
        assert_eq!(add("b", "me", 0).unwrap(), Checked::Done);
        assert_eq!(used_bytes(&db, &owner("me")).unwrap(), 14_096);
        assert_eq!(add("c", "me", 5905).unwrap(), Checked::Refused);
        assert_eq!(add("c", "you", 5905).unwrap(), Checked::Done);
        delete_file(&db, "b").unwrap();
        assert_eq!(add("d", "me", 5905).unwrap(), Checked::Done);
        let batch = |id: &str, most| {
            let object = object(id, BatchStatus::Validating);
            insert_batch(&db, &BatchRow { owner: owner("me"), output_lifetime: None, object }, most).unwrap()
        };
        let added = [batch("a", 1), batch("b", 1)];
        update_batch(&db, &object("a", BatchStatus::Completed), 77).unwrap();
        assert_eq!((added, batch("b", 1)), ([Checked::Done, Checked::Refused], Checked::Done));
        assert_eq!(open_batches(&db).unwrap().len(), 1);
        let counts = count_batches(&db).unwrap();
        assert!(counts.contains(&("completed", 1)) && counts.contains(&("validating", 1)));
        delete_ended_batches(&db, 77).unwrap();
        assert!(self::batch(&db, &owner("me"), "a").unwrap().is_some());
        delete_ended_batches(&db, 78).unwrap();
        assert!(self::batch(&db, &owner("me"), "a").unwrap().is_none());
    }

    #[test]
    fn the_requests_of_a_batch_do_not_expire_before_it_ends() {
        let db = open();
        for (id, expires_at) in [("in", Some(10)), ("other", Some(10)), ("later", Some(11)), ("never", None)]
        {
            insert_file(&db, &row(id, "me", 1, expires_at), None).unwrap();
        }
        let mut batch = BatchRow {
            owner: owner("me"),
            output_lifetime: None,
            object: BatchObject { input_file_id: "in".into(), ..object("b", BatchStatus::InProgress) },
        };
        insert_batch(&db, &batch, 1).unwrap();
        assert_eq!(batch_with_input(&db, "in").unwrap().as_deref(), Some("b"));
        assert_eq!(delete_expired_files(&db, 10).unwrap(), ["other"]);
        batch.object.status = BatchStatus::Failed;
        update_batch(&db, &batch.object, 10).unwrap();
        assert_eq!(batch_with_input(&db, "in").unwrap(), None);
        assert_eq!(delete_expired_files(&db, 10).unwrap(), ["in"]);
        assert_eq!(file_ids(&db).unwrap(), ["later".to_owned(), "never".to_owned()].into());
    }
}
