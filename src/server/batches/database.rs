//! The database of files and batches: SQLite, with a thread of its own that owns the connection.
//!
//! Invariant: what a call has written is on the disk when the call returns.

use super::{lock, responses, tables};
use anyhow::{Context, Result, ensure};
use rusqlite::{Connection, Transaction};
use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};
use std::thread::Builder;
use tokio::sync::oneshot;

/// Statements that bring a database from each version to the next one, from 0 on. A database has its version
/// as `user_version`.
const MIGRATIONS: [&str; 2] = [tables::SCHEMA, responses::SCHEMA];
const VERSION: i64 = MIGRATIONS.len() as i64;

/// Work of the thread.
type Work = Box<dyn FnOnce(&mut Connection) + Send>;

/// The database. The thread ends when this is dropped or closed.
pub struct Database(Mutex<Option<Open>>);

/// The thread of a database.
struct Open {
    work: Sender<Work>,
    /// Completes when the thread ends.
    ended: oneshot::Receiver<()>,
}

impl Database {
    /// Opens or creates a database, and returns it with the result of `first`. Fails if a later version of
    /// this program has written it.
    pub fn open<T>(path: &Path, first: impl FnOnce(&Connection) -> Result<T>) -> Result<(Database, T)> {
        let named = || format!("batches.data_dir: cannot use the database {}", path.display());
        let connection = connect(path).with_context(named)?;
        let first = first(&connection).with_context(named)?;
        let (work, queue) = channel::<Work>();
        let (running, ended) = oneshot::channel();
        let thread = Builder::new().name("batches-db".to_owned());
        let run = move || {
            let _running = running;
            let mut connection = connection;
            queue.into_iter().for_each(|work| work(&mut connection));
        };
        thread.spawn(run).with_context(named)?;
        Ok((Database(Mutex::new(Some(Open { work, ended }))), first))
    }

    /// Waits until all calls so far are done and the database is closed. Later ones fail.
    pub async fn close(&self) {
        let open = lock(&self.0).take();
        if let Some(Open { work, ended }) = open {
            drop(work);
            _ = ended.await;
        }
    }

    /// Runs `work` in a transaction, which is rolled back if it fails.
    pub async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, result) = oneshot::channel();
        let run = move |connection: &mut Connection| {
            let run = || {
                let transaction = connection.transaction()?;
                let done = work(&transaction)?;
                transaction.commit()?;
                Ok(done)
            };
            // A caller that is gone does not need it.
            _ = reply.send(run());
        };
        let is_sent = lock(&self.0).as_ref().is_some_and(|open| open.work.send(Box::new(run)).is_ok());
        ensure!(is_sent, "the thread of the database has ended");
        result.await.context("the thread of the database has failed")?
    }
}

/// Connects to a database and brings it to the current version.
fn connect(path: &Path) -> Result<Connection> {
    let mut connection = Connection::open(path)?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    let version: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    ensure!(
        (0..=VERSION).contains(&version),
        "it has the version {version}; this program knows versions up to {VERSION}"
    );
    if version < VERSION {
        let transaction = connection.transaction()?;
        for migration in &MIGRATIONS[usize::try_from(version)?..] {
            transaction.execute_batch(migration)?;
        }
        transaction.pragma_update(None, "user_version", VERSION)?;
        transaction.commit()?;
    }
    Ok(connection)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;
    use anyhow::bail;
    use futures_util::FutureExt;

    #[actix_web::test]
    async fn a_database_of_a_later_version_is_refused() {
        let folder = Scratch::new();
        let path = folder.path().join("db");
        for version in [VERSION, VERSION + 1, -1] {
            let (database, ()) = Database::open(&path, |_| Ok(())).unwrap();
            let set = move |it: &Transaction<'_>| Ok(it.pragma_update(None, "user_version", version)?);
            database.call(set).await.unwrap();
            drop(database);
            let error = Database::open(&path, |_| Ok(())).err().map(|error| format!("{error:#}"));
            assert_eq!(error.is_some(), version != VERSION, "{error:?}");
            assert!(error.is_none_or(|error| error.contains(&format!("it has the version {version}; "))));
            Connection::open(&path).unwrap().pragma_update(None, "user_version", VERSION).unwrap();
        }
        // Another file: the thread of a database that was dropped may still have its log.
        let path = folder.path().join("other");
        std::fs::write(&path, "no database at all, whatever it is").unwrap();
        let error = Database::open(&path, |_| Ok(())).err().unwrap().to_string();
        assert!(error.starts_with("batches.data_dir: cannot use the database "), "{error}");
    }

    /// A folder that a server without responses has written is taken over as it is.
    #[actix_web::test]
    async fn a_database_of_an_earlier_version_is_extended() {
        let folder = Scratch::new();
        let path = folder.path().join("db");
        let old = Connection::open(&path).unwrap();
        old.execute_batch(MIGRATIONS[0]).unwrap();
        old.execute("INSERT INTO files VALUES (1, 'f', 'me', 'n', 'batch', 3, 5, NULL)", []).unwrap();
        old.pragma_update(None, "user_version", 1).unwrap();
        drop(old);
        let count = |db: &Connection| {
            let rows = "SELECT (SELECT COUNT(*) FROM files), (SELECT COUNT(*) FROM responses)";
            Ok(db.query_row(rows, [], |row| Ok((row.get(0)?, row.get(1)?)))?)
        };
        let (_, counts): (_, (i64, i64)) = Database::open(&path, count).unwrap();
        assert_eq!(counts, (1, 0));
    }

    #[actix_web::test]
    async fn what_fails_changes_nothing() {
        let folder = Scratch::new();
        let (database, ()) = Database::open(&folder.path().join("db"), |_| Ok(())).unwrap();
        let fails = |it: &Transaction<'_>| -> Result<()> {
            it.execute("CREATE TABLE t (a)", [])?;
            bail!("no")
        };
        assert!(database.call(fails).await.is_err());
        let count = |it: &Transaction<'_>| {
            let tables = "SELECT COUNT(*) FROM sqlite_schema WHERE name = 't'";
            Ok(it.query_row(tables, [], |row| row.get::<_, i64>(0))?)
        };
        assert_eq!(database.call(count).await.unwrap(), 0);
    }

    /// Otherwise another server could open the folder before the last change is written.
    #[actix_web::test]
    async fn a_database_is_closed_after_all_calls() {
        let folder = Scratch::new();
        let path = folder.path().join("db");
        let (database, ()) = Database::open(&path, |_| Ok(())).unwrap();
        let (release, released) = channel();
        let write = move |it: &Transaction<'_>| {
            released.recv()?;
            Ok(it.execute("DROP TABLE files", [])?)
        };
        // A caller that is gone.
        assert!(database.call(write).now_or_never().is_none());
        let mut closing = Box::pin(database.close());
        assert!(closing.as_mut().now_or_never().is_none());
        assert!(database.call(|_| Ok(())).await.is_err());
        release.send(()).unwrap();
        closing.await;
        let error = Connection::open(&path).unwrap().execute("DROP TABLE files", []).unwrap_err();
        assert!(error.to_string().contains("no such table"), "{error}");
    }
}
